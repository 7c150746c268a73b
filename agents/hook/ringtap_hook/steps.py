"""Records optimizer steps, steps that mixed precision skipped, and the marks of plain loops."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from . import count_backward_passes, error_log, iteration_time_shift
from .record_files import ProcessFile, json_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

    from .settings import Settings

STEP, SKIPPED, MARK = 0, 1, 2
NO_OPTIMIZER = -1
_FIELDS = [
    ("step", "", "index"),
    ("optimizer", "", "index"),
    ("start_ns", "ns", "time"),
    ("end_ns", "ns", "time"),
    ("start_mono_ns", "ns", "time"),
    ("end_mono_ns", "ns", "time"),
    ("kind", "", "index"),
    ("backwards", "passes", "gauge"),
    ("pause_ns", "ns", "gauge"),
    ("passes_ns", "ns", "gauge"),
]
#: called with the number of the optimizer, begin and end in ns of each step, and of each mark; must not raise
listeners: list[Callable[[int, int, int], None]] = []
_END_MONO = [name for name, _, _ in _FIELDS].index("end_mono_ns")


class Recorder:
    """The recorder that optimizers' step hooks call; it creates its file at the first record."""

    def __init__(self, settings: Settings) -> None:
        import struct
        import threading
        import weakref

        self._settings = settings
        self._new_lock, self._new_local, self._new_counts = threading.RLock, threading.local, weakref.WeakKeyDictionary
        self._pack = struct.Struct("<" + "q" * len(_FIELDS)).pack
        self._file = ProcessFile(settings.steps_folder, ".rec", _FIELDS, "optimizer steps")
        self._described = ProcessFile(settings.steps_folder, ".optimizers.jsonl", None)
        self._off = False
        self._grid = iteration_time_shift.from_environment(settings)
        self._reset()
        os.register_at_fork(after_in_child=self._leave_parent)

    def _reset(self) -> None:
        self._lock = self._new_lock()
        self._thread: Any = self._new_local()  # each thread's outermost running step, and its number of begun steps
        self._counts: Any = self._new_counts()  # optimizer -> [its number, its next step]
        self._optimizers = 0
        self._marks = 0
        self._passes = 0

    def _leave_parent(self) -> None:
        """Leave the parent's file and start counting anew; runs in a forked child."""
        try:
            self._file.leave()
            self._described.leave()
            self._reset()
        except Exception:
            self._give_up()

    def before(self, _optimizer: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        """Note the start of a step, unless it runs within another one.

        Returns:
            The arguments of the step with its closure timed, which holds forward and backward passes; None without one.
        """
        try:
            if self._off:
                return None
            thread = self._thread
            caller = sys._getframe(1)
            thread.begun = getattr(thread, "begun", 0) + 1
            outer = getattr(thread, "frame", None)
            if outer is not None and _is_running(outer, caller):
                return None
            # A step that ended by an exception leaves its frame here; it is off the stack, so this one replaces it.
            thread.frame = caller
            thread.passes_ns = -1 if count_backward_passes.active else 0
            changed = _with_closure(args, kwargs, thread) if len(args) > 1 or kwargs else None
            thread.start_mono_ns = time.monotonic_ns()
            thread.start_ns = time.time_ns()
            return changed
        except Exception:
            self._give_up()
            return None

    def after(self, optimizer: Any, *_: Any) -> None:
        """Record the step if it is the outermost one."""
        try:
            end_ns = time.time_ns()
            end_mono_ns = time.monotonic_ns()
            thread = self._thread
            if self._off or getattr(thread, "frame", None) is not sys._getframe(1):
                return
            thread.frame = None
            kind = SKIPPED if _skips_within(optimizer) else STEP
            start_mono_ns, passes_ns = thread.start_mono_ns, thread.passes_ns
            if passes_ns < 0:  # all of it is within a backward pass
                passes_ns = end_mono_ns - start_mono_ns
            self._record(optimizer, kind, passes_ns, thread.start_ns, end_ns, start_mono_ns, end_mono_ns)
        except Exception:
            self._give_up()

    def pass_over(self, function: Any) -> Any:
        """Return the function wrapped so that the steps it makes are not recorded."""
        import functools

        @functools.wraps(function)
        def unrecorded(*args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            outer = getattr(thread, "frame", None)
            thread.frame = sys._getframe()  # so before() and after() see nested steps only
            try:
                return function(*args, **kwargs)
            finally:
                thread.frame = outer

        return unrecorded

    def leave_out(self, spent_ns: int) -> None:
        """Take Horovod's exchange out of the time of the step that runs in this thread, if one does."""
        try:
            if getattr(self._thread, "frame", None) is not None and self._thread.passes_ns >= 0:
                self._thread.passes_ns += spent_ns
        except Exception:
            self._give_up()

    def begin_scaled(self) -> tuple[int, int, int]:
        """The number of steps begun in this thread, CLOCK_MONOTONIC and CLOCK_REALTIME before a loss scaler's step."""
        try:
            return getattr(self._thread, "begun", 0), time.monotonic_ns(), time.time_ns()
        except Exception:
            self._give_up()
            return 0, 0, 0

    def end_scaled(self, optimizer: Any, begun: tuple[int, int, int]) -> None:
        """Record a skipped step if the optimizer did not step since `begin_scaled`."""
        try:
            end_ns = time.time_ns()
            end_mono_ns = time.monotonic_ns()
            if not self._off and getattr(self._thread, "begun", 0) == begun[0]:
                self._record(optimizer, SKIPPED, 0, begun[2], end_ns, begun[1], end_mono_ns)
        except Exception:
            self._give_up()

    def mark(self) -> None:
        """Record that an iteration of a plain loop is over."""
        try:
            if self._off:
                return
            now_ns, mono_ns = time.time_ns(), time.monotonic_ns()
            with self._lock:
                pause_ns = self._pause_ns(mono_ns, self._marks)
                self._write(pause_ns, 0, self._marks, NO_OPTIMIZER, now_ns, now_ns, mono_ns, mono_ns, MARK)
                self._marks += 1
            for listener in listeners:
                listener(NO_OPTIMIZER, now_ns, now_ns)
            if pause_ns:
                time.sleep(pause_ns / 1e9)
        except Exception:
            self._give_up()

    def _record(self, optimizer: Any, kind: int, passes_ns: int, *times_ns: int) -> None:
        with self._lock:
            count = self._counts.get(optimizer)
            if count is None:
                count = self._counts[optimizer] = [self._optimizers, 0]
                self._optimizers += 1
                self._file.about = _gpu(optimizer)
            pause_ns = 0 if count[0] else self._pause_ns(times_ns[3], count[1])
            self._write(pause_ns, passes_ns, count[1], count[0], *times_ns, kind)
            if not count[1]:
                line = json_line(dict(_description(optimizer), optimizer=count[0], t_ns=times_ns[1]))
                self._described.write(line, times_ns[3])
            count[1] += 1
        for listener in listeners:
            listener(count[0], times_ns[0], times_ns[1])
        if pause_ns:
            time.sleep(pause_ns / 1e9)

    def _pause_ns(self, mono_ns: int, step: int) -> int:
        return 0 if self._grid is None else self._grid.pause_ns(mono_ns, step)

    def _write(self, pause_ns: int, passes_ns: int, *values: int) -> None:
        passes = count_backward_passes.passes
        self._file.write(self._pack(*values, passes - self._passes, pause_ns, passes_ns), values[_END_MONO])
        self._passes = passes

    def _give_up(self) -> None:
        """Stop recording and say why, once."""
        if self._off:
            return
        self._off = True
        error_log.note(self._settings, "step recorder")


def _is_running(frame: FrameType, top: FrameType | None) -> bool:
    """True if ``frame`` is on the stack below ``top``."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


def _with_closure(args: Any, kwargs: Any, thread: Any) -> Any:
    """The arguments of a step, with its closure replaced by one that adds its time to ``passes_ns``, if it has one."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def timed(*own: Any, **named: Any) -> Any:
        begin_ns = time.monotonic_ns()
        try:
            return closure(*own, **named)
        finally:
            with suppress(AttributeError):  # another thread than the one that steps
                thread.passes_ns += time.monotonic_ns() - begin_ns

    timed.__wrapped__ = closure  # type: ignore[attr-defined]
    return ((args[0], timed, *args[2:]), kwargs) if len(args) > 1 else (args, dict(kwargs, closure=timed))


def _description(optimizer: Any) -> dict[str, Any]:
    """The class of an optimizer, and the numbers of its tensors, their elements, and the elements that are trained."""
    found = {"class": type(optimizer).__name__}
    try:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        return dict(found, tensors=len(weights), elements=sum(weight.numel() for weight in weights), trained=trained)
    except Exception:  # weights of another kind than torch's own
        return found


def _gpu(optimizer: Any) -> dict[str, str]:
    """The UUID of the GPU that has an optimizer's first parameter, without NVML's prefix; nothing if there is none."""
    device = next(
        (weight.device for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]), None
    )
    if device is None or device.type != "cuda":
        return {}
    uuid = getattr(sys.modules["torch"].cuda.get_device_properties(device), "uuid", None)  # since torch 2.5
    return {} if uuid is None else {"gpu": str(uuid)}


def _skips_within(optimizer: Any) -> bool:
    """True if an optimizer that skips steps itself has just done so.

    A loss scaler passes its findings to such an optimizer (fused kernels) as ``found_inf`` and always calls ``step``.
    On an accelerator, reading them would make the job wait for the device, so they are not read there.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None or getattr(getattr(found, "device", None), "type", "") != "cpu":
        return False
    return found.numel() == 1 and bool(found.item())


_RECORDER: Recorder | None = None


def is_made() -> bool:
    """True if this process has a recorder already."""
    return _RECORDER is not None


def recorder(settings: Settings) -> Recorder:
    """The only recorder of this process, made at the first call."""
    global _RECORDER
    if _RECORDER is None:
        _RECORDER = Recorder(settings)
    return _RECORDER


def attach(module: ModuleType, settings: Settings) -> None:
    """Make every optimizer of this process report its steps."""
    # torch.compile checks this: without it, it would trace into the hooks, and warn.
    Recorder.before._torchdynamo_disable = True  # type: ignore[attr-defined]
    Recorder.after._torchdynamo_disable = True  # type: ignore[attr-defined]
    own = recorder(settings)
    if hasattr(module, "register_optimizer_step_pre_hook"):
        module.register_optimizer_step_pre_hook(own.before)
        module.register_optimizer_step_post_hook(own.after)
    else:
        _wrap_steps(module.Optimizer, own)


def _wrap_steps(optimizer_class: Any, own: Recorder) -> None:
    """Wrap ``step`` of each optimizer class at its first use, for releases without global step hooks."""
    import functools

    plain_init = optimizer_class.__init__

    def wrap(plain_step: Any) -> Any:
        @functools.wraps(plain_step)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            changed = own.before(self, (self, *args), kwargs)
            args, kwargs = (args, kwargs) if changed is None else (changed[0][1:], changed[1])
            result = plain_step(self, *args, **kwargs)
            own.after(self)
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
