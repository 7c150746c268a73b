"""Profiles a few iterations: parameters, forward times of modules, ready times of gradients, and communication.

After a warm-up, it notes the events of some iterations with their times, and then removes all it has added. PyTorch's
own profiler notes when collectives begin and end; it is limited to ranges that PyTorch names, so that it costs next to
nothing. Each iteration is written when it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

from . import count_backward_passes, error_log, steps
from .record_files import ProcessFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .settings import Settings

# DDP makes its buckets anew after the first iteration. In the last iteration of the warm-up, modules are found.
WARM_UP, ITERATIONS = 3, 20
# Ranges of PyTorch's profiler that are kept: the work of a backend. NCCL's end when its kernels are queued.
_RANGES = ("gloo:", "mpi:", "ucc:")
_ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long int": 8, "long": 8, "short int": 2,
    "short": 2, "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1,
}  # fmt: skip


class Profiler:
    """The events of this process's main thread.

    Attributes:
        records: True while events are to be noted.
    """

    def __init__(self, settings: Settings) -> None:
        import threading

        self._settings = settings
        self._file = ProcessFile(settings.steps_folder, ".profile.jsonl", None, is_whole=True)
        self._main = threading.main_thread().ident
        self._thread_id = threading.get_ident
        self._remove: list[Callable[[], object]] = []
        self._roots: dict[int, Any] = {}
        self._modules: dict[int, int] = {}  # id -> number
        self._names: list[str] = []
        self._parameters: list[dict[str, Any]] = []
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._events: list[tuple[Any, ...]] = []
        self._boundaries = self._depth = self._calls = 0
        self._begin_ns = self._begin_mono_ns = 0
        self._batch: int | None = None  # first dimension of the first input
        self._ending: int | None = None  # the optimizer whose steps end an iteration, or NO_OPTIMIZER for marks
        self._stepped: set[int] = set()  # optimizers since the last end
        self._is_over = False
        self.records = False
        os.register_at_fork(after_in_child=self._leave_parent)

    def _leave_parent(self) -> None:
        self.records, self._is_over = False, True

    def note(self, code: str, *values: Any) -> None:
        """Note an event of now, if it is of the main thread."""
        if self.records and self._thread_id() == self._main:
            self._events.append((time.time_ns(), code, *values))

    def call(self, *signature: Any) -> int:
        """Note the begin of a communication call, and return its number, which `called` takes at its end.

        Args:
            signature: kind, bytes, ranks, peer, tag, data type, backend, and True if it returns at once; of an
                all-to-all that says them also the bytes to each rank.
        """
        number = self._calls
        self._calls += 1
        self.note("call", self._signatures.setdefault(signature, len(self._signatures)), number)
        return number

    def called(self, number: int) -> None:
        """Note the end of a communication call."""
        self.note("called", number)

    def guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that ends the profile instead of raising."""

        def guarded(*args: Any) -> None:
            try:
                function(*args)
            except Exception:
                self._give_up()

        # torch.compile checks this: without it, it would trace into the function.
        guarded._torchdynamo_disable = True  # type: ignore[attr-defined]
        return guarded

    def after_step(self, optimizer: int, start_ns: int, end_ns: int) -> None:
        """Note an optimizer step, or a mark."""
        if self._is_over:
            return
        if self.records:
            self._events += [(start_ns, "step", optimizer), (end_ns, "stepped", optimizer)]
        if not self._ends_iteration(optimizer):
            return
        self._boundaries += 1
        self._depth = 0
        if self.records:
            self._write_iteration(end_ns)
        if self._boundaries == WARM_UP - 1:
            if not self._remove:
                self._start()
        elif self._boundaries == WARM_UP:
            self._write_model()
            self.records = True
        elif self._boundaries == WARM_UP + ITERATIONS:
            self.stop()
        self._events = []
        self._begin_ns, self._begin_mono_ns = time.time_ns(), time.monotonic_ns()

    def _ends_iteration(self, optimizer: int) -> bool:
        """Return True if a step or a mark ends an iteration: each mark, else each step of one optimizer.

        That is the first one, until another steps twice without it: the first was over.
        `ringtap.workload.workload_from_profile` refuses a profile in which these are no iterations, because other
        optimizers step in some of them alone.
        """
        if self._ending == steps.NO_OPTIMIZER:
            return optimizer == self._ending
        if optimizer == steps.NO_OPTIMIZER and self.records:  # the first mark: what was recorded were no iterations
            self.records, self._boundaries = False, WARM_UP - 2  # the profile begins again, with what the model is
        if self._ending is None or optimizer in (self._ending, steps.NO_OPTIMIZER) or optimizer in self._stepped:
            self._ending = optimizer
            self._stepped.clear()
            return True
        self._stepped.add(optimizer)
        return False

    def _start(self) -> None:
        """Add the hooks to all modules, and start PyTorch's profiler."""
        hooks = sys.modules["torch.nn.modules.module"]
        # hooks would become part of what torch.compile has compiled, which would be compiled anew
        if getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames"):
            for root in _root_modules(hooks.Module):
                self._add_root(root)
        else:
            enter, leave = self.guard(self._enter), self.guard(self._leave)
            self._remove.append(hooks.register_module_forward_pre_hook(enter).remove)
            self._remove.append(hooks.register_module_forward_hook(leave).remove)
        try:
            ranges = _Ranges(self._write_ranges)
            ranges.start()
            self._remove.append(ranges.stop)
        except Exception:  # another release of torch: the profile has no times of collectives
            error_log.note(self._settings, "recorder of collectives' times")
        import atexit

        atexit.register(self.guard(self.stop))

    def stop(self) -> None:
        """Remove what was added, and write what is left."""
        if self._is_over:
            return
        self._is_over, self.records = True, False
        for remove in self._remove:
            remove()
        self._write({"kind": "end", "buckets": [_buckets(module) for module in self._ddp_modules()]})
        self._remove, self._roots, self._events = [], {}, []

    def _give_up(self) -> None:
        if self._is_over:
            return
        error_log.note(self._settings, "profiler")
        try:
            self.stop()
        except Exception:
            self._is_over, self.records = True, False

    def _enter(self, module: Any, inputs: Any) -> None:
        if self._thread_id() != self._main:
            return
        number = self._modules.get(id(module))
        if number is None and self._depth == 0 and not self.records:
            if not self._roots:
                self._batch = next((one.shape[0] for one in inputs if getattr(one, "shape", None)), None)
            self._add_root(module)
            number = self._modules[id(module)]
        self._depth += 1
        if number is not None:
            self.note("enter", number)

    def _leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        if self._thread_id() != self._main:
            return
        self._depth = max(0, self._depth - 1)
        number = self._modules.get(id(module))
        if number is not None:
            self.note("leave", number)

    def _add_root(self, root: Any) -> None:
        """Give numbers to the modules and parameters of a module that the job calls itself."""
        prefix = "" if not self._roots else f"{type(root).__name__}{len(self._roots)}"
        self._roots[id(root)] = root
        for name, module in root.named_modules():
            self._modules.setdefault(id(module), len(self._names))
            self._names.append(_joined(prefix, _plain(name)) or type(root).__name__)
        known = {one["id"] for one in self._parameters}
        for name, parameter in root.named_parameters():
            if id(parameter) in known:
                continue
            number = len(self._parameters)
            if parameter.requires_grad and hasattr(parameter, "register_post_accumulate_grad_hook"):
                try:
                    handle = parameter.register_post_accumulate_grad_hook(self._ready_hook(number))
                    self._remove.append(handle.remove)
                except RuntimeError:  # a parameter that is not a leaf
                    pass
            item = {"id": id(parameter), "name": _joined(prefix, _plain(name))}
            self._parameters.append(dict(item, **_describe(parameter)))

    def _ready_hook(self, number: int) -> Callable[..., None]:
        def ready(_parameter: Any) -> None:
            try:
                self.note("ready", number)
            except Exception:
                self._give_up()

        return ready

    def _write_model(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        ranks = 1
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size()
        item = {"kind": "model", "format": "ringtap-profile", "version": 1, "ranks": ranks, "modules": self._names}
        item["parameters"] = [{name: one[name] for name in one if name != "id"} for one in self._parameters]
        item["batch"] = self._batch
        item["device"] = next((one["device"] for one in self._parameters), "cpu")
        groups = [module.process_group for module in self._ddp_modules()]
        item["ddp"] = [list(sys.modules["torch.distributed"].get_process_group_ranks(group)) for group in groups]
        self._write(item)

    def _write_iteration(self, end_ns: int) -> None:
        item: dict[str, Any] = {"kind": "iteration", "begin_ns": self._begin_ns, "end_ns": end_ns}
        item["mono_ns"] = time.monotonic_ns() - self._begin_mono_ns
        item["real_ns"] = time.time_ns() - self._begin_ns
        item["events"] = self._events
        item["signatures"] = list(self._signatures)
        self._write(item)

    def _write_ranges(self, ranges: list[tuple[Any, ...]]) -> None:
        self._write({"kind": "ranges", "until_ns": time.time_ns(), "ranges": ranges})

    def _write(self, item: dict[str, Any]) -> None:
        self._file.write(json.dumps(item, separators=(",", ":")).encode() + b"\n", time.monotonic_ns())

    def _ddp_modules(self) -> list[Any]:
        found = sys.modules.get("torch.nn.parallel.distributed")
        if found is None:
            return []
        return [
            module
            for root in self._roots.values()
            for module in root.modules()
            if isinstance(module, found.DistributedDataParallel)
        ]


class _Ranges:
    """Ranges of PyTorch's profiler, which another profiler of the job ends.

    Args:
        done: called once with the ranges: name, begin in ns, duration in ns, bytes of the inputs if known.
    """

    def __init__(self, done: Callable[[list[tuple[Any, ...]]], None]) -> None:
        self._done = done
        self._module: Any = sys.modules["torch.autograd.profiler"]
        self._plain = self._module._prepare_profiler
        self._is_on = False

    def start(self) -> None:
        """Start it, unless the job profiles itself."""
        torch: Any = sys.modules["torch"]
        if torch._C._autograd._profiler_enabled():
            return
        profiler = torch._C._profiler
        activities = {profiler.ProfilerActivity.CPU}
        experimental = profiler._ExperimentalConfig()
        config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, True, False, False, False, False, experimental)
        torch._C._autograd._prepare_profiler(config, activities)
        torch._C._autograd._enable_profiler(config, activities, {profiler.RecordScope.USER_SCOPE})
        self._is_on = True

        def prepare(*args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):  # nothing here may reach the job
                self.stop()  # its own profiler begins: only one can run
            return self._plain(*args, **kwargs)

        self._module._prepare_profiler = prepare

    def stop(self) -> None:
        """Stop it, and hand its ranges over."""
        if not self._is_on:
            return
        self._is_on = False
        self._module._prepare_profiler = self._plain
        torch: Any = sys.modules["torch"]
        found = []
        for event in torch._C._autograd._disable_profiler().events():
            if event.name().startswith(_RANGES):
                found.append((event.name(), event.start_ns(), event.duration_ns(), _input_bytes(event)))
        self._done(found)


def _input_bytes(event: Any) -> int | None:
    total = 0
    for shape, kind in zip(event.shapes(), event.dtypes()):
        if kind not in _ELEMENT_BYTES:
            return None
        elements = 1
        for side in shape:
            elements *= side
        total += elements * _ELEMENT_BYTES[kind]
    return total


def _plain(name: str) -> str:
    """A module's or parameter's name without those of wrappers around the model."""
    wrappers = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _describe(parameter: Any) -> dict[str, Any]:
    item = {
        "shape": list(parameter.shape),
        "elements": parameter.numel(),
        "dtype": str(parameter.dtype).replace("torch.", ""),
        "element_bytes": parameter.element_size(),
        "device": parameter.device.type,
        "needs_gradient": bool(parameter.requires_grad),
    }
    names, sizes = getattr(parameter, "_fqns", None), getattr(parameter, "_numels", None)
    if names and sizes:  # of FullyShardedDataParallel: a rank's share of several tensors
        item["of"] = [[_plain(name), size] for name, size in zip(names, sizes)]
    return item


def _root_modules(module_class: type) -> list[Any]:
    """The modules of this process that are not part of another one."""
    import gc

    modules = [one for one in gc.get_objects() if issubclass(type(one), module_class)]
    parts = {id(part) for one in modules for part in one.children()}
    return [one for one in modules if id(one) not in parts and any(True for _ in one.parameters())]


def _buckets(module: Any) -> list[list[int]]:
    """Numbers of the parameters of each bucket of a DDP module, among those that need a gradient."""
    if module.logger is None:
        return []
    text = module.logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", "")
    return [[int(word) for word in part.split()] for part in text.split(",") if part.strip()]


_PROFILER: Profiler | None = None


def profiler(settings: Settings) -> Profiler:
    """The only profiler of this process, made at the first call."""
    global _PROFILER
    if _PROFILER is None:
        _PROFILER = Profiler(settings)
    return _PROFILER


def attach(_module: ModuleType, settings: Settings) -> None:
    """Profile the iterations that follow the warm-up."""
    own = profiler(settings)
    steps.listeners.append(own.guard(own.after_step))
    count_backward_passes.starts.append(own.guard(lambda: own.note("backward")))
    count_backward_passes.listeners.append(own.guard(lambda: own.note("backward_end")))
