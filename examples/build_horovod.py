"""Build Horovod for an interpreter's torch, and optionally install it there; its project publishes no wheels.

The sdist comes from the package index and is checked against the hash below before anything in it runs; a few edits
adapt it to current compilers and to hosts that cannot resolve their own name. The wheel is cached in ~/.cache/ringtap
(or $XDG_CACHE_HOME/ringtap) under everything that determines its contents, so a second call takes seconds. This module
needs only the standard library.

    python -m ringtap.examples.build_horovod --install
    python -m ringtap.examples.build_horovod --python .venv/bin/python --install
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
NICENESS = 10


@dataclass(frozen=True)
class Edit:
    """One change of the source; the old text must occur exactly once."""

    path: str
    old: str
    new: str


EDITS = (
    # torch's headers need C++17
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Otherwise process sets ignore HOROVOD_GLOO_IFACE and look up the host's own name, and crash if that fails.
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
    ),
    # Debug information would make the library 36 times as large, and is not needed.
    Edit(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        'project(horovod CXX)\nset(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")\n'
        'set(CMAKE_SHARED_LINKER_FLAGS "${CMAKE_SHARED_LINKER_FLAGS} -Wl,-s")\n',
    ),
)
# Build requirements apart from torch. CMake 4 refuses the source's old policies.
TOOLS = (
    "cmake==3.31.*",
    "setuptools>=70,<81",
    "wheel",
    "packaging",
    "cloudpickle",
    "psutil",
    "pyyaml",
    "cffi",
    "numpy",
)
RUN_TIME = ("cloudpickle", "psutil", "pyyaml", "packaging")
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}
# Run by the interpreter that Horovod is built for.
_FACTS = """
import json, os, platform, sys, sysconfig
try:
    import torch
except ImportError as error:
    print(json.dumps({"missing": str(error)}))
    sys.exit()
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(json.dumps({"python": sys.executable, "abi": sysconfig.get_config_var("SOABI"), "machine": platform.machine(),
                  "torch": torch.__version__, "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI),
                  "header": header, "has_header": os.path.exists(header)}))
"""


class BuildError(Exception):
    """Failure to build or install Horovod, in one sentence."""


def interpreter_facts(python: str) -> dict[str, Any]:
    """Return the facts about the interpreter that Horovod is built for, which determine the wheel's contents.

    Raises:
        BuildError: the interpreter does not run, or has no torch.
    """
    try:
        done = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{python} cannot be run: {error.strerror}; name an interpreter with --python") from error
    try:
        facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise BuildError(f"{python} does not work: {_last_line(done.stderr)}") from None
    if "missing" in facts:
        raise BuildError(
            f"{python} has no torch ({facts['missing']}), which Horovod is built against: install torch first"
        )
    return facts


def cache_folder(facts: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
    """Return the cache folder for the wheel of this source, interpreter and torch."""
    base = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    recipe = [[edit.path, edit.old, edit.new] for edit in EDITS], SETTINGS
    parts = [
        SDIST_SHA256,
        hashlib.sha256(json.dumps(recipe).encode()).hexdigest(),
        *(str(facts[name]) for name in ("torch", "cxx11_abi", "abi", "machine")),
    ]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return base / "ringtap" / f"horovod-{VERSION}-torch{facts['torch']}-{facts['abi']}-{key}"


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in this folder, or None."""
    return next(iter(sorted(folder.glob("*.whl"))), None)


def check_compiler(facts: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check that the build can begin.

    Raises:
        BuildError: the compiler, make or Python's headers are missing.
    """
    compiler = environment.get("CXX") or "c++"
    missing = [tool for tool in (compiler, "make") if not shutil.which(tool, path=environment.get("PATH"))]
    if missing:
        raise BuildError(
            f"Horovod has to be compiled and {' and '.join(missing)} cannot be found: "
            "install them (Debian, Ubuntu: sudo apt-get install g++ make)"
        )
    if not facts["has_header"]:
        raise BuildError(
            f"Horovod has to be compiled and {facts['header']} is missing: install the headers of this Python "
            "(Debian, Ubuntu: sudo apt-get install python3-dev)"
        )


def download(python: str, folder: Path) -> Path:
    """Download the sdist from the package index; pip checks its hash before it opens it.

    Raises:
        BuildError: there is no network or index, or the file is not the known one.
    """
    wanted = folder / "horovod.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    command = [
        python,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--require-hashes",
    ]
    command += ["--no-binary", ":all:", "--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sdist = folder / f"horovod-{VERSION}.tar.gz"
    if done.returncode == 0 and hashlib.sha256(sdist.read_bytes()).hexdigest() == SDIST_SHA256:
        return sdist
    if done.returncode == 0 or "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr:
        raise BuildError(
            f"the package index gave a horovod-{VERSION}.tar.gz with another SHA-256 than {SDIST_SHA256}: "
            "it is not the file that was tried, and is not built"
        )
    raise BuildError(
        f"Horovod's source is not available from the package index: {_last_line(done.stderr)}; "
        "is there a network, or an index that pip is told of (pip config)?"
    )


def plain_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return the members of an archive, all of them files and folders below the folder it is unpacked to.

    Not every Python's tarfile has a filter that ensures this.

    Raises:
        BuildError: a member is something else, or would be unpacked elsewhere.
    """
    members = archive.getmembers()
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise BuildError(
                f"Horovod's source holds {member.name!r}, which is not a plain file of it: nothing is built"
            )
        member.mode &= 0o755
    return members


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist and apply the edits.

    Raises:
        BuildError: the archive cannot be unpacked or holds an unsafe member, or an old text is not there exactly once.
    """
    try:
        with tarfile.open(sdist) as archive:
            members = plain_members(archive)
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, members, filter="data")
            else:
                archive.extractall(folder, members)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BuildError(f"Horovod's source cannot be unpacked: {error}") from error
    source = folder / f"horovod-{VERSION}"
    for edit in EDITS:
        path = source / edit.path
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise BuildError(f"{edit.path} of Horovod's source does not have the place to edit once: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new))
    return source


def compile_wheel(python: str, source: Path, folder: Path, environment: Mapping[str, str], log: Path) -> Path:
    """Build the wheel; takes minutes.

    Args:
        python: interpreter with the torch to build against.
        source: unpacked and edited source.
        folder: scratch space.
        environment: environment of the build.
        log: file for all output of the build.

    Raises:
        BuildError: the build tools cannot be installed, or the compilation fails.
    """
    tools = folder / "tools"
    get_tools = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--target",
        str(tools),
        *TOOLS,
    ]
    jobs = len(os.sched_getaffinity(0))
    settings = dict(environment) | SETTINGS | {"PYTHONPATH": str(tools), "HOROVOD_CMAKE": str(tools / "bin" / "cmake")}
    settings.setdefault("MAKEFLAGS", f"-j{jobs}")
    with log.open("w") as words:
        if subprocess.run(get_tools, stdout=words, stderr=words, check=False).returncode:
            raise BuildError(f"the tools to build Horovod with cannot be installed: {_last_error(log)} ({log})")
        command = ["nice", "-n", str(NICENESS), python, "setup.py", "bdist_wheel", "--dist-dir", str(folder / "dist")]
        if subprocess.run(command, cwd=source, env=settings, stdout=words, stderr=words, check=False).returncode:
            raise BuildError(f"Horovod could not be compiled: {_last_error(log)} ({log})")
    return next((folder / "dist").glob("*.whl"))


def build(python: str, facts: Mapping[str, Any], keep: Path, environment: Mapping[str, str]) -> Path:
    """Build the wheel and store it in the cache; return its path.

    Raises:
        BuildError: a step fails.
    """
    check_compiler(facts, environment)
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ringtap-horovod-") as name:
        folder = Path(name)
        print(f"Getting horovod {VERSION} from the package index", file=sys.stderr)
        source = unpack(download(python, folder), folder)
        print(f"Compiling it for torch {facts['torch']}: some minutes (log: {keep / 'build.log'})", file=sys.stderr)
        wheel = compile_wheel(python, source, folder, environment, keep / "build.log")
        # Copied under another name and renamed, so that a concurrent build never sees an incomplete wheel.
        half = keep / f".{wheel.name}.{os.getpid()}"
        shutil.copy(wheel, half)
        return half.replace(keep / wheel.name)


def install(python: str, wheel: Path) -> None:
    """Install the wheel and Horovod's run-time requirements into the interpreter.

    Raises:
        BuildError: pip fails, or the installed Horovod cannot be imported.
    """
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    # The same version built for another torch counts as installed, so it is forced.
    for arguments in (["--force-reinstall", "--no-deps", str(wheel)], list(RUN_TIME)):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"pip could not install {' '.join(arguments)}: {_last_line(done.stderr)}")
    done = subprocess.run([python, "-c", "import horovod.torch"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the installed Horovod cannot be imported: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    return lines[-1] if lines else "it said nothing"


def _last_error(log: Path) -> str:
    """Return the first error of the compiler or pip, or else the last line of the log."""
    text = log.read_text(errors="replace")
    errors = [
        line.strip() for line in text.splitlines() if " error: " in line or line.startswith(("ERROR:", "CMake Error"))
    ]
    return errors[0] if errors else _last_line(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Build or find the wheel, and print its path."""
    parser = argparse.ArgumentParser(description=f"Build Horovod {VERSION} against an interpreter's torch.")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch (default: this one)")
    parser.add_argument("--install", action="store_true", help="install the wheel there too")
    options = parser.parse_args(argv)
    try:
        facts = interpreter_facts(options.python)
        keep = cache_folder(facts, os.environ)
        wheel = cached_wheel(keep) or build(options.python, facts, keep, os.environ)
        if options.install:
            install(options.python, wheel)
    except BuildError as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"build_horovod: {error.filename or 'the build folder'}: {error.strerror}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
