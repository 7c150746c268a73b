"""Records the optimizer steps of a training job that knows nothing of it.

Python imports a module of this name at start-up from the first folder of its path that has one. The agent puts this
folder on a job's PYTHONPATH and names the folder for the records in RINGTAP_STEPS_DIR; without that variable nothing
happens. Standard library only, and nothing newer than Python 3.8: the job's interpreter is not ringtap's.

Whatever goes wrong in here is written to ``hook-<pid>.log`` beside the records and ends the recording, never the job.
"""
# ruff: noqa: PTH100, PTH103, PTH108, PTH118, PTH120, PTH123
# (pathlib would cost every process of the job its import time)

from __future__ import annotations

import os
import sys
import time

_TARGET = "torch.optim.optimizer"
_COLUMNS = ("step", "optimizer", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns")
# Most specific first: a launcher within a Slurm step leaves SLURM_PROCID as that of the step.
_RANK = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any


def _from_environment(names: tuple[str, ...]) -> int | None:
    """First of the variables that holds a number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None


def _identity() -> dict[str, Any]:
    """Who this process is in its job: from torch.distributed where the job uses it, else from the environment."""
    rank, world_size = _from_environment(_RANK), _from_environment(_WORLD_SIZE)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    return {
        "collector": "steps",
        "rank": rank or 0,
        "pid": os.getpid(),
        "world_size": world_size or 1,
        "local_rank": _from_environment(_LOCAL_RANK),
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
        "hostname": os.uname().nodename,
    }


def _header(about: dict[str, Any]) -> bytes:
    """The line that a record file starts with."""
    import json

    kinds = {"step": "index", "optimizer": "index"}
    fields = [
        {
            "name": name,
            "type": "<i8",
            "unit": "" if name in kinds else "ns",
            "kind": kinds.get(name, "time"),
            "width_bits": 0,
        }
        for name in _COLUMNS
    ]
    record_bytes = 8 * len(_COLUMNS)
    header = {"format": "ringtap-records", "version": 1, "record_bytes": record_bytes, "fields": fields, "about": about}
    line = json.dumps(header).encode()
    return line + b" " * (-(len(line) + 1) % 64) + b"\n"


class Recorder:
    """Turns the optimizer's step hooks into records; the file is made at the first step.

    Args:
        folder: folder for the records, absolute.
    """

    def __init__(self, folder: str) -> None:
        import struct
        import threading
        import weakref

        self._folder = folder
        self._new_lock, self._new_local, self._new_counts = threading.RLock, threading.local, weakref.WeakKeyDictionary
        self._pack = struct.Struct("<" + "q" * len(_COLUMNS)).pack
        self._off = False
        self._fd = -1
        self._file_id = (0, 0)
        self._begin()
        os.register_at_fork(after_in_child=self._leave_parent)

    def _begin(self) -> None:
        self._lock = self._new_lock()
        self._open: Any = self._new_local()  # the outermost step under way in each thread
        self._counts: Any = self._new_counts()  # optimizer -> [its number, its next step]
        self._optimizers = 0

    def _leave_parent(self) -> None:
        """In a forked child: leave the parent's file alone, and count afresh should this process step too."""
        try:
            if self._fd >= 0 and self._is_open():
                os.close(self._fd)
            self._fd = -1
            self._begin()
        except Exception:
            self._give_up()

    def before(self, *_: Any) -> None:
        """Note the start of a step, unless it runs within another one."""
        try:
            if self._off:
                return
            caller = sys._getframe(1)
            outer = getattr(self._open, "frame", None)
            if outer is not None and _is_running(outer, caller):
                return
            # A step that ended by an exception leaves its frame here: it is off the stack, and this one takes over.
            self._open.frame = caller
            self._open.start_mono_ns = time.monotonic_ns()
            self._open.start_ns = time.time_ns()
        except Exception:
            self._give_up()

    def after(self, optimizer: Any, *_: Any) -> None:
        """Record the step if it is the outermost one."""
        try:
            end_ns = time.time_ns()
            end_mono_ns = time.monotonic_ns()
            step = self._open
            if self._off or getattr(step, "frame", None) is not sys._getframe(1):
                return
            step.frame = None
            with self._lock:
                if self._fd < 0:
                    self._start_file()
                count = self._counts.get(optimizer)
                if count is None:
                    count = self._counts[optimizer] = [self._optimizers, 0]
                    self._optimizers += 1
                self._write(self._pack(count[1], count[0], step.start_ns, end_ns, step.start_mono_ns, end_mono_ns))
                count[1] += 1
        except Exception:
            self._give_up()

    def _start_file(self) -> None:
        """Make this process's own file."""
        about = _identity()
        os.makedirs(self._folder, exist_ok=True)
        stem = os.path.join(self._folder, "rank{}-{}".format(about["rank"], about["pid"]))
        path = stem + ".rec"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        again = 1
        while self._fd < 0:
            try:
                self._fd = os.open(path, flags, 0o644)
            except FileExistsError:  # a restarted job in a fresh process namespace gets the same pid
                if again == 100:
                    raise
                again += 1
                path = f"{stem}-{again}.rec"
        status = os.fstat(self._fd)
        self._file_id = (status.st_dev, status.st_ino)
        try:
            self._write(_header(about))
        except OSError:
            os.unlink(path)  # a torn header would read as a file of something else
            raise

    def _write(self, data: bytes) -> None:
        """Hand the bytes to the kernel in one call, so that a killed process loses none."""
        if not self._is_open():
            raise OSError("the record file was closed by the job")
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes could be written")

    def _is_open(self) -> bool:
        """Whether the file is still open; the job may have closed it, and its number be one of the job's own by now."""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file_id

    def _give_up(self) -> None:
        """Stop recording and say why, once."""
        if self._off:
            return
        self._off = True
        _log(self._folder)


def _is_running(frame: FrameType, top: FrameType | None) -> bool:
    """Whether ``frame`` is on the stack below ``top``."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


def _log(folder: str) -> None:
    """Write the exception being handled to the hook's log."""
    try:
        import traceback

        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"hook-{os.getpid()}.log"), "a", encoding="utf-8") as file:
            file.write("ringtap's step recorder stopped; the job goes on\n" + traceback.format_exc())
    except Exception:  # nowhere left to say it
        pass


def _attach(module: ModuleType, folder: str) -> None:
    """Have every optimizer of this process report its steps."""
    # What torch.compile looks for: without it a compiled step would trace into the hooks, and warn.
    Recorder.before._torchdynamo_disable = True  # type: ignore[attr-defined]
    Recorder.after._torchdynamo_disable = True  # type: ignore[attr-defined]
    recorder = Recorder(folder)
    if hasattr(module, "register_optimizer_step_pre_hook"):
        module.register_optimizer_step_pre_hook(recorder.before)
        module.register_optimizer_step_post_hook(recorder.after)
    else:
        _wrap_steps(module.Optimizer, recorder)


def _wrap_steps(optimizer_class: Any, recorder: Recorder) -> None:
    """For releases without global step hooks: wrap ``step`` of each optimizer class when it is first used."""
    import functools

    plain_init = optimizer_class.__init__

    def wrap(plain_step: Any) -> Any:
        @functools.wraps(plain_step)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.before(self)
            result = plain_step(self, *args, **kwargs)
            recorder.after(self)
            return result

        step.ringtap_wrapped = True  # type: ignore[attr-defined]
        return step

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        own_class = type(self)
        if not getattr(own_class.step, "ringtap_wrapped", False):
            own_class.step = wrap(own_class.step)

    optimizer_class.__init__ = init


class _Finder:
    """Stands first on the import path's finders until the optimizer module is imported, then leaves."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the optimizer module as Python would, and attach the recorder once it has been executed."""
        if name != _TARGET:
            return None
        try:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec.loader)
                    return spec
        except Exception:
            _log(self._folder)
        return None

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                _attach(module, self._folder)
            except Exception:
                _log(self._folder)

        loader.exec_module = exec_module


def _run_next() -> None:
    """Execute the sitecustomize that Python would have found without this one, under its own name."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))
    folders = [os.path.realpath(folder or os.curdir) for folder in sys.path]
    # Only what stands behind this folder: one that stands before it and chains too has had its turn.
    first = folders.index(here) + 1 if here in folders else 0
    later = [folder for folder, real in zip(sys.path[first:], folders[first:]) if real != here]  # noqa: B905
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is None or spec.loader is None:
        return
    from importlib._bootstrap import module_from_spec  # importlib.util's own, without the 2.5 ms that one takes

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _start() -> None:
    """Arm the recorder if asked to, then give the next sitecustomize its turn."""
    folder = os.environ.get("RINGTAP_STEPS_DIR")
    if folder:
        sys.meta_path.insert(0, _Finder(os.path.abspath(folder)))
    # Last, and with its exceptions let through: Python reports them as it would without this module.
    _run_next()


if __name__ == "sitecustomize":
    _start()
