"""Runs commands on hosts, each through a connection to its host worker (`ringtap.agents.hosts.worker`)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import ringtap
from ringtap.agents.hosts import message_frames
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import MeasurementError, error_message, exit_words, without_number
from ringtap.core.isolated_python import RUN_MODULE, python_command
from ringtap.core.untrusted_files import read_tail

_NOISE_BYTES = 1 << 20  # limit of a login's output, on standard output and on standard error
_NOISE_CHECK_S = 0.25
_FACTS_BYTES = 1 << 16
_LAST_OUTPUT_BYTES = 1 << 16
_CLOSE_S = 5.0

Answer = dict[str, Any]

# required fields of the frames that answer a request, and optional ones
_ANSWERS: dict[str, dict[str, type]] = {
    "exit": {"code": int},
    "answer": {"code": int, "out": str, "err": str},
    "done": {},
}
_OPTIONAL = {"why": str, "listens": bool, "connects": bool}


class Call(NamedTuple):
    """Number of a request, and its answer; if the host is lost, the answer raises MeasurementError."""

    number: int
    answer: Future[Answer]


class WorkerConnection:
    """Connection to the worker of a host: being set up, open, or lost.

    Args:
        host: name of the host.
        command: command whose standard input and output lead to ``python -m ringtap.agents.hosts.worker`` on the host.
        patience_s: time limits for the connection's set-up and for the host's silence afterwards.
        sink: receives the chunks of files that the host sends, on this channel's own thread.
        explain: returns the reason for the loss of the host; takes the arguments of `Hosts.explain`.
    """

    def __init__(
        self,
        host: str,
        command: list[str],
        patience_s: tuple[float, float],
        sink: Callable[[str, Answer, bytes], None],
        explain: Callable[[str, str, str, int], str],
    ) -> None:
        self.host, self._sink, self._explain = host, sink, explain
        self._connect_s, self._silent_s = patience_s
        self._numbers = count(1)
        self._answers: dict[int, Future[Answer]] = {}
        self._lock, self._write_lock = threading.Lock(), threading.Lock()
        self.lost = ""
        self.facts: Future[Answer] = Future()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        # in its own session: Ctrl-C at the terminal reaches only the controller, which ends processes in order
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )
        self._thread = threading.Thread(target=self._listen, name=f"host {host}", daemon=True)
        self._thread.start()

    def tell(self, item: Answer, data: bytes = b"") -> None:
        """Send a frame; it is discarded if the host is lost."""
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(message_frames.pack(item, data))
            self._process.stdin.flush()

    def request(self, item: Answer, data: bytes = b"") -> Call:
        """Send a frame that expects an answer."""
        call = Call(next(self._numbers), Future())
        with self._lock:
            if self.lost:
                call.answer.set_exception(self._loss())
                return call
            self._answers[call.number] = call.answer
        self.tell(item | {"id": call.number}, data)
        return call

    def _loss(self) -> MeasurementError:
        return MeasurementError(f"{self.host} is lost: {self.lost}")

    def _listen(self) -> None:
        """Read frames from the host until the connection ends."""
        why = ""
        try:
            data = self._await_marker()
            unpacker = message_frames.Unpacker()
            while data:
                for item, content in unpacker.feed(data):
                    self._handle(item, content)
                data = self._read(self._silent_s)
        except Exception as error:  # any exception: otherwise all requests would wait for a dead thread
            why = str(error) if isinstance(error, ValueError) else error_message(error)
        self._end(why)

    def _read(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError(f"not a word for {seconds:.0f} s")
        return os.read(self._process.stdout.fileno(), 1 << 18)

    def _await_marker(self) -> bytes:
        """Skip the output of a login shell; return the data after the host worker's first line."""
        data, deadline_s = b"", time.monotonic() + self._connect_s
        while True:
            before, marker, line = data.partition(message_frames.MARKER)
            if marker and b"\n" in line:
                line, _, rest = line.partition(b"\n")
                self.facts.set_result(_facts(line))
                return rest or self._read(self._silent_s)
            if max(len(before), os.fstat(self._stderr.fileno()).st_size) > _NOISE_BYTES:
                raise ValueError(f"its login prints more than {_NOISE_BYTES >> 20} MiB before ringtap is started")
            if len(line) > _FACTS_BYTES:
                raise ValueError(message_frames.NOISE)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"ringtap was not started there within {self._connect_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                piece = self._read(min(left_s, _NOISE_CHECK_S))
                if not piece:
                    return b""
                data += piece

    def _handle(self, item: Answer, data: bytes) -> None:
        """Handle a frame from the host."""
        op = item.get("op")
        if op == "file":
            self._sink(self.host, item, data)
        elif op != "beat":
            if not _is_answer(item):
                raise ValueError(message_frames.NOISE)
            with self._lock:
                answer = self._answers.pop(item["id"], None)
            if answer is not None:
                answer.set_result(item)

    def _end(self, why: str) -> None:
        """Close the connection after the host was lost or disconnected, and fail all waiting requests."""
        if why:
            self._process.kill()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        stderr = self._stderr.read().decode(errors="replace")
        lost = self._explain(self.host, stderr, why, self._process.returncode)
        with self._lock:
            self.lost = lost
            waiting, self._answers = list(self._answers.values()), {}
        for answer in (self.facts, *waiting):
            if not answer.done():
                answer.set_exception(self._loss())

    def hang_up(self) -> None:
        """Close the host worker's input, so that it ends all commands that still run on the host."""
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Disconnect from the host."""
        self.hang_up()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


def _is_answer(item: Answer) -> bool:
    """Return True if a host's frame is an answer with all required fields."""
    op = item.get("op")
    wanted = _ANSWERS.get(op) if isinstance(op, str) else None
    if wanted is None or type(item.get("id")) is not int:
        return False
    given = {name: kind for name, kind in _OPTIONAL.items() if name in item}
    return all(type(item.get(name)) is kind for name, kind in (wanted | given).items())


def _facts(line: bytes) -> Answer:
    """Parse the first line of the host worker: facts about itself and its host.

    Raises:
        ValueError: the line is not valid, or the worker has another version.
    """
    facts = message_frames.read_object(line)
    if not isinstance(facts.get("workdir"), str):
        raise ValueError(message_frames.NOISE)
    if facts.get("protocol") != message_frames.PROTOCOL or facts.get("ringtap") != ringtap.__version__:
        raise ValueError(
            f"it has ringtap {facts.get('ringtap')}, this machine {ringtap.__version__}: install the same on both"
        )
    return facts


_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@contextlib.contextmanager
def understood(host: str) -> Iterator[None]:
    """Parse a host's answer within the block, and report an unexpected answer as an error.

    Raises:
        MeasurementError: the answer does not have the expected form.
    """
    try:
        yield
    except _PARSE_ERRORS as error:
        raise MeasurementError(
            f"host {host} gives an answer that cannot be understood ({type(error).__name__}): "
            "does its login or its python print something of its own?"
        ) from error


_STOP_TIMEOUT_S = 10.0
_TAIL_BYTES = 4096
_PORT_POLL_S = 0.05
LOST_CODE = 255  # as ssh returns it
WORKER_COMMAND = ("-c", RUN_MODULE, "ringtap.agents.hosts.worker")


class HostProcess:
    """Process on a host, started by its host worker.

    Attributes:
        name: its name and host, for messages.
        log: file on this machine that receives its standard error while it runs, and also its standard output unless a
            separate file was given for it.
    """

    def __init__(self, name: str, log: Path, channel: WorkerConnection, item: Answer) -> None:
        self.name, self.log = name, log
        self._channel = channel
        self._number, self._exit = channel.request(item)
        self._sent: set[int] = set()

    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it, 255 if its host is lost."""
        if not self._exit.done():
            return None
        # an answer without a code means that the host could not start the command
        return LOST_CODE if self._exit.exception() else int(self._exit.result().get("code", LOST_CODE))

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal without waiting."""
        if not self._exit.done():
            self._sent.add(number)
            self._channel.tell({"op": "signal", "of": self._number, "number": int(number)})

    def ask_once(self, number: int) -> None:
        """Send a signal unless it was sent before; a second SIGTERM would make ringtap stop waiting for its agent."""
        if number not in self._sent:
            self.ask_to_stop(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal unless it was sent before, kill the process after 10 s, and return its exit code."""
        self.ask_once(number)
        return self.wait_or_kill(_STOP_TIMEOUT_S)

    def wait_or_kill(self, seconds: float) -> int:
        """Wait up to the given time for the process to end, then kill it; return its exit code."""
        if not self.has_ended(max(0.0, seconds)):
            self._channel.tell({"op": "kill", "of": self._number})
            self.has_ended(message_frames.SILENT_S + _STOP_TIMEOUT_S)  # the host may be about to count as lost
        code = self.exit_code()
        return LOST_CODE if code is None else code

    def has_ended(self, seconds: float) -> bool:
        """Wait for its end for at most so many seconds; return True if it has ended."""
        with contextlib.suppress(FutureTimeoutError, MeasurementError):
            self._exit.result(seconds)
        return self._exit.done()

    def last_words(self, lines: int = 3) -> str:
        """Return the last lines of its output, joined into one line; if its host is lost, the reason.

        If a signal ended it that was not sent here, the text names the signal.
        """
        if self._exit.done() and (loss := self._exit.exception()):
            return str(loss)
        found = (line.strip() for line in read_tail(self.log, _TAIL_BYTES).strip().splitlines()[-lines:])
        said, code = " | ".join(without_number(line) for line in found if line), self.exit_code()
        if not code or -code in self._sent:
            return said or "no output"
        if code > 0:
            return said or f"no output, {exit_words(code)}"
        return f"{said}; {exit_words(code)} ended it" if said else f"{exit_words(code)} ended it, without output"


class Hosts:
    """Hosts of a measurement; each is served by a host worker that runs commands.

    This base class assumes that the hosts share the files of this machine.

    Args:
        names: names of the hosts.
    """

    connect_s = 30.0
    silent_s = message_frames.SILENT_S

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._channels: dict[str, WorkerConnection] = {}
        self._processes: list[HostProcess] = []
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._beats: threading.Thread | None = None
        self._lost: dict[str, str] = {}

    # overridden by subclasses

    def command(self, host: str) -> list[str]:
        """Command that starts a host worker and connects to its standard input and output."""
        raise NotImplementedError("each kind of hosts has its own command")

    def explain(self, host: str, stderr: str, why: str, code: int) -> str:  # noqa: ARG002
        """Return the reason for the loss of a host.

        Args:
            host: name of the host.
            stderr: standard error of the command that connects to the host worker.
            why: failure noticed here; empty if the command ended by itself.
            code: exit code of the command.
        """
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        return " - ".join([why or "its host worker ended", *lines[-1:]])

    def receive(self, host: str, item: Answer, data: bytes) -> None:
        """Receive a chunk of a file from a host; hosts that share files send none."""

    def log_path(self, host: str, log: Path) -> str:  # noqa: ARG002
        """Path on a host to which a command writes its output so that it arrives in a log file on this machine."""
        return str(log.absolute())

    def python(self, host: str) -> str:  # noqa: ARG002
        """Python interpreter on a host that has ringtap."""
        return sys.executable

    def ringtap(self, host: str) -> list[str]:
        """Command that runs ringtap on a host."""
        return python_command(self.python(host), "ringtap.cli")

    def path(self, host: str, path: Path) -> str:  # noqa: ARG002
        """Location of a path below a published run directory on a host: the same path where files are shared."""
        return str(path)

    def publish(self, run: Path) -> None:
        """Announce a new run directory to every host; does nothing where files are shared.

        Raises:
            MeasurementError: a host does not accept it.
        """

    def put(self, host: str, local: Path) -> None:
        """Copy a file below a published run directory to its `path` on a host; does nothing where files are shared.

        Raises:
            MeasurementError: the host does not accept it.
        """

    def gather(self, run: Path) -> None:
        """Wait until all files below a published run directory have arrived from the hosts; lost hosts are skipped."""

    def start(
        self,
        host: str,
        name: str,
        command: list[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        report: Path | None = None,
    ) -> HostProcess:
        """Start a command on a host; its output is appended to ``log``, its standard output to ``report`` if given.

        Args:
            host: name of the host.
            name: name of the process, for messages.
            command: the command and its arguments.
            log: file on this machine for its standard error.
            environment: variables in addition to those of the host.
            report: file on this machine for its standard output; None: the log.

        Raises:
            MeasurementError: the host is lost.
        """
        channel = self.channel(host)
        if channel.lost:
            raise MeasurementError(f"{name} cannot be started: {host} is lost: {channel.lost}")
        log.parent.mkdir(parents=True, exist_ok=True)
        item = {"op": "start", "argv": command, "environment": dict(environment or {})}
        item |= {"log": self.log_path(host, log), "report": self.log_path(host, report) if report else ""}
        process = HostProcess(f"{name} on {host}", log, channel, item)
        self._processes.append(process)
        return process

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """Run a short command on a host and return its result.

        Raises:
            MeasurementError: the host does not answer in time.
        """
        channel = self.channel(host)
        call = channel.request({"op": "ask", "argv": command})
        try:
            answer = call.answer.result(timeout_s)
        except FutureTimeoutError:
            channel.tell({"op": "kill", "of": call.number})
            raise MeasurementError(f"{host} has not answered {command[0]} within {timeout_s:g} s") from None
        if answer["op"] != "answer":
            raise MeasurementError(
                f"{host} cannot be asked for {command[0]}: {answer.get('why', message_frames.NOISE)}"
            )
        return subprocess.CompletedProcess(command, answer["code"], answer["out"], answer["err"])

    def wait_for_port(self, host: str, port: int, process: HostProcess, seconds: float = 10.0) -> bool:
        """Return True if a server process listens on a TCP port of a host within the given number of seconds."""
        return self._wait_for("listens", host, port, process, seconds)

    def wait_for_connection(self, host: str, port: int, process: HostProcess, seconds: float) -> bool:
        """Return True if a client process on a host has connected to a TCP port within the given number of seconds."""
        return self._wait_for("connects", host, port, process, seconds)

    def _wait_for(self, op: str, host: str, port: int, process: HostProcess, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        with contextlib.suppress(MeasurementError, FutureTimeoutError):
            while (left_s := deadline_s - time.monotonic()) > 0 and process.exit_code() is None:
                call = self.channel(host).request({"op": op, "port": port})
                if call.answer.result(left_s).get(op):
                    return True
                time.sleep(_PORT_POLL_S)
        return False

    def lease(self, host: str, holder: Mapping[str, Any]) -> dict[str, Any]:
        """Take a host's lease (`ringtap.agents.hosts.link_lease`), which lasts as long as the connection to the host.

        Returns:
            Empty if the lease was taken; otherwise facts about the sweep that holds it.

        Raises:
            MeasurementError: the host does not answer, or does not support leases.
        """
        call = self.channel(host).request({"op": "lease", "holder": dict(holder)})
        try:
            answer = call.answer.result(self.connect_s + _STOP_TIMEOUT_S)
        except FutureTimeoutError:
            raise MeasurementError(f"{host} does not say whether another sweep uses it") from None
        if "why" in answer:
            raise MeasurementError(f"{host} has no leases: {answer['why']}")
        with understood(host):
            return dict(answer["held"])

    def lost(self) -> dict[str, str]:
        """Hosts known to be lost, with the reason."""
        if not self._closed.is_set():
            self._lost = {host: channel.lost for host, channel in self._channels.items() if channel.lost}
        return self._lost

    def stop_all(self) -> None:
        """End all processes started here, the newest first; a lost host is not an error."""
        running = [process for process in reversed(self._processes) if process.exit_code() is None]
        for process in running:
            process.ask_once(signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for process in running:
            process.wait_or_kill(deadline_s - time.monotonic())
        self._processes.clear()

    def close(self) -> None:
        """End all processes, disconnect, and remove the files put on the hosts. A lost host is not an error."""
        self.stop_all()
        self.lost()
        self._closed.set()
        self.leave()
        if self._beats is not None:
            self._beats.join()

    def leave(self) -> None:
        """Disconnect from the host workers; the next command on a host starts another one."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.hang_up()
        for channel in channels:
            channel.close()

    def channel(self, host: str) -> WorkerConnection:
        """Return the channel to a host, which is opened on first use.

        Raises:
            MeasurementError: the hosts have been closed.
        """
        with self._lock:
            if host not in self._channels:
                if self._closed.is_set():
                    raise MeasurementError(f"{host} has been left")
                patience = (self.connect_s, self.silent_s)
                self._channels[host] = WorkerConnection(host, self.command(host), patience, self.receive, self.explain)
                if self._beats is None:
                    self._beats = threading.Thread(target=self._beat, name="hosts", daemon=True)
                    self._beats.start()
            return self._channels[host]

    def _beat(self) -> None:
        """Send heartbeats to the host workers until the hosts are closed."""
        while not self._closed.wait(message_frames.BEAT_S):
            for channel in list(self._channels.values()):
                channel.tell({"op": "beat"})


class LocalHosts(Hosts):
    """This machine under one or several host names.

    Args:
        names: names of the hosts.
    """

    def command(self, host: str) -> list[str]:  # noqa: ARG002
        """Command of a host worker that runs as a child of this process."""
        return [sys.executable, *WORKER_COMMAND]


class TestbedHosts(Hosts):
    """Hosts of a testbed; commands also run on its switch.

    Args:
        spec: the testbed, which must be running.
    """

    def __init__(self, spec: TestbedSpec) -> None:
        super().__init__(spec.hosts)
        self.spec = spec

    def command(self, host: str) -> list[str]:
        """Command of a host worker in the host's namespaces."""
        enter = python_command(sys.executable, "ringtap.agents.testbed.run_on_host", self.spec.name, host)
        return [*enter, sys.executable, *WORKER_COMMAND]

    def stop_all(self) -> None:
        """End all processes started here, the newest first, and the host workers, as the testbed may end next."""
        super().stop_all()
        self.leave()
