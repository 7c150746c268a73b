"""Implements ``ringtap run``: starts the job first, records beside it, and ends as the job does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.agents.job import foreground_command
from ringtap.agents.job.environment import job_environment, local_size
from ringtap.agents.job.run_location import RunLocation
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.collectors.process_facts import rank_in
from ringtap.core.errors import failure_message
from ringtap.core.isolated_python import python_command
from ringtap.core.terminal_escaping import readable, shell_word

if TYPE_CHECKING:
    from socket import socket

    from ringtap.agents.job.agent_client import AgentClient
    from ringtap.agents.job.exit_cause import ExitCause
    from ringtap.agents.job.live_beside_job import LiveView

_TICK_S = 1.0
_QUICK_TICK_S = 0.02
FINISH_S = 15.0


class MetricsProcess:
    """The process that serves or sends the metrics of this node; its end does not affect the job or the recording.

    Args:
        run: the run directory.
        node: this node's name in it.
        listener_or_url: the listening socket, which the process takes over, or the URL to which it sends.

    Attributes:
        pid: its pid; 0 if it could not be started.
    """

    def __init__(self, run: Path, node: str, listener_or_url: socket | str) -> None:
        self.pid = 0
        with contextlib.ExitStack() as stack:
            if isinstance(listener_or_url, str):
                module, where = "otlp", listener_or_url
            else:
                listener = stack.enter_context(listener_or_url)
                listener.set_inheritable(True)
                module, where = "metrics", str(listener.fileno())
            words = [str(run), node, where, str(os.getpid())]
            command = python_command(sys.executable, f"ringtap.analysis.live.{module}", *words)
            # in a process group of its own and deaf to Ctrl-C: no signal to the job must end it before the job
            with contextlib.suppress(OSError):
                self.pid = os.posix_spawn(
                    sys.executable,
                    command,
                    os.environ,
                    setpgroup=0,
                    setsigmask=(signal.SIGINT,),
                    setsigdef=(signal.SIGPIPE,),
                )

    def end(self) -> None:
        """Ask it to end: it sends what it has not sent yet."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)


def tell(text: str) -> None:
    """Print a line for the user; a closed terminal is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def tell_missing(reasons: list[str], client: AgentClient) -> None:
    """Tell why parts of a recording are missing, but for the agent's own end, which is told elsewhere."""
    if untold := "; ".join(why for why in reasons if why != client.why):
        tell(f"ringtap: the recording is partial: {untold}")


def tell_disk_use(client: AgentClient) -> None:
    """Print the disk use of this node's recording, if it is known."""
    from ringtap.agents.node.disk_use import disk_words

    if words := disk_words(client.disk):
        tell(f"ringtap: the recording of this node takes {words}")


def run_unrecorded(command: list[str], why: str) -> int:
    """Replace this process with the job, because no run directory can be written."""
    tell(f"ringtap: {why}: the job runs without being recorded")
    foreground_command.become(command, os.environ)


def run_job(
    location: RunLocation,
    settings: RunSettings,
    command: list[str],
    live: bool = False,
    listener_or_url: socket | str | None = None,
) -> int:
    """Record a job; returns its exit code, or ends by the signal that ended it.

    Args:
        location: where the recording goes.
        settings: what to record.
        command: the job.
        live: keep the job's output in a file and give the terminal to the live view.
        listener_or_url: the socket on which the node's metrics are served, or the URL to which they are sent; None for
            none.
    """
    foreground_command.block_signals()
    if settings.recorders:
        with contextlib.suppress(OSError):  # for the hook, which creates no folder before it records
            location.run.node(location.node)
        if "RINGTAP_RUN" in os.environ:
            from ringtap.agents.node.unrecorded_processes import note_inner_run

            note_inner_run(os.environ, location.run.path)
    environment = job_environment(location.run.path, location.node, settings.recorders)
    began_ns = time.time_ns()
    output = None
    if live:
        from ringtap.agents.job.live_beside_job import keep_output

        output = keep_output(location.run.path / "nodes" / location.node)
    try:
        pid = foreground_command.spawn(command, environment, prepare=output)
    except OSError as error:
        tell(f"ringtap: no process for the supervisor ({error.strerror}): the job runs without being recorded")
        foreground_command.become(command, os.environ)
    # From here on, no failure may affect the job or its exit code.
    relay = foreground_command.SignalRelay(pid)
    try:
        from ringtap.agents.job.exit_cause import ExitCause, MemoryKills

        cause = ExitCause(command, environment, MemoryKills())
        words = [readable(word) for word in command]
        greeting = {"pid": pid, "command": words, "rank": rank_in(os.environ), "began_ns": began_ns}
        _record(location, settings, relay, greeting, live, listener_or_url, cause)
    except Exception as error:  # such as no file descriptor left to load a module; the job is not affected
        tell(f"ringtap: the recording failed ({failure_message(error)}); the job goes on")
    status = relay.wait()
    assert status is not None
    return foreground_command.end_as(status)


def _record(
    location: RunLocation,
    settings: RunSettings,
    relay: foreground_command.SignalRelay,
    greeting: dict[str, Any],
    live: bool,
    listener_or_url: socket | str | None,
    cause: ExitCause,
) -> None:
    """Record a job that runs already, until it and the recording have ended."""
    from ringtap.agents.job.agent_client import AgentClient
    from ringtap.agents.job.foreground_command import GroupWatch  # imported now, so that the job does not wait for them
    from ringtap.agents.job.live_beside_job import LiveView

    watch = GroupWatch()
    metrics: MetricsProcess | None = None
    try:
        relay.watch = watch
        client = AgentClient(location.run, location.node, settings)
        client.start(greeting | {"creator": location.created, "expected": local_size(os.environ)})
        view = LiveView(location.run.path) if live else None
        if listener_or_url:
            metrics = MetricsProcess(location.run.path, location.node, listener_or_url)
        shown = _wait_for_job(relay, client, view, metrics)
        _finish(location, client, relay, view, shown, "profile" in settings.recorders, cause)
    finally:
        watch.close()
        if metrics and metrics.pid not in relay.reaped:
            metrics.end()


def _wait_for_job(
    relay: foreground_command.SignalRelay, client: AgentClient, view: LiveView | None, metrics: MetricsProcess | None
) -> str:
    """Wait for the job's end and watch the agent; returns the agent's last failure that was shown to the user."""
    shown = ""
    served, disk_is_told = metrics is not None, False
    while relay.wait(_TICK_S if client.is_settled else _QUICK_TICK_S) is None:
        client.tick()
        if view and not view.look(relay):
            continue  # the view owns the terminal
        if served and metrics and (not metrics.pid or metrics.pid in relay.reaped):
            served = False
            tell("ringtap: the metrics are not served or sent any more; the job goes on")
        if client.disk and not disk_is_told:
            disk_is_told = True
            tell_disk_use(client)
        if client.why and client.why != shown:
            shown = client.why
            tell(f"ringtap: {shown}; the job goes on")
    return shown


def _finish(
    location: RunLocation,
    client: AgentClient,
    relay: foreground_command.SignalRelay,
    view: LiveView | None,
    shown: str,
    is_profiled: bool,
    exit_cause: ExitCause,
) -> None:
    """End the recording after the job: wait for the agent, write the run's end, and print the run's path."""
    from ringtap.agents.job.exit_cause import SHELL_CAUSE
    from ringtap.agents.node.node_json import conclude, job_end, missing_steps

    status = relay.wait()
    assert status is not None
    code = os.waitstatus_to_exitcode(status)
    ended: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code, "ended_ns": time.time_ns()}
    if code < 0:
        ended["signal"] = signal.Signals(-code).name
    has_begun = not exit_cause.obstacle(code)
    if cause := "" if relay.ended_by else exit_cause.words(code):
        ended["cause"] = cause
        if has_begun and cause != SHELL_CAUSE:  # otherwise it has been said
            tell(f"ringtap: {job_end(code, None, cause)[1]}")
    # those that came with the job's end are not meant to end the wait for the agent
    while signal.sigtimedwait(foreground_command.ENDING, 0):
        pass
    answer = client.finish(ended, FINISH_S, lambda: bool(foreground_command.ENDING & signal.sigpending()))
    if location.created:
        missing = conclude(location.run, code, relay.ended_by, client.why or answer.get("why", ""), cause)
        tell_missing(missing, client)
        for what in missing_steps(location.run):
            tell(f"ringtap: {what}")
    if view:
        view.end(relay)
    if client.why and client.why != shown:
        tell(f"ringtap: {client.why}")
    if location.created:
        tell_disk_use(client)
        verb = "workload new -o WORKLOAD --run" if is_profiled else "analyze"
        following = f"Next: ringtap {verb} {shell_word(location.label)}" if has_begun else "There is nothing to analyze"
        tell(f"Wrote {location.label}. {following}")
