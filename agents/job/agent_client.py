"""Starts the agent of this run and node, or connects to the one that runs.

The agent is not a child of the supervisor. The job never waits for the connection, and continues if it is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtap.agents.node.agent_control_socket import AgentSocket, Connection
from ringtap.agents.node.node_json import say
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.collectors.kernel_files import PROC, stat_of
from ringtap.core.errors import UsageError, error_message
from ringtap.core.run_directory import RunDirectory, UnwritableError, read_json, write_json
from ringtap.core.run_directory_schema import NODE, NODE_JSON
from ringtap.core.secret_masking import mask_words

# Exit statuses of the intermediate process; a lower one is an errno
RECORDED = 200
_FAILED = 199


def start_agent(run: RunDirectory, node: str, settings: RunSettings) -> int:
    """Start the agent unless there is one; returns the exit status of the intermediate process, at once.

    Status 0: the agent, this one or another, accepts connections now or soon. RECORDED: an earlier agent has recorded
    this node. Otherwise the status is an errno, or 199 for a failure without one.

    Raises:
        OSError: no process can be forked.
    """
    pid = os.fork()
    if pid == 0:
        code = _FAILED
        try:
            code = _fork_agent(run, node, settings)
        except OSError as error:
            code = min(error.errno or _FAILED, _FAILED)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork_agent(run: RunDirectory, node: str, settings: RunSettings) -> int:
    """Leave the session, take the lock and fork the agent; runs in the intermediate process."""
    os.setsid()
    rendezvous = AgentSocket(run.path, node)
    lock = rendezvous.take()
    if lock is None:
        return 0
    if (run.node(node) / NODE_JSON).exists():
        rendezvous.clear()
        return RECORDED
    listener = rendezvous.listen()
    if os.fork() == 0:
        try:
            from ringtap.agents.node.agent import run_agent

            run_agent(run, node, settings, rendezvous, listener, lock)
        except Exception as error:
            _note_failure(run.node(node), error)
    return 0


def _note_failure(folder: Path, error: Exception) -> None:
    """Write why an agent could not run, for its supervisors."""
    for fd in (0, 1):  # no other descriptor may be left
        with contextlib.suppress(OSError):
            os.close(fd)
    why = f"the agent could not run: {error_message(error)}"
    with contextlib.suppress(OSError):
        write_json(folder / NODE_JSON, {"status": "partial", "why": why, "node": folder.name, "jobs": []})
        (folder / "DONE").touch()


_CONNECT_S = 10.0
_POLL_S = 0.05


class AgentClient:
    """A connection to this node's agent; `start` also starts the agent unless there is one.

    Args:
        run: the run directory.
        node: this node's name in it.
        settings: what to record, if the agent is started here.

    Attributes:
        why: the reason why nothing is recorded (any more); empty while the agent records.
        is_ready: whether the collectors have taken their first samples.
        disk: disk use of the recording as in node.json, once it is known for a minute; empty before.
    """

    def __init__(self, run: RunDirectory, node: str, settings: RunSettings) -> None:
        self._run, self._node, self._settings = run, node, settings
        self.why = self._lacks = ""
        self.is_ready = False
        self.disk: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._rendezvous: AgentSocket | None = None
        self._session = self._agent_pid = 0
        self._pidfd = -1
        self._deadline_s = 0.0
        self._greeting: dict[str, Any] = {}
        self._answer: dict[str, Any] | None = None

    @property
    def is_up(self) -> bool:
        """True if the agent is connected."""
        return self._connection is not None and not self.why

    @property
    def is_settled(self) -> bool:
        """True if the client is connected or has given up."""
        return bool(self.why) or self._connection is not None

    def start(self, greeting: dict[str, Any]) -> None:
        """Start the agent unless there is one, and send it the greeting as soon as it listens."""
        self._greeting, self._deadline_s = greeting, time.monotonic() + _CONNECT_S
        try:
            self._rendezvous = AgentSocket(self._run.path, self._node)
            code = start_agent(self._run, self._node, self._settings)
        except (OSError, UnwritableError) as error:
            self.why = f"the agent could not be started: {getattr(error, 'strerror', None) or error}"
            return
        if code == RECORDED:
            self._report_ended_agent(self._final_item())
        elif code:
            reason = os.strerror(code) if 0 < code < _FAILED else f"status {code}"
            self.why = f"the agent could not be started: {reason}"
        else:
            self.tick()

    def tick(self) -> None:
        """Connect if needed and read the agent's messages; never waits."""
        if self.why or self._rendezvous is None:
            return
        if self._connection is None:
            self._connect()
        if self._connection is None:
            return
        for message in self._connection.receive():
            self.is_ready |= bool(message.get("ready"))
            self.disk = message.get("disk", self.disk)
            if "last" in message:
                self._answer = message
        if not self._connection.is_open and self._answer is None:
            self._report_lost_agent()

    def _connect(self) -> None:
        assert self._rendezvous is not None
        try:
            found = self._rendezvous.connect()
        except OSError as error:
            self.why = f"the agent cannot be reached: {error.strerror}"
            return
        if found is None:
            if item := self._final_item():
                self._report_ended_agent(item)
            elif time.monotonic() > self._deadline_s:
                self.why = "the agent did not come up"
            return
        stream, self._agent_pid = found
        self._connection = Connection(stream)
        with contextlib.suppress(OSError, AttributeError):
            self._session = os.getsid(self._agent_pid)
            self._pidfd = os.pidfd_open(self._agent_pid)
        self._connection.send({"job": self._greeting})

    def _final_item(self) -> dict[str, Any]:
        """Return what node.json holds after an agent has ended; empty before."""
        folder = self._run.path / "nodes" / self._node
        if (folder / "DONE").exists():
            with contextlib.suppress(OSError, UsageError):
                item: dict[str, Any] = read_json(folder / NODE_JSON, NODE)
                return item
        return {}

    def _report_ended_agent(self, item: dict[str, Any]) -> None:
        """Tell that the agent had ended: it failed at once, or this job began too late, which node.json then says."""
        if item.get("why") and not item.get("jobs"):
            self.why = str(item["why"])
            return
        self.why = f"node {self._node} of {self._run.path} has been recorded already by an agent that has ended"
        if self._greeting.get("pid"):
            self._lacks = "a job began after the recording had ended: at most its steps are here"
            self._note({})

    def _report_lost_agent(self) -> None:
        """Log that the agent disconnected without an answer, end its processes, and mark node.json partial.

        An agent that was killed after it had written everything gives its answer in node.json. One that had begun to
        end before this process connected has not read the greeting.
        """
        if item := self._final_item():
            if self._greeting.get("pid", 0) not in [0, *(job.get("pid") for job in item.get("jobs") or [])]:
                self._report_ended_agent(item)
                return
            self._answer = {"last": True, "status": item.get("status", "partial"), "why": item.get("why", "")}
            return
        self.why = "the agent was killed or crashed; what it had recorded until then is whole"
        say(self._run.path / "nodes" / self._node, f"supervisor {os.getpid()}: {self.why}")
        if self._session:
            end_session(self._session)
        self._note({})

    def _note(self, ended: dict[str, Any]) -> None:
        """Write node.json for an agent that is gone; several supervisors may do so, one after the other."""
        path = self._run.path / "nodes" / self._node / NODE_JSON
        assert self._rendezvous is not None
        lock = None
        with contextlib.suppress(OSError, UsageError):
            lock = self._take_lock()
            try:
                with contextlib.suppress(OSError):
                    (path.parent / ".reserve").unlink()
                item = read_json(path, NODE)
                known, lacks = str(item.get("why") or ""), self._lacks or self.why
                why = known if lacks in known else "; ".join(filter(None, [known, lacks]))
                item |= {"status": "partial", "why": why}
                pid, jobs = self._greeting.get("pid"), item.setdefault("jobs", [])
                if pid and pid not in [job.get("pid") for job in jobs]:  # the agent never read the greeting
                    names = ("pid", "command", "rank", "began_ns")
                    entry = {name: self._greeting.get(name) for name in names}
                    entry["command"] = mask_words([str(word) for word in entry["command"] or []])
                    jobs.append(entry | {"exit_code": None, "ended_ns": None})
                for job in jobs:
                    if job.get("pid") == pid and job.get("exit_code") is None:
                        job.update(ended)
                write_json(path, item)
            finally:
                if lock is not None:
                    self._rendezvous.clear()
                    os.close(lock)

    def _take_lock(self) -> int | None:
        """The agent's lock, once the kernel or another supervisor has released it; None if it stays taken for 1 s."""
        assert self._rendezvous is not None
        for _ in range(20):
            if (lock := self._rendezvous.take()) is not None:
                return lock
            time.sleep(_POLL_S)
        return None

    def finish(self, ended: dict[str, Any], seconds: float, is_impatient: Callable[[], bool]) -> dict[str, Any]:
        """Tell the agent that the job has ended and wait until it has written everything, unless other jobs run.

        Args:
            ended: what to add to the job's entry in node.json.
            seconds: the longest wait.
            is_impatient: returns True to end the wait early.

        Returns:
            The agent's answer (``last``, and if that is true ``status`` and ``why``); ``{}`` without one.
        """
        deadline_s = time.monotonic() + seconds
        if self._rendezvous is None and not self.why:
            self.why = "the agent was never started"
        while not self.is_settled and time.monotonic() < deadline_s and not is_impatient():
            time.sleep(0.005)
            self.tick()
        if self._connection is not None and self._connection.is_open:
            self._connection.send({"end": ended})
        while self.is_up and self._answer is None and time.monotonic() < deadline_s and not is_impatient():
            assert self._connection is not None
            select.select([self._connection], [], [], _POLL_S)
            self.tick()
        if self._answer is None:
            if self.why and (self._connection is not None or self._lacks):
                self._note(ended)
            elif self.is_up:
                self.why = "the agent has not written everything yet; it ends by itself"
            return {}
        if self._answer.get("last") and self._pidfd >= 0:
            select.select([self._pidfd], [], [], 2.0)
        return self._answer


def end_session(session: int) -> None:
    """End the remaining processes of a dead agent's session, such as tcpdump."""
    for pid in [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]:
        if stat_of(pid)[3:4] == [str(session)]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
