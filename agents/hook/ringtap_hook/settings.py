"""Reads the settings of the recording in this process, and its identity: its rank, process group and command."""

from __future__ import annotations

import os
import sys
import time

# Most specific first: a launcher within a Slurm step does not change the step's SLURM_PROCID.
_RANK = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
# What the ranks of one launch have in common, as in ringtap.agents.job.environment
_LAUNCH = (
    ("MASTER_ADDR", "MASTER_PORT"),
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_LOCAL_RANK = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# Python imports this module when it starts, also after os.exec, which keeps the pid and the kernel's start time.
_LOADED_NS = time.monotonic_ns()
HOOK_LOADED = ".hook-loaded"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Settings:
    """Settings of the recording: its parts and its destination.

    Attributes:
        run: the run directory, absolute.
        node: name of this node in the run.
        node_folder: this node's folder in the run directory.
        steps_folder: folder of the step records and of the hook's log.
    """

    def __init__(self, run: str, node: str, wanted: frozenset[str] | None) -> None:
        self.run = run
        self.node = node
        self.node_folder = os.path.join(run, "nodes", node)
        self.steps_folder = os.path.join(self.node_folder, "steps")
        self._wanted = wanted

    def wants(self, *recorders: str) -> bool:
        """True if any of these recorders (``steps``, ``ddp``, ``horovod``, ``nccl``, ``profile``) was asked for.

        ``profile`` must be asked for by name.
        """
        if self._wanted is None:
            return any(name != "profile" for name in recorders)
        return not self._wanted.isdisjoint(recorders)


_SETTINGS: Settings | None = None


def from_environment() -> Settings | None:
    """The settings of this process, read once; None if it is not to be recorded.

    ``RINGTAP_RUN`` is the run directory. ``RINGTAP_NODE`` is the node's name on the host that ``RINGTAP_HOST`` names;
    on another host, the node has the host's name. ``RINGTAP_COLLECT`` lists the recorders wanted, separated by commas
    (unset: all but ``profile``).
    """
    global _SETTINGS
    if _SETTINGS is None:
        run = os.environ.get("RINGTAP_RUN")
        if not run:
            return None
        node = "" if is_unsupervised() else os.environ.get("RINGTAP_NODE", "")
        collect = os.environ.get("RINGTAP_COLLECT")
        wanted = None if collect is None else frozenset(word.strip() for word in collect.split(","))
        _SETTINGS = Settings(os.path.abspath(run), node or os.uname().nodename, wanted)
    return _SETTINGS


def note_loaded(settings: Settings, pid: int = 0) -> None:
    """Create a file in the node's folder, as a sign that a process of the job has loaded the recorder.

    Args:
        settings: of this process.
        pid: this process, if it has imported torch or Horovod: the agent then knows that it is recorded.
    """
    path = os.path.join(settings.node_folder, HOOK_LOADED)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if pid else os.O_EXCL)
        fd = os.open(path, flags, 0o644)
        try:
            if pid:
                os.write(fd, b"%d\n" % pid)
        finally:
            os.close(fd)
    except OSError:  # usually another process was first; without the folder, nothing reads the file
        pass


def is_unsupervised() -> bool:
    """True if this host is not the one whose supervisor started the job."""
    return os.environ.get("RINGTAP_HOST", "") not in ("", os.uname().nodename)


def is_rank() -> bool:
    """True if a launcher has made this process a rank."""
    return _first_number(_RANK) is not None


def _first_number(names: tuple[str, ...]) -> int | None:
    """The first number that one of the variables holds; None if there is none."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None


def _age_ns(mono_ns: int) -> int:
    """The age of this process in ns at a time of CLOCK_MONOTONIC, never too high; 0 if the kernel does not give it.

    After ``os.exec``, it is the age of the program that runs now.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        started_ns = (ticks + 1) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns
        age_ns -= time.monotonic_ns() - mono_ns  # a pause between the two clocks makes it lower
        return max(0, min(age_ns, mono_ns - _LOADED_NS))
    except (OSError, ValueError, IndexError):
        return 0


def identity(mono_ns: int) -> dict[str, Any]:
    """Facts about this process, for file headers: rank, world size, pid, age, version of torch and host.

    Rank and world size are from torch.distributed or Horovod if the job uses them, else from the environment; ``group``
    says which (empty: the environment). ``address`` is what the ranks of a world have in common, as far as it is known:
    where they met, or the launch that started them. ``command`` is a checksum of the command line.

    Args:
        mono_ns: time of the age, by CLOCK_MONOTONIC.
    """
    rank, world_size = _first_number(_RANK), _first_number(_WORLD_SIZE)
    group, address = "", _launch() if rank is not None else ""
    distributed, horovod = sys.modules.get("torch.distributed"), sys.modules.get("horovod.torch")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        group, address = "torch", _store_address() or address
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    elif horovod is not None and hasattr(horovod, "is_initialized") and horovod.is_initialized():
        group, rank, world_size = "horovod", horovod.rank(), horovod.size()
    return {
        "collector": "steps",
        "rank": rank or 0,
        "pid": os.getpid(),
        "age_ns": _age_ns(mono_ns),
        "world_size": world_size or 1,
        "group": group,
        "address": address,
        "command": _command(),
        "local_rank": _first_number(_LOCAL_RANK),
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
        "hostname": os.uname().nodename,
    }


def _command() -> int:
    """The checksum of the command line, and of the code that ``-c`` gave the interpreter.

    A process that multiprocessing spawned has the command line of its parent, and code of its own that says nothing.
    """
    from binascii import crc32

    words = [str(word) for word in getattr(sys, "argv", ())]
    if words[:1] == ["-c"]:
        given = list(getattr(sys, "orig_argv", ()))  # from Python 3.10 on
        code = given[given.index("-c") + 1] if "-c" in given[:-1] else ""
        words += [] if code.startswith("from multiprocessing") else [code]
    return crc32("\0".join(words).encode(errors="replace"))


def _launch() -> str:
    """The meeting point of a launcher's ranks, or its number, by the environment; empty if it does not say."""
    for names in _LAUNCH:
        values = [os.environ.get(name, "") for name in names]
        if values[0]:
            return ":".join(values)
    return ""


def _store_address() -> str:
    """The meeting point of torch.distributed's default group: host and port, or a file; empty if not known."""
    try:
        store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        path = getattr(store, "path", "")
        return str(path) if path else f"{store.host}:{store.port}"
    except Exception:  # another kind of store, or another release
        return ""
