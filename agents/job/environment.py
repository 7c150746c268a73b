"""Reads launchers' environment variables (key of a launch, local size), and sets those that make ranks record."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ringtap.collectors.kernel_files import PROC, text_of

_LOCAL_RANK = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")


def run_key(environment: Mapping[str, str]) -> str:
    """A key that all processes of one launch share and no other launch has; empty without a launcher.

    It names a Slurm step, a PMIx name space or an Open MPI job. A batch script is not a step, so it has no key.
    """
    job, step = _slurm_job(environment), environment.get("SLURM_STEP_ID")
    mpi = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    if mpi and "OMPI_COMM_WORLD_RANK" in environment:  # mpirun within a Slurm step: its ranks are the job's
        return f"mpi-{job}-{mpi}" if job else f"mpi-{mpi}"
    if job and step and "SLURM_PROCID" in environment:
        return f"slurm-{job}.{step}{restart_suffix(environment)}"
    return f"mpi-{mpi}" if mpi else ""


def batch_job(environment: Mapping[str, str]) -> str:
    """The job of Slurm, which its processes on all nodes have in common, and its start; empty without one."""
    job = _slurm_job(environment)
    return f"{job}{restart_suffix(environment)}" if job else ""


def _slurm_job(environment: Mapping[str, str]) -> str:
    """The id of the job of Slurm, for a task of an array ``<array's id>_<index>``; empty without one."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}" if array else environment.get("SLURM_JOB_ID", "")


def restart_suffix(environment: Mapping[str, str]) -> str:
    """``-restart1`` if Slurm has started this job once again; empty in its first start."""
    restart = environment.get("SLURM_RESTART_COUNT", "")
    return f"-restart{restart}" if restart.strip("0") else ""


def of_this_start(run: Path, environment: Mapping[str, str]) -> Path:
    """The run directory of this start of the job: ``DIR-restart1`` if Slurm has started it once again."""
    suffix = restart_suffix(environment)
    return run.with_name(run.name.removesuffix(suffix) + suffix)


def machine(proc: Path = PROC) -> str:
    """Return the identity of this machine among those of its name: the start of its kernel, and the network it sees."""
    known = list(filter(None, [text_of(proc / "sys/kernel/random/boot_id")]))
    with contextlib.suppress(OSError):
        known.append(str((proc / "self/ns/net").readlink()))
    return " ".join(known)


def local_size(environment: Mapping[str, str]) -> int:
    """Number of processes that the launcher starts on this node; 1 if it does not say."""
    for name in _LOCAL_SIZE:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    with contextlib.suppress(ValueError, LookupError):
        return slurm_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))[int(environment["SLURM_NODEID"])]
    return 1


def is_first_on_node(environment: Mapping[str, str]) -> bool:
    """Return True unless a launcher has started ranks before this one on this node."""
    return next((environment[name] for name in _LOCAL_RANK if environment.get(name)), "0") == "0"


def slurm_tasks(text: str) -> list[int]:
    """Tasks per node from Slurm's ``2(x3),1``; empty if the text cannot be read."""
    counts: list[int] = []
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            return []
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def hook_folder() -> Path:
    """The folder on a job's PYTHONPATH from which its processes load the recorder."""
    from ringtap.agents import hook

    return Path(hook.__file__).resolve().parent


def job_environment(run: Path, node: str, recorders: Iterable[str]) -> dict[str, str]:
    """This process's environment with the variables that make a job's ranks record; the hook is first on PYTHONPATH.

    Args:
        run: the run directory, absolute.
        node: this node's name in the run.
        recorders: the job-side recorders wanted; without any, the environment is unchanged.
    """
    environment = dict(os.environ)
    wanted = ",".join(recorders)
    if not wanted:
        return environment
    paths = [str(hook_folder()), *filter(None, [environment.get("PYTHONPATH")])]
    if "profile" in recorders:  # PyTorch's profiler would print a line where it begins and ends
        environment.setdefault("KINETO_LOG_LEVEL", "99")
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "RINGTAP_RUN": str(run),
        "RINGTAP_NODE": node,
        "RINGTAP_HOST": os.uname().nodename,
        "RINGTAP_PYTHON": sys.executable,
        "RINGTAP_COLLECT": wanted,
    }
