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
#: called before each of them; must not raise
starts: list[Callable[[], None]] = []
#: called after each of them; must not raise
listeners: list[Callable[[], None]] = []


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap ``torch.autograd.backward``, which ``Tensor.backward`` calls as well."""
    import functools
    import threading

    plain = module.backward
    lock = threading.Lock()
    active = 0

    def reset() -> None:
        global passes
        nonlocal lock, active
        lock, active, passes = threading.Lock(), 0, 0

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal active
        with lock:
            active += 1
            is_outer = active == 1
        if is_outer:
            for start in starts:
                start()
        try:
            result = plain(*args, **kwargs)
        finally:
            with lock:
                active -= 1
        # A nested pass (an activation checkpoint, possibly in another thread) is part of the outer one.
        if active == 0:
            _count(settings)
        return result

    os.register_at_fork(after_in_child=reset)
    # torch.compile checks this: without it, it would trace into the wrapper.
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
