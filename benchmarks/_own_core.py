"""A sender whose launcher has a core of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from _machine import cores
from _namespaces import Route
from _processes import BenchmarkError, Child, Processes
from _ringtap import Sent, finish_sending, start_sending

_MOVE_S = 10.0


def send_from_own_core(processes: Processes, route: Route, plan: Path, *arguments: object, timeout_s: float) -> Sent:
    """Send a plan with the launcher on the last core and the sender's other processes on the others.

    Raises:
        BenchmarkError: the sender failed or took too long, or there is no second core.
    """
    *others, last = cores()
    if not others:
        raise BenchmarkError("this machine has one core, so none is left for the launcher alone")
    sending = start_sending(processes, route, plan, *arguments, "--launcher-cpu", last)
    _clear(sending, last, others)
    return finish_sending(sending, timeout_s)


def _clear(sending: Child, core: int, others: Sequence[int]) -> None:
    """Wait until the sender's launcher has moved to its core, then move the sender's other processes to ``others``.

    Raises:
        BenchmarkError: no launcher has moved to the core.
    """
    deadline_s = time.monotonic() + _MOVE_S
    while not sending.is_over(0.002) and time.monotonic() < deadline_s:
        affinities = {pid: os.sched_getaffinity(pid) for pid in sending.children()}
        if {core} in affinities.values():
            for pid in (sending.pid, *(pid for pid, affinity in affinities.items() if affinity != {core})):
                os.sched_setaffinity(pid, others)
            return
    if sending.is_over(0):
        sending.result(0)
    sending.end()
    raise BenchmarkError(f"the sender has no launcher that stays on core {core}")
