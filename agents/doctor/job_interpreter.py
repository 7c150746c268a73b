"""Checks the job's interpreter, which may differ from ringtap's: the hook, torch, Horovod and NCCL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringtap.agents import hook
from ringtap.agents.doctor.node_checks import on_alliance
from ringtap.collectors.collector_interface import Check
from ringtap.core.errors import failure_message
from ringtap.core.isolated_python import LEAVE_FOLDER_OUT
from ringtap.core.parent_death import run_helper

NAMES = ("steps", "ddp", "horovod", "nccl")
_PROBE_S = 8.0
_MIN_PYTHON = (3, 8)
# Runs under any Python version, and finds packages without importing them: `import torch` takes seconds.
_PROBE = (
    f"{LEAVE_FOLDER_OUT}\n"
    r"""
import json, os
found = {"version": list(sys.version_info[:3]), "executable": sys.executable}
if sys.version_info >= (3, 8):
    from importlib import metadata
    from importlib.machinery import PathFinder
    def version(*names):
        for name in names:
            try:
                return metadata.version(name)
            except Exception:
                pass
        return ""
    def folder(name):
        try:
            spec = PathFinder.find_spec(name, sys.path)
            return os.path.dirname(spec.origin) if spec and spec.origin else ""
        except Exception:
            return ""
    found["torch"] = version("torch")
    found["horovod"] = version("horovod")
    found["lightning"] = version("lightning", "pytorch-lightning")
    found["transformers"] = version("transformers")
    found["nccl"] = version("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
    torch = folder("torch")
    if torch:
        found["torch"] = found["torch"] or "of unknown version"
        try:
            with open(os.path.join(torch, "version.py")) as file:
                lines = [line.split("=")[-1].strip().strip("'\"") for line in file if line.startswith("cuda")]
            found["cuda"] = lines[0] if lines and lines[0] != "None" else ""
        except OSError:
            pass
    horovod = folder("horovod")
    if horovod:
        try:
            found["horovod_torch"] = any(name.endswith(".so") for name in os.listdir(os.path.join(horovod, "torch")))
        except OSError:
            found["horovod_torch"] = False
    found["sitecustomize"] = folder("sitecustomize")
    try:
        import ringtap_hook
    except Exception as error:
        found["hook_error"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""
)


def check(python: str = "", timeout_s: float = _PROBE_S) -> dict[str, Check]:
    """Query the job's interpreter; return a check for each of `NAMES`.

    It is the given one, else ``python`` or ``python3`` on the PATH, else ringtap's own.
    """
    program = next(filter(None, map(shutil.which, [python] if python else ["python", "python3", sys.executable])), None)
    if program is None:
        missing = Check("unavailable", f"there is no {python or 'python'} on the PATH", _python_remedy())
        return dict.fromkeys(NAMES, missing)
    folder = str(Path(hook.__file__).resolve().parent)
    try:
        found = _ask(program, folder, timeout_s)
    except subprocess.TimeoutExpired:
        late = Check("failed", f"{program} did not answer within {timeout_s:g} s", "ask again when less runs here")
        return dict.fromkeys(NAMES, late)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = "gave no answer" if isinstance(error, ValueError) else failure_message(error).splitlines()[0]
        failed = Check("unavailable", f"{program} cannot be asked: {reason}", _python_remedy())
        return dict.fromkeys(NAMES, failed)
    return judge(found, folder)


def _ask(program: str, folder: str, timeout_s: float) -> dict[str, Any]:
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    # without RINGTAP_RUN, the hook records nothing; no byte code is written beside it
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RINGTAP_")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_helper([program, "-c", _PROBE], timeout_s, env=environment)
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1] if lines else "")
    if not isinstance(found, dict):
        raise ValueError
    return found


def judge(found: dict[str, Any], folder: str) -> dict[str, Check]:
    """Turn the interpreter's answer into checks."""
    version = ".".join(str(part) for part in found["version"])
    name = f"{found['executable'] or 'python'} ({version})"
    if tuple(found["version"]) < _MIN_PYTHON:
        old = Check("unavailable", f"{name} is older than 3.8", _python_remedy())
        return dict.fromkeys(NAMES, old)
    return {"steps": _steps(found, name, folder), "ddp": _ddp(found), "horovod": _horovod(found), "nccl": _nccl(found)}


def _steps(found: dict[str, Any], name: str, folder: str) -> Check:
    if os.path.realpath(found.get("sitecustomize") or "") != folder:
        reason = f"{name} does not read PYTHONPATH, or finds another sitecustomize first: the hook is not loaded"
        return Check("unavailable", reason, "start the job without -I, -E and -S, or call ringtap.step() in its loop")
    if found.get("hook_error"):
        return Check("unavailable", f"the hook fails in {name}: {found['hook_error']}", "report this")
    if not found.get("torch"):
        reason = f"{name} has no torch: only calls of ringtap.step() are recorded"
        return Check("degraded", reason, _install("torch"))
    frameworks = [f"{title} {found[title]}" for title in ("lightning", "transformers") if found.get(title)]
    return Check("ok", ", ".join([f"{name} with torch {found['torch']}", *frameworks]))


def _ddp(found: dict[str, Any]) -> Check:
    if not found.get("torch"):
        return Check("unavailable", "no torch", _install("torch"))
    major = found["torch"].split(".")[0]
    if major.isdigit() and int(major) < 2:
        return Check("degraded", f"torch {found['torch']}: DDP's own times are tested from 2.0 on", _install("torch"))
    return Check("ok", "communication times, overlap and bucket sizes, as DDP logs them")


def _horovod(found: dict[str, Any]) -> Check:
    if not found.get("horovod") and "horovod_torch" not in found:
        return Check("unavailable", "Horovod is not installed", _horovod_remedy())
    if not found.get("horovod_torch"):
        return Check("unavailable", f"Horovod {found['horovod']} was built without torch", _horovod_remedy())
    return Check("ok", f"Horovod {found['horovod']}: its timeline, on request (--collect default,horovod)")


def _nccl(found: dict[str, Any]) -> Check:
    if found.get("nccl") or found.get("cuda"):
        what = f"NCCL {found['nccl']}" if found.get("nccl") else f"NCCL of torch's own (CUDA {found['cuda']})"
        return Check("ok", f"{what}: rings and interfaces, by NCCL_DEBUG")
    if found.get("torch"):
        return Check("unavailable", f"torch {found['torch']} is a build without CUDA", "nothing, without GPUs")
    return Check("unavailable", "no torch", _install("torch"))


def _python_remedy() -> str:
    if on_alliance():
        return "module load python/3.11, then activate the job's virtual environment"
    return "activate the job's environment first, or name its interpreter: --python PROGRAM"


def _install(package: str) -> str:
    if on_alliance():
        return f"module load python/3.11, activate the job's virtual environment, pip install --no-index {package}"
    return f"activate the job's environment, or pip install {package}; --python names another interpreter"


def _horovod_remedy() -> str:
    if on_alliance():
        return "nothing, for a job without it; else pip install --no-index horovod (with module load python/3.11)"
    return "nothing, for a job without it; else python -m ringtap.examples.build_horovod --install"
