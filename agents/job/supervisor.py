"""``ringtap run``: it starts the job first, records beside it, and ends as the job does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from ringtap.agents.job import signals
from ringtap.agents.job.environment import job_environment, local_size
from ringtap.agents.job.location import RunLocation
from ringtap.agents.node.settings import RunSettings
from ringtap.collectors.processes import rank_in
from ringtap.terminal import shell_word

if TYPE_CHECKING:
    from ringtap.agents.job.agent_client import AgentClient
    from ringtap.agents.job.live import LiveView

_TICK_S = 1.0
_QUICK_TICK_S = 0.02
FINISH_S = 15.0


def tell(text: str) -> None:
    """Print a line for the user; a closed terminal is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def run_unrecorded(command: list[str], why: str) -> int:
    """Replace this process with the job if the run has no folder to record it in."""
    tell(f"ringtap: {why}: the job runs without being recorded")
    signals.become(command, os.environ)


def run_job(place: RunLocation, settings: RunSettings, command: list[str], live: bool = False) -> int:
    """Record a job; returns its exit code, or ends by the signal that ended it.

    Args:
        place: where the recording goes.
        settings: what to record.
        command: the job.
        live: keep the job's output in a file and give the terminal to the live view.
    """
    signals.block_signals()
    if settings.recorders:
        with contextlib.suppress(OSError):  # for the hook, which makes no folder before it records
            place.run.node(place.node)
    environment = job_environment(place.run.path, place.node, settings.recorders)
    began_ns = time.time_ns()
    output = None
    if live:
        from ringtap.agents.job.live import keep_output

        output = keep_output(place.run.path / "nodes" / place.node)
    try:
        pid = signals.spawn(command, environment, prepare=output)
    except OSError as error:
        tell(f"ringtap: no process for the supervisor ({error.strerror}): the job runs without being recorded")
        signals.become(command, os.environ)
    # From here on, no failure may affect the job or its exit code.
    passing = signals.SignalRelay(pid)
    try:
        greeting = {"pid": pid, "command": command, "rank": rank_in(os.environ), "began_ns": began_ns}
        _record(place, settings, passing, greeting, live)
    except Exception as error:  # such as no file descriptor left to load a module; the job is not affected
        tell(f"ringtap: the recording failed ({type(error).__name__}: {error}); the job goes on")
    status = passing.wait()
    assert status is not None
    return signals.end_as(status)


def _record(
    place: RunLocation, settings: RunSettings, passing: signals.SignalRelay, greeting: dict[str, Any], live: bool
) -> None:
    """Record a job that runs already, until it and the recording have ended."""
    from ringtap.agents.job.agent_client import AgentClient
    from ringtap.agents.job.live import LiveView
    from ringtap.agents.job.signals import GroupWatch  # imported now, so that the job does not wait for them

    watch = GroupWatch()
    try:
        passing.ask(watch.reached_group, watch.forget)
        link = AgentClient(place.run, place.node, settings)
        link.start(greeting | {"creator": place.created, "expected": local_size(os.environ)})
        view = LiveView(place.run.path) if live else None
        told = _attend(passing, link, view)
        status = passing.wait()
        assert status is not None
        _finish(place, link, passing, status, view, told)
    finally:
        watch.close()


def _attend(passing: signals.SignalRelay, link: AgentClient, view: LiveView | None) -> str:
    """Wait for the job's end and watch the agent; returns the last failure of it that the user was told."""
    told = ""
    while passing.wait(_TICK_S if link.is_settled else _QUICK_TICK_S) is None:
        link.tick()
        if view and not view.look(passing):
            continue  # the view owns the terminal
        if link.why and link.why != told:
            told = link.why
            tell(f"ringtap: {told}; the job goes on")
    return told


def _finish(
    place: RunLocation, link: AgentClient, passing: signals.SignalRelay, status: int, view: LiveView | None, told: str
) -> None:
    """End the recording after the job: end the agent's part, write the run's end, and print the run's path."""
    from ringtap.agents.node.node_json import conclude, no_steps

    code = os.waitstatus_to_exitcode(status)
    ended: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code, "ended_ns": time.time_ns()}
    if code < 0:
        ended["signal"] = signal.Signals(-code).name
    _signals_pending()
    answer = link.finish(ended, FINISH_S, lambda: bool(signals.ENDING & signal.sigpending()))
    if place.created:
        conclude(place.run, code, passing.ended_by, link.why or answer.get("why", ""))
        if answer.get("why"):
            tell(f"ringtap: the recording is partial: {answer['why']}")
        for what in no_steps(place.run):
            tell(f"ringtap: no steps were recorded: {what}")
    if view:
        view.end(passing)
    if link.why and link.why != told:
        tell(f"ringtap: {link.why}")
    if place.created:
        tell(f"Wrote {place.label}. Next: ringtap analyze {shell_word(place.label)}")


def _signals_pending() -> None:
    """Discard ending signals that came together with the job's end: they do not ask to stop waiting."""
    while signal.sigtimedwait(signals.ENDING, 0):
        pass
