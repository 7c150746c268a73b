"""Implements ``ringtap record``: records a node without starting a job."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from ringtap.agents.job import foreground_command
from ringtap.agents.job.agent_client import AgentClient
from ringtap.agents.job.live_beside_job import LiveView
from ringtap.agents.job.run_location import RunLocation
from ringtap.agents.job.supervisor import FINISH_S, tell_disk_use, tell_missing
from ringtap.agents.node.job_processes import start_time
from ringtap.agents.node.node_json import conclude
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.terminal_escaping import shell_word

_POLL_S = 0.02
_TICK_S = 0.5


def check_pids(pids: list[int]) -> None:
    """Check that the processes to watch exist.

    Raises:
        UsageError: one of them does not.
    """
    for pid in pids:
        if not start_time(pid):
            raise UsageError(f"there is no process {pid} to record")


def record(
    location: RunLocation, settings: RunSettings, seconds: float | None, pids: list[int], live: bool = False
) -> int:
    """Record until a signal arrives, the time is up, or the processes have ended; returns the exit code.

    Args:
        location: where the recording goes.
        settings: what to record.
        seconds: duration from the collectors' first samples; None for no limit.
        pids: processes to watch; empty for none.
        live: show the live view in the terminal.

    Raises:
        MeasurementError: the agent could not be started, or was killed.
    """
    foreground_command.block_signals()
    # Ctrl-Z stops this command; the recording goes on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, foreground_command.STOPS)
    client = AgentClient(location.run, location.node, settings)
    client.start({"watch": pids, "holds": False, "creator": location.created})
    is_signalled = _wait(lambda: client.is_ready or bool(client.why), client, None)
    view, children = (LiveView(location.run.path) if live and client.is_up else None), foreground_command.SignalRelay(0)
    if not is_signalled and client.is_up:
        disk_is_told = False
        started = {pid: start_time(pid) for pid in pids}

        def is_over() -> bool:
            nonlocal disk_is_told
            if view:
                view.look(children)
            elif client.disk and not disk_is_told:
                disk_is_told = True
                tell_disk_use(client)
            return bool(client.why) or (
                bool(pids) and not any(start and start_time(pid) == start for pid, start in started.items())
            )

        _wait(is_over, client, seconds)
    answer = client.finish({}, FINISH_S, lambda: bool(foreground_command.ENDING & signal.sigpending()))
    if location.created:
        tell_missing(conclude(location.run, 0, None, client.why or answer.get("why", "")), client)
    if view:
        view.end(children)
    if client.why:
        raise MeasurementError(f"{client.why} ({location.label})")
    if location.created:
        tell_disk_use(client)
        print(f"Wrote {location.label}. Next: ringtap analyze {shell_word(location.label)}", file=sys.stderr)
    return 0


def _wait(is_over: Callable[[], bool], client: AgentClient, seconds: float | None) -> bool:
    """Wait for an ending signal, for ``is_over``, or for so many seconds; returns True if a signal arrived."""
    deadline_s = None if seconds is None else time.monotonic() + seconds
    while True:
        client.tick()
        if is_over():
            return False
        tick_s = _TICK_S if client.is_ready else _POLL_S
        left_s = tick_s if deadline_s is None else min(tick_s, deadline_s - time.monotonic())
        if left_s <= 0:
            return False
        if foreground_command.take_signal(foreground_command.ENDING, left_s):
            return True
