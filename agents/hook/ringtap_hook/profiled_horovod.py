"""Records communication of Horovod's PyTorch API for the profiler: each tensor's kind and bytes, and the waits."""

from __future__ import annotations

import functools

from . import layer_profiler, profiled_torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .layer_profiler import Profiler
    from .settings import Settings

# Functions of horovod.torch.mpi_ops that begin the communication of their first argument, and return its handle
_FUNCTIONS = {
    "_allreduce_async": "all_reduce",
    "_grouped_allreduce_async": "all_reduce",
    "_allgather_async": "all_gather",
    "_broadcast_async": "broadcast",
    "_reducescatter_async": "reduce_scatter",
    "alltoall_async": "all_to_all",
}


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap Horovod's functions, which its optimizer and its other functions call."""
    own = layer_profiler.profiler(settings)
    handles: dict[int, int] = {}  # handle -> number of its call
    for name, kind in _FUNCTIONS.items():
        plain = getattr(module, name, None)
        if plain is not None:
            setattr(module, name, _wrap(module, own, handles, kind, plain))
    plain_synchronize = module.synchronize

    @functools.wraps(plain_synchronize)
    def synchronize(handle: Any) -> Any:
        number = handles.pop(handle, None) if own.records else None
        if number is None:
            return plain_synchronize(handle)
        own.note("wait", number)
        try:
            return plain_synchronize(handle)
        finally:
            own.note("waited", number)

    module.synchronize = synchronize  # type: ignore[attr-defined]


def _wrap(
    module: ModuleType, own: Profiler, handles: dict[int, int], kind: str, plain: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def function(given: Any, *args: Any, **kwargs: Any) -> Any:
        if not own.records:
            return plain(given, *args, **kwargs)
        try:
            tensors = given if isinstance(given, (list, tuple)) else [given]
            size = sum(one.numel() * one.element_size() for one in tensors)
            kind_of_data = str(tensors[0].dtype).replace("torch.", "")
            rows = kwargs.get("splits", args[0] if args else None) if kind == "all_to_all" else None
            splits = () if rows is None else (profiled_torch_distributed.shares(size, rows),)
            ranks = tuple(range(module.size()))
            number = own.call(kind, size, ranks, None, 0, kind_of_data, "horovod", True, *splits)
        except Exception:  # the call itself says what is wrong with it
            return plain(given, *args, **kwargs)
        handle = plain(given, *args, **kwargs)
        own.called(number)
        handles[handle] = number
        return handle

    return function
