"""Records when each of Horovod's optimizers exchanges its gradients, in the form of DDP's log.

Horovod begins to exchange a gradient as soon as it is ready. ``synchronize`` waits for all of them. The optimizer's
step calls it, unless the job has. On an accelerator, nothing is recorded: the backward pass is queued there, and the
host does not know when the last gradient is ready.
"""

from __future__ import annotations

import os
import time

from . import count_backward_passes, ddp_logging_data, error_log, steps
from .record_files import ProcessFile, json_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

_NOT_KNOWN = -1  # ``forward_ns``: nothing says when the forward pass begins


class ExchangeRecorder:
    """Notes the exchanges of Horovod's optimizers in this process."""

    def __init__(self, settings: Settings) -> None:
        import struct
        import weakref

        fields = ddp_logging_data.FIELDS
        self._settings = settings
        self._records = ProcessFile(settings.steps_folder, ".horovod.rec", fields, "Horovod's optimizers")
        self._sizes = ProcessFile(settings.steps_folder, ".buckets.jsonl", None)
        self._pack = struct.Struct("<" + "q" * len(fields)).pack
        self._optimizers: Any = weakref.WeakKeyDictionary()  # each: its number, its exchanges; None: not recorded
        self._created = 0
        self._begin_ns = self._backward_end_ns = 0  # of the exchange that runs, and of the last backward pass
        self._off = False
        os.register_at_fork(after_in_child=self._leave_parent)

    def _leave_parent(self) -> None:
        """Leave the parent's files; runs in a forked child."""
        try:
            self._optimizers.clear()
            self._records.leave()
            self._sizes.leave()
        except Exception:  # the job may have closed the descriptor
            self._off = True

    def end_backward(self) -> None:
        """Note the end of a backward pass."""
        self._backward_end_ns = time.time_ns()

    def begin(self) -> None:
        """Note the begin of an exchange."""
        if not self._begin_ns:
            self._begin_ns = time.time_ns()

    def end(self, optimizer: Any) -> bool:
        """Record the exchange of an optimizer that has ended; return False if nothing was recorded."""
        try:
            begin_ns, self._begin_ns = self._begin_ns, 0
            backward_ns = count_backward_passes.begin_ns, self._backward_end_ns
            if self._off or not 0 < backward_ns[0] <= min(begin_ns, backward_ns[1]):
                return False
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = self._describe(optimizer)
            found = self._optimizers[optimizer]
            if found is None:
                return False
            end_ns, mono_ns = time.time_ns(), time.monotonic_ns()
            spent = backward_ns[1] - backward_ns[0], end_ns - begin_ns, max(0, backward_ns[1] - begin_ns)
            times = 0, *backward_ns, begin_ns, end_ns, _NOT_KNOWN, *spent, end_ns, mono_ns
            self._records.write(self._pack(found[1], found[0], *times), mono_ns)
            found[1] += 1
            return True
        except Exception:
            self._off = True
            error_log.note(self._settings, "recorder of Horovod's exchange")
            return False

    def _describe(self, optimizer: Any) -> list[int] | None:
        """Write the bytes of an optimizer's gradients; None if they are on an accelerator."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        if any(weight.device.type != "cpu" for weight in weights):
            return None
        number, self._created = self._created, self._created + 1
        sizes = [weight.numel() * weight.element_size() for weight in weights]
        item: dict[str, Any] = {"t_ns": time.time_ns(), "module": number, "bucket_bytes": sizes}
        compression = getattr(getattr(optimizer, "_compression", None), "__name__", "NoneCompressor")
        if compression != "NoneCompressor":
            item["comm_hook"] = compression
        self._sizes.write(json_line(item), time.monotonic_ns())
        return [number, 0]


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap the methods by which Horovod's optimizers begin an exchange and wait for it.

    ``DistributedOptimizer`` copies them into a class of its own for each optimizer.
    """
    import functools

    optimizer_class = getattr(module, "_DistributedOptimizer", None)
    if optimizer_class is None:
        return
    exchanges, recorder = ExchangeRecorder(settings), steps.recorder(settings)

    def begins(plain: Any) -> Any:
        @functools.wraps(plain)
        def exchange(self: Any, *args: Any) -> Any:
            exchanges.begin()
            return plain(self, *args)

        return exchange

    for name in ("_allreduce_grad_async", "_grouped_allreduce_grad_async"):
        if hasattr(optimizer_class, name):
            setattr(optimizer_class, name, begins(getattr(optimizer_class, name)))
    plain_synchronize = optimizer_class.synchronize

    @functools.wraps(plain_synchronize)
    def synchronize(self: Any) -> Any:
        begin_ns = time.monotonic_ns()
        result = plain_synchronize(self)
        if exchanges.end(self):
            recorder.leave_out(time.monotonic_ns() - begin_ns)
        return result

    optimizer_class.synchronize = synchronize
    count_backward_passes.listeners.append(exchanges.end_backward)
