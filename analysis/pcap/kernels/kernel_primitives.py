"""Compiles a function as a kernel, and loads and stores memory: by integer addresses, unaligned, as int64.

Imported only when a kernel is compiled. Nothing here checks bounds: the callers compare with the captured length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
_WORD = ir.IntType(64)


def kernel(function: Function) -> Function:
    """Compile a function without Python objects, exceptions or bounds checks.

    It is compiled at once, for int64 only: by default numba compiles a copy for every constant that is passed.
    """
    return _compiled(function, False)


def inlined(function: Function) -> Function:
    """Compile a function as `kernel` does, and inline it into its callers."""
    return _compiled(function, True)


def _compiled(function: Function, inline: bool) -> Function:
    signature = (types.int64,) * function.__code__.co_argcount
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": inline}
    return cast(Function, njit(signature, **options)(function))


def _load(bits: int, swapped: bool) -> Callable[[int], int]:
    def load(_context: Any, _address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            if swapped:
                value = builder.bswap(value)
            return builder.zext(value, _WORD) if bits < 64 else value

        return types.int64(types.int64), generate

    return cast(Callable[[int], int], intrinsic(load))


def _store(bits: int) -> Callable[[int, int], None]:
    def store(_context: Any, _address: Any, _value: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            kept = builder.trunc(arguments[1], ir.IntType(bits)) if bits < 64 else arguments[1]
            builder.store(kept, pointer, align=1)

        return types.void(types.int64, types.int64), generate

    return cast(Callable[[int, int], None], intrinsic(store))


# in the machine's order
load8, load16, load32, load64 = (_load(bits, False) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_store(bits) for bits in (8, 16, 32, 64))
# byte-swapped: in network order, on a little-endian machine
swapped16, swapped32 = (_load(bits, True) for bits in (16, 32))


def _times() -> Callable[[int, int], int]:
    def times(_context: Any, _a: Any, _b: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.mul(*arguments)

        return types.int64(types.int64, types.int64), generate

    return cast(Callable[[int, int], int], intrinsic(times))


# product modulo 2^64; in compiled code, an overflow of ``*`` is undefined
times = _times()
