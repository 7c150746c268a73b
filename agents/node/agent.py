"""Runs the agent: one per node and run, in its own session; it records while a job of the run lives on the node."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ringtap
from ringtap.agents.clock.local_clock import Clock, StepWatch
from ringtap.agents.job.environment import hook_folder
from ringtap.agents.job.foreground_command import state_of
from ringtap.agents.node.agent_control_socket import AgentSocket, Connection
from ringtap.agents.node.disk_use import DiskUse
from ringtap.agents.node.job_processes import JobProcess, StartedByDaemons, descendants
from ringtap.agents.node.node_facts import FactsChild
from ringtap.agents.node.node_json import NodeJson, hook_entry
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.agents.node.sampling import Recorders
from ringtap.agents.node.unrecorded_processes import UnrecordedProcesses, describe
from ringtap.core.errors import FILE_LIMIT, error_message
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import AGENT_LOG
from ringtap.core.secret_masking import mask_words
from ringtap.core.units import format_change, format_duration, format_size

_TICK_S = 1.0
_BUSY_TICK_S = 0.02  # while supervisors wait for the first samples, or the agent may be about to end
_SAVE_S = 5.0
_LINGER_S = 2.0  # longest wait for ranks that the launcher announced, after the last that connected has ended
_CONNECT_S = 10.0  # longest wait for them from the start
_SAME_FACTS_NS = 2_000_000_000  # the facts do not change in a run this short
_DELETED = " (deleted)"  # in /proc/PID/fd


class _Peer:
    """A connected supervisor and the state that it has reported."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.job: JobProcess | None = None
        self.is_creator = False
        self.has_ended = False  # has reported its job's end and waits for the answer
        self.wants_ready = False

    def wake(self) -> None:
        """Continue a stopped supervisor whose job has ended, because its parent waits for it."""
        if self.job and self.job.entry["ended_ns"] and not self.has_ended:
            with contextlib.suppress(OSError, struct.error):
                credentials = self.connection.stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid = struct.unpack("3i", credentials)[0]
                if state_of(pid) == "T":
                    os.kill(pid, signal.SIGCONT)


class Agent:
    """The agent's main thread: it tracks supervisors and jobs, and decides when to end.

    Args:
        run: the run directory.
        node: this node's name in it.
        settings: what to record.
        rendezvous: the agent's lock and socket paths; the agent holds the lock.
        listener: the agent's listening socket.
    """

    def __init__(
        self, run: RunDirectory, node: str, settings: RunSettings, rendezvous: AgentSocket, listener: socket.socket
    ) -> None:
        self._run, self._settings = run, settings
        self._rendezvous, self._listener = rendezvous, listener
        self._peers: list[_Peer] = []
        self._jobs: list[JobProcess] = []
        self._reasons: list[str] = []
        self._registered, self._expected = 0, 1
        self._sigterms = 0
        self._orphaned_run = False
        item: dict[str, Any] = {
            "status": "running",
            "why": "",
            "node": node,
            "host": os.uname().nodename,
            "agent": {"pid": os.getpid(), "ringtap": ringtap.__version__, "began_ns": time.time_ns()},
            "settings": settings.to_json(),
            "jobs": [],
            "collectors": {},
            "clock_steps": [],
            "before": None,
            "after": None,
        }
        self._record = NodeJson(run.node(node), item)
        self._elsewhere = StartedByDaemons(run.path, node)
        self._recorders = Recorders(run, node, settings, self._pids, self._record.say)
        self._disk = DiskUse(self._record.folder, settings.disk_limit_bytes)
        item["disk"] = self._disk.facts
        self._disk_is_told = False
        self._disk_due_s = 0.0
        self._clock = StepWatch(Clock())
        self._hook_is_wanted = any(name in settings.recorders for name in ("steps", "ddp"))
        self._began_s = time.monotonic()
        self._unrecorded = UnrecordedProcesses(self._record.folder, run.path, hook_folder())
        folders = (run.path, run.path / "nodes", self._record.folder)
        self._folder_ids = {folder: _identity(folder) for folder in folders}

    def serve(self) -> None:
        """Record until no supervisor is connected and no job lives, then end in order; a failure ends it earlier."""
        try:
            facts = self._serve()
        except Exception as error:
            self._reasons.append(f"the agent ended early: {error_message(error)}")
            self._record.say(traceback.format_exc().rstrip())
            facts = None
        self._end(facts)

    def _serve(self) -> FactsChild | None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
        signal.signal(signal.SIGTERM, self._terminate)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._record.say(f"agent {ringtap.__version__} starts: {self._settings.line()}")
        facts: FactsChild | None = None
        with contextlib.suppress(OSError):
            facts = FactsChild()
        self._recorders.start()
        self._save()
        gc.collect()
        gc.freeze()
        self._rendezvous.tidy()
        return self._run_loop(facts)

    def _run_loop(self, facts: FactsChild | None) -> FactsChild | None:
        """Run the main loop; returns the child that collects the node's facts, if it still runs."""
        begin_s = saved_s = time.monotonic()
        idle_s: float | None = None
        while True:
            busy = idle_s is not None or any(peer.wants_ready for peer in self._peers)
            self._wait(facts, _BUSY_TICK_S if busy else _TICK_S)
            if facts and (found := facts.poll()) is not None:
                self._record.item["before"], facts = found or None, None
                self._save()
            now_s = time.monotonic()
            self._look_at_clock()
            self._look_at_hook()
            self._look_at_disk(now_s)
            if now_s - saved_s >= _SAVE_S:
                self._save()
                saved_s = now_s
            if self._is_needed():
                idle_s = None
                continue
            idle_s = now_s if idle_s is None else idle_s
            awaited = self._registered < self._expected and self._sigterms < 2 and now_s - begin_s < _CONNECT_S
            if not awaited or (self._registered and now_s - idle_s >= _LINGER_S):
                return facts

    def _wait(self, facts: FactsChild | None, timeout_s: float) -> None:
        """Wait for events, for at most ``timeout_s``, and handle them."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for peer in self._peers:
            poll.register(peer.connection, select.POLLIN)
        for job in self._jobs:
            if job.pidfd >= 0:
                poll.register(job.pidfd, select.POLLIN)
        if facts:
            poll.register(facts, select.POLLIN)
        poll.poll(timeout_s * 1000)
        self._accept()
        for peer in list(self._peers):
            self._listen_to(peer)
        for job in self._jobs:
            if job.entry["ended_ns"] is None and not job.is_alive():
                job.close()
        for peer in self._peers:
            peer.wake()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of file descriptors: the caller waits and tries again
                time.sleep(0.1)
                return
            self._peers.append(_Peer(Connection(stream)))

    def _listen_to(self, peer: _Peer) -> None:
        for message in peer.connection.receive():
            if "job" in message:
                self._register(peer, message["job"])
            if "end" in message:
                peer.has_ended = True
                if peer.job:
                    peer.job.entry |= message["end"]
                    peer.job.close()
                self._reasons += filter(None, [message["end"].get("why")])
                if any(other is not peer and not other.has_ended for other in self._peers):
                    peer.connection.send({"last": False})
        if peer.wants_ready and self._recorders.are_ready():
            peer.wants_ready = False
            peer.connection.send({"ready": True})
        if not peer.connection.is_open:
            peer.connection.close()
            self._peers.remove(peer)
            if not peer.has_ended and (peer.job or peer.is_creator):
                self._note_lost(peer)

    def _note_lost(self, peer: _Peer) -> None:
        """Note that a supervisor was killed: it disconnected without reporting its job's end. The job may still run."""
        self._orphaned_run |= peer.is_creator
        what = f"the supervisor of the job's process {peer.job.pid}" if peer.job else "the capturing command"
        self._reasons.append(f"{what} was killed" + (": its exit code is not known" if peer.job else ""))
        self._record.say(self._reasons[-1])
        self._save()

    def _register(self, peer: _Peer, item: dict[str, Any]) -> None:
        """Record a job, or the processes that a capture watches."""
        self._registered += 1
        peer.is_creator, peer.wants_ready = bool(item.get("creator")), True
        for other in self._peers:
            if other.has_ended:  # it is not the last supervisor after all
                other.connection.send({"last": False})
        self._expected = max(self._expected, int(item.get("expected") or 1))
        entries = [item] if item.get("pid") else [{"pid": pid} for pid in item.get("watch") or []]
        for entry in entries:
            kept = {name: entry.get(name) for name in ("pid", "command", "rank", "began_ns")}
            if isinstance(kept["command"], list):
                kept["command"] = mask_words([str(word) for word in kept["command"]])
            kept["began_ns"] = kept["began_ns"] or time.time_ns()
            job = JobProcess(
                int(entry["pid"]), kept | {"exit_code": None, "ended_ns": None}, bool(item.get("holds", True))
            )
            if item.get("pid") and not item.get("attached"):
                peer.job = job
            self._jobs.append(job)
            self._record.item["jobs"].append(job.entry)
        if item.get("attached"):  # the process that attached it does not stay connected
            peer.has_ended = True
        self._save()

    def _is_needed(self) -> bool:
        if self._sigterms > 1:
            return False
        connected = any(not peer.has_ended for peer in self._peers)
        return connected or any(job.holds and job.entry["ended_ns"] is None for job in self._jobs)

    def _terminate(self, *_: object) -> None:
        """Handle SIGTERM: continue after the first, which the job may need time to act on, and end at the second."""
        self._sigterms += 1
        self._record.say("SIGTERM: recording until the job ends" if self._sigterms == 1 else "SIGTERM again: ending")
        if self._sigterms == 2:
            self._reasons.append("the agent was ended by SIGTERM")

    def _look_at_clock(self) -> None:
        """Note a step of CLOCK_REALTIME against CLOCK_MONOTONIC."""
        if step := self._clock.look():
            names = ("t_ns", "step_ns", "mono_ns", "mono_before_ns")
            self._record.item["clock_steps"].append({name: getattr(step, name) for name in names})
            self._record.say(f"CLOCK_REALTIME was set by {format_change(step.step_ns / 1e9)}")

    def _look_at_hook(self) -> None:
        """Look for processes of the job that did not load the hook."""
        if self._hook_is_wanted and self._unrecorded.is_due():
            for missed in self._unrecorded.look(self._pids()):
                self._record.say(f"not recorded: {describe([missed])[0]}")

    def _look_at_disk(self, now_s: float) -> None:
        """Measure the disk use, tell it once, and end the recording at its limit; only the job's steps go on."""
        if now_s < self._disk_due_s:
            return
        self._disk_due_s = now_s + (_TICK_S if self._settings.disk_limit_bytes else _SAVE_S)
        self._disk.look()
        if "bytes_per_hour" in self._disk.facts and not self._disk_is_told:
            self._disk_is_told = True
            for peer in self._peers:
                if peer.is_creator and not peer.has_ended:
                    peer.connection.send({"disk": self._disk.facts})
        if self._disk.is_full and not self._recorders.are_stopped:
            limit, passed = format_size(self._settings.disk_limit_bytes), format_duration(now_s - self._began_s)
            self._recorders.stop(f"the disk limit of {limit} was reached after {passed}")
            self._save()

    def _pids(self) -> list[int]:
        """The recorded processes, what daemons started for them, and all descendants; sampling threads call it too."""
        living = [job.pid for job in list(self._jobs) if job.entry["ended_ns"] is None]
        return descendants([*living, *self._elsewhere.pids()])

    def _save(self) -> None:
        self._record.item["collectors"] = self._recorders.facts()
        self._record.save()

    def _end(self, facts: FactsChild | None) -> None:
        """Stop the collectors, write the result to node.json and answer the supervisors."""
        self._rendezvous.close_door()
        self._reasons += self._lost_logs()
        if not self._recorders.are_stopped:
            self._recorders.stop()
        self._disk.look()
        item = self._record.item
        item["collectors"] = self._recorders.facts()
        if self._hook_is_wanted and any(job.holds for job in self._jobs):
            commands = [job.entry["command"] or [] for job in self._jobs]
            entry, stopped = hook_entry(self._record.folder, self._unrecorded, commands)
            item["collectors"]["steps"] = entry
            if stopped:
                self._reasons.append(f"steps: {stopped}")
        if facts:
            item["before"] = facts.poll(1.0) or None
        if time.time_ns() - item["agent"]["began_ns"] < _SAME_FACTS_NS:
            item["after"] = item["before"]
        else:
            with contextlib.suppress(OSError):
                item["after"] = FactsChild().poll(3.0) or None
        for job in self._jobs:
            job.close()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cost = {"cpu_s": round(usage.ru_utime + usage.ru_stime, 3), "max_rss_bytes": usage.ru_maxrss * 1024}
        item["agent"] |= {"ended_ns": time.time_ns(), **cost}
        failed: dict[str, list[str]] = {}
        for name, entry in item["collectors"].items():
            if entry["state"] == "failed":
                failed.setdefault(entry["reason"], []).append(name)
        failures = [f"{', '.join(names)} {reason}" for reason, names in failed.items()]
        before, limit, after = "; ".join([*dict.fromkeys(self._reasons), *failures]).partition(FILE_LIMIT)
        why = before + limit + after.replace(FILE_LIMIT, "")  # the file limit is explained once
        written = self._record.finish("partial" if why else "complete", why)
        if not written:
            why = "; ".join(filter(None, [why, "how it ended could not be written"]))
        self._record.say(f"agent ends: {item['status']} {why}".rstrip())
        if self._orphaned_run:  # the supervisor that made the run was killed
            with contextlib.suppress(OSError):
                self._run.finish("partial", why)
        self._listener.close()  # a supervisor that connected after the last look finds here what has been recorded
        for peer in self._peers:
            answer = {"last": True, "status": "partial" if why else "complete", "why": why, "disk": self._disk.facts}
            peer.connection.send(answer)
        self._rendezvous.clear()

    def _lost_logs(self) -> list[str]:
        """Name the open logs that are no longer in the run directory, in one sentence; empty if all are."""
        folder = self._record.folder
        if lost := [path for path, known in self._folder_ids.items() if _identity(path) != known]:
            folder.mkdir(parents=True, exist_ok=True)  # for node.json, which reports it
            return [f"{lost[0]} was deleted or moved while it was written, and what was in it is not here"]
        open_files = []
        for pid in descendants([os.getpid()]):  # with the files of tcpdump
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        open_files.append(str(link.readlink()))
        gone = {name.removesuffix(_DELETED) for name in open_files if name.endswith(_DELETED)}
        names = sorted(str(Path(name).relative_to(folder)) for name in gone if Path(name).is_relative_to(folder))
        logs = [name for name in names if not Path(name).name.startswith(".")]
        return [f"{', '.join(logs[:3])}{', …' if logs[3:] else ''} deleted while being written"] if logs else []


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode of a folder; zeros if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def run_agent(
    run: RunDirectory, node: str, settings: RunSettings, rendezvous: AgentSocket, listener: socket.socket, lock_fd: int
) -> None:
    """Run the agent in this process, which the caller has forked and which holds the lock; returns when it ends."""
    _detach({listener.fileno(), lock_fd}, run.path / "nodes" / node / AGENT_LOG)
    sys.setswitchinterval(0.0005)  # so that slow collectors do not delay the fast thread
    Agent(run, node, settings, rendezvous, listener).serve()


def _detach(keep: set[int], log: Path) -> None:
    """Release the parent's files, terminal and working directory; errors go to the agent's log."""
    null = os.open(os.devnull, os.O_RDWR)
    errors = null
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, fd)
    last = 2
    for fd in sorted(keep):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1] & 0xFFFFF)
    os.chdir("/")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("ringtap-agent")
    with contextlib.suppress(OSError):  # out of memory, the kernel kills the agent before the job
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
