"""Records communication calls of ``torch.distributed`` for the profiler: kind, bytes, ranks, peer, tag, begin, end."""

from __future__ import annotations

import inspect

from . import error_log, layer_profiler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

    from .layer_profiler import Profiler
    from .settings import Settings

# Function -> kind, the argument whose bytes count, and True if these are those of one rank of several.
# Chakra counts all data of a collective, but of all_gather and gather the data of one rank.
_FUNCTIONS = {
    "all_reduce": ("all_reduce", "tensor", False),
    "reduce": ("reduce", "tensor", False),
    "broadcast": ("broadcast", "tensor", False),
    "all_gather": ("all_gather", "tensor", False),
    "all_gather_into_tensor": ("all_gather", "input_tensor", False),
    "all_gather_single": ("all_gather", "input_tensor", False),
    "gather": ("gather", "tensor", False),
    "scatter": ("scatter", "tensor", True),
    "reduce_scatter": ("reduce_scatter", "output", True),
    "reduce_scatter_tensor": ("reduce_scatter", "input", False),
    "reduce_scatter_single": ("reduce_scatter", "input", False),
    "all_to_all": ("all_to_all", "input_tensor_list", False),
    "all_to_all_single": ("all_to_all", "input", False),
    "barrier": ("barrier", "", False),
    "send": ("send", "tensor", False),
    "isend": ("send", "tensor", False),
    "recv": ("recv", "tensor", False),
    "irecv": ("recv", "tensor", False),
}
_PEER = {"send": ("dst", "group_dst"), "recv": ("src", "group_src")}


class _Calls:
    """The communication calls of this process, and the works that wait for some of them."""

    def __init__(self, module: ModuleType, own: Profiler, settings: Settings) -> None:
        self.module, self.own, self._settings = module, own, settings
        self._depth = 0
        self._works: dict[int, int] = {}  # id of a work -> number of its call

    def wrap(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a communication function that notes its calls."""
        import functools

        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not self.own.records or self._depth:
                return plain(*args, **kwargs)
            number = self._begin(name, signature, args, kwargs)
            self._depth += 1
            try:
                result = plain(*args, **kwargs)
            finally:
                self._depth -= 1
            if number is not None:
                self._end(number, result)
            return result

        # torch.compile checks this: without it, it would trace into the wrapper.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        return function

    def _begin(self, name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> int | None:
        try:
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            ranks = tuple(self.module.get_process_group_ranks(group or self.module.group.WORLD))
            kind, argument, is_one_of_several = _FUNCTIONS[name]
            tensors = given.get(argument) if argument else []
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            size = sum(one.numel() * one.element_size() for one in tensors) * (len(ranks) if is_one_of_several else 1)
            peer = None
            if kind in _PEER:
                by_rank, by_place = _PEER[kind]
                peer = given.get(by_rank)
                if peer is None and given.get(by_place) is not None:
                    peer = ranks[given[by_place]]
            kind_of_data = str(tensors[0].dtype).replace("torch.", "") if tensors else ""
            is_async = name in ("isend", "irecv") or bool(given.get("async_op", False))
            splits = _split_bytes(name, given, size)
            return self.own.call(kind, size, ranks, peer, given.get("tag", 0), kind_of_data, "torch", is_async, *splits)
        except Exception:  # the call itself says what is wrong with it
            return None

    def _end(self, number: int, result: Any) -> None:
        try:
            self.own.called(number)
            if result is not None:
                self._works[id(result)] = number
        except Exception:
            error_log.note(self._settings, "profiler of communication calls")

    def wrap_wait(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a work's ``wait`` that notes its calls."""
        import functools

        @functools.wraps(plain)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = None if not self.own.records or self._depth else self._works.pop(id(work), None)
            if number is None:
                return plain(work, *args, **kwargs)
            self.own.note("wait", number)
            try:
                return plain(work, *args, **kwargs)
            finally:
                self.own.note("waited", number)

        wait._torchdynamo_disable = True  # type: ignore[attr-defined]
        return wait


def _split_bytes(name: str, given: dict[str, Any], size: int) -> tuple[tuple[int, ...], ...]:
    """Return the bytes to each rank of an all-to-all whose call says them, else nothing."""
    if name == "all_to_all":
        return (tuple(one.numel() * one.element_size() for one in given["input_tensor_list"]),)
    rows = given.get("input_split_sizes")
    return (shares(size, rows),) if rows else ()


def shares(size: int, rows: Iterable[int]) -> tuple[int, ...]:
    """Return the bytes of each part of a tensor, from their rows."""
    found = [int(row) for row in rows]
    return tuple(size * row // max(1, sum(found)) for row in found)


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap the communication functions of ``torch.distributed``."""
    calls = _Calls(module, layer_profiler.profiler(settings), settings)
    for name in _FUNCTIONS:
        plain = getattr(module, name, None)
        if plain is not None:
            setattr(module, name, calls.wrap(name, plain))
    if hasattr(module, "Work"):
        module.Work.wait = calls.wrap_wait(module.Work.wait)
