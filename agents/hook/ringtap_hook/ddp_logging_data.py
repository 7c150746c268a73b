"""Records DistributedDataParallel's own log of each iteration: compute, communication, overlap, buckets.

The recorder registers nothing with DDP: DDP takes only one communication hook, which belongs to the job. It notes each
module when the job creates it, and reads the module's log after each backward pass. DDP logs the last forward pass
before a synchronised backward pass alone, and takes the time between the two for a part of the backward pass. On a CPU,
the recorder therefore times all forward passes, and the begin of each backward pass, itself.
"""

from __future__ import annotations

import os
import sys
import time

from . import count_backward_passes
from .record_files import ProcessFile, json_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

# Column -> its name in DDP's log; iteration and module come before them.
_SOURCE = {
    "forward_start_ns": "forward_compute_time_start",
    "backward_start_ns": "backward_compute_time_start",
    "backward_end_ns": "backward_compute_time_end",
    "comm_start_ns": "backward_comm_time_start",
    "comm_end_ns": "backward_comm_time_end",
    "forward_ns": "forward_compute_time",
    "backward_ns": "backward_compute_time",
    "comm_ns": "backward_comm_time",
    "overlap_ns": "backward_compute_comm_overlap_time",
}
# On an accelerator, the host knows when it queued the end of the backward pass, not when the last gradient was ready.
_END_OF_WORK = list(_SOURCE).index("backward_end_ns")
_FORWARD_START, _BACKWARD_START, _FORWARD, _BACKWARD = (
    list(_SOURCE).index(name) for name in ("forward_start_ns", "backward_start_ns", "forward_ns", "backward_ns")
)
UNSYNCED = -1  # ``iteration`` of passes under ``no_sync``
#: columns of its record files, and of those of Horovod's optimizers
FIELDS = [("iteration", "", "index"), ("module", "", "index")]
FIELDS += [(name, "ns", "time" if name.endswith(("_start_ns", "_end_ns")) else "gauge") for name in _SOURCE]
# The time at which the log was read, by both clocks: DDP's times are CLOCK_REALTIME only, which may be set meanwhile.
FIELDS += [("t_ns", "ns", "time"), ("mono_ns", "ns", "time")]


class Watcher:
    """The DDP modules of this process; after each backward pass, `look` records their new iterations."""

    def __init__(self, settings: Settings) -> None:
        import struct
        import weakref

        self._records = ProcessFile(settings.steps_folder, ".ddp.rec", FIELDS, "DistributedDataParallel's own log")
        self._buckets = ProcessFile(settings.steps_folder, ".buckets.jsonl", None)
        self._pack = struct.Struct("<" + "q" * len(FIELDS)).pack
        self._modules: list[_Module] = []
        self._timed: Any = weakref.WeakKeyDictionary()  # modules of `_modules` whose forward passes are timed
        self._created = 0
        os.register_at_fork(after_in_child=self._leave_parent)

    def _leave_parent(self) -> None:
        """Forget the parent's modules and files; runs in a forked child."""
        self._modules = []
        self._timed.clear()
        try:
            self._records.leave()
            self._buckets.leave()
        except Exception:  # the job may have closed the descriptor
            pass

    def add(self, module: Any) -> None:
        """Watch a module from its first iteration on."""
        watched = _Module(module, self._created)
        self._modules.append(watched)
        self._created += 1
        if watched.forces_sample:
            self._timed[module] = watched

    def begin_forward(self, module: Any, torch: Any) -> None:
        """Note the begin of a forward pass, if gradients follow from it."""
        try:
            watched = self._timed.get(module)
            if watched is not None:
                watched.begin_ns = time.time_ns() if torch.is_grad_enabled() else 0
                watched.is_synced = module.require_backward_grad_sync
        except Exception:
            self._timed.clear()

    def end_forward(self, module: Any) -> None:
        """Add the forward pass that has ended."""
        try:
            watched = self._timed.get(module)
            if watched is not None and watched.begin_ns:
                watched.forward_start_ns = watched.forward_start_ns or watched.begin_ns
                watched.forward_ns += time.time_ns() - watched.begin_ns
                watched.begin_ns = 0
        except Exception:
            self._timed.clear()

    def look(self) -> None:
        """Record the iterations that have ended since the last look."""
        gone = False
        for watched in self._modules:
            ddp = watched.module()
            if ddp is None:
                gone = True
            elif ddp.logger is not None:
                self._look_at(watched, ddp.logger)
                if watched.forward_ns and not watched.is_synced:
                    self._write_unsynced(watched)
        if gone:
            self._modules = [watched for watched in self._modules if watched.module() is not None]

    def _look_at(self, watched: _Module, logger: Any) -> None:
        if watched.forces_sample:
            # DDP does this itself when the next iteration begins; doing it now also gives the last iteration.
            logger.set_runtime_stats_and_log()
        item = logger._get_ddp_logging_data()
        values = item.ints_map
        iteration = values.get("iteration", 0)
        if iteration <= watched.iteration:
            return
        times = [max(0, values.get(name, 0)) for name in _SOURCE.values()]
        start_ns, comm_end_ns = times[0], times[4]
        if watched.forces_sample and comm_end_ns < start_ns:
            return  # another module's backward pass has ended; this module's has not run yet
        watched.iteration = iteration
        if watched.is_queued:
            times[_END_OF_WORK] = 0
        elif watched.forces_sample:
            times = watched.with_own_times(times)
        self._note_buckets(watched, item.strs_map if watched.has_new_buckets(values) else None)
        self._write(iteration - 1, watched, times)

    def _write_unsynced(self, watched: _Module) -> None:
        """Record forward passes under ``no_sync`` and the backward pass that has just ended: DDP does not log them."""
        end_ns = time.time_ns()
        times = [0, count_backward_passes.begin_ns, end_ns, 0, 0, 0, end_ns - count_backward_passes.begin_ns, 0, 0]
        self._write(UNSYNCED, watched, watched.with_own_times(times))

    def _write(self, iteration: int, watched: _Module, times: list[int]) -> None:
        now_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        self._records.write(self._pack(iteration, watched.number, *times, now_ns, mono_ns), mono_ns)

    def _note_buckets(self, watched: _Module, texts: dict[str, str] | None) -> None:
        """Record the bucket sizes if they have changed."""
        if texts is None:
            return
        text = texts.get("rebuilt_bucket_sizes") or texts.get("bucket_sizes") or ""
        sizes = [int(size) for size in text.split(",") if size.strip()]
        if sizes != watched.bucket_bytes:
            watched.bucket_bytes = sizes
            item = {"t_ns": time.time_ns(), "module": watched.number, "bucket_bytes": sizes}
            if texts.get("comm_hook"):  # the job's own exchange of gradients, such as a compression
                item["comm_hook"] = texts["comm_hook"]
            self._buckets.write(json_line(item), time.monotonic_ns())


class _Module:
    """The state kept for a DDP module.

    Attributes:
        module: weak reference to it.
        number: its number, in the order of creation.
        iteration: the last iteration recorded, counted from 1 as DDP does.
        bucket_bytes: sizes of its buckets, as last recorded.
        forces_sample: whether the recorder makes DDP take its times at the end of an iteration, not at the beginning of
            the next one; on an accelerator, the job would have to wait for the device.
        is_queued: whether it computes on an accelerator, where DDP's times are those at which work was queued; its
            durations are the device's.
        begin_ns: begin of the forward pass that runs, where the recorder times it; else 0.
        forward_start_ns: begin of the first forward pass since the last record.
        forward_ns: the sum of these forward passes.
        is_synced: whether the last of them was to be followed by a synchronised backward pass.
    """

    def __init__(self, module: Any, number: int) -> None:
        import weakref

        self.module = weakref.ref(module)
        self.number = number
        self.iteration = 0
        self.bucket_bytes: list[int] = []
        self.forces_sample = _is_free(module)
        self.is_queued = not _is_on_cpu(module)
        self.begin_ns = self.forward_start_ns = self.forward_ns = 0
        self.is_synced = True
        self._rebuilt: int | None = None

    def with_own_times(self, times: list[int]) -> list[int]:
        """DDP's times with the recorder's own ones of the forward passes and of the begin of the backward pass."""
        times = list(times)
        if self.forward_ns:
            times[_FORWARD_START], times[_FORWARD] = self.forward_start_ns, self.forward_ns
            self.forward_start_ns = self.forward_ns = 0
        begin_ns, end_ns = count_backward_passes.begin_ns, times[_END_OF_WORK]
        if times[_BACKWARD_START] <= begin_ns <= end_ns:
            times[_BACKWARD_START], times[_BACKWARD] = begin_ns, end_ns - begin_ns
        return times

    def has_new_buckets(self, values: dict[str, int]) -> bool:
        """True at the first call, and if the buckets were rebuilt since the last one."""
        rebuilt = values.get("has_rebuilt_buckets", 0)
        if rebuilt == self._rebuilt:
            return False
        self._rebuilt = rebuilt
        return True


def attach(module: ModuleType, settings: Settings) -> None:
    """Watch every DDP module that this process makes."""
    import functools

    from . import error_log

    watcher = Watcher(settings)
    ddp_class = module.DistributedDataParallel
    plain = ddp_class.__init__

    is_first = True

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_first
        plain(self, *args, **kwargs)
        try:
            if is_first:  # now torch is imported as a whole
                is_first = False
                _time_forward(ddp_class, watcher)
            _sample(self)
            watcher.add(self)
        except Exception:
            error_log.note(settings, "recorder of DDP's communication")

    ddp_class.__init__ = init
    count_backward_passes.listeners.append(watcher.look)


def _time_forward(ddp_class: Any, watcher: Watcher) -> None:
    """Let the watcher time forward passes, from DDP's preparations before the job's model to those after it.

    torch.compile traces DDP's methods. It takes ``is_compiling()`` for a constant, and compiles what it would without
    the recorder.
    """
    import functools

    torch = sys.modules["torch"]
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if is_compiling is None:  # before torch 2.1
        return
    plain_pre, plain_post = ddp_class._pre_forward, ddp_class._post_forward

    @functools.wraps(plain_pre)
    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            watcher.begin_forward(self, torch)
        return plain_pre(self, *args, **kwargs)

    @functools.wraps(plain_post)
    def post_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain_post(self, *args, **kwargs)
        if not is_compiling():
            watcher.end_forward(self)
        return result

    ddp_class._pre_forward, ddp_class._post_forward = pre_forward, post_forward


def _is_free(module: Any) -> bool:
    """True if taking the times does not noticeably affect the job.

    On an accelerator, each sample makes the job wait for the device and breaks the capture of CUDA graphs. With
    TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP prints each sample.
    """
    prints = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return not prints and _is_on_cpu(module)


def _is_on_cpu(module: Any) -> bool:
    return bool(next(module.parameters()).device.type == "cpu")


def _sample(module: Any) -> None:
    """Make DDP take its times in every iteration, or in every N-th with RINGTAP_DDP_EVERY=N.

    Without that variable, DDP keeps its own rate (the first 10 iterations, then every 100th) if sampling is not free.
    """
    every = os.environ.get("RINGTAP_DDP_EVERY", "")
    if module.logger is None:  # the module has no reducer
        return
    if every.isdigit() and int(every) > 0:
        module._set_ddp_runtime_logging_sample_rate(int(every))
    elif _is_free(module):
        module._set_ddp_runtime_logging_sample_rate(1)
