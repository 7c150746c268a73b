"""Counts the backward passes of this process, and calls listeners after each one."""

from __future__ import annotations

import os
import time

from . import error_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .settings import Settings

#: backward passes that have ended in this process
passes = 0
#: passes that run now: 0, or more than 1 if they are nested
active = 0
#: begin of the last pass by CLOCK_REALTIME, as DDP's times
begin_ns = 0
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

    def reset() -> None:
        global active, passes
        nonlocal lock
        lock, active, passes = threading.Lock(), 0, 0

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        global active, begin_ns
        with lock:
            active += 1
            is_outer = active == 1
        if is_outer:
            begin_ns = time.time_ns()
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
        error_log.note(settings, "recorder of DDP's communication")
