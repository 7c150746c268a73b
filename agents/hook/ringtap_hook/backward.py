"""Counter of the backward passes of this process, with listeners that are called after each one."""

from __future__ import annotations

import os

from . import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .settings import Settings

#: backward passes that have ended in this process
passes = 0
#: called after each of them; must not raise
listeners: list[Callable[[], None]] = []


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap ``torch.autograd.backward``, which ``Tensor.backward`` calls as well."""
    import functools
    import threading

    plain = module.backward
    lock = threading.Lock()
    under_way = 0

    def start_afresh() -> None:
        global passes
        nonlocal lock, under_way
        lock, under_way, passes = threading.Lock(), 0, 0

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal under_way
        with lock:
            under_way += 1
        try:
            result = plain(*args, **kwargs)
        finally:
            with lock:
                under_way -= 1
        # A pass within another (activation checkpoints, at times on a thread of their own) is part of it.
        if under_way == 0:
            _count(settings)
        return result

    os.register_at_fork(after_in_child=start_afresh)
    # torch.compile looks for this: without it, a compiled function would trace into the wrapper.
    backward._torchdynamo_disable = True  # type: ignore[attr-defined]
    module.backward = backward  # type: ignore[attr-defined]


def _count(settings: Settings) -> None:
    global passes
    passes += 1
    try:
        for listener in listeners:
            listener()
    except Exception:
        listeners.clear()
        log.note(settings, "recorder of DDP's communication")
