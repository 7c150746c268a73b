"""The way from the controller to its servant on one host: a child process that carries frames."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple

import ringtap
from ringtap.agents.hosts import frames
from ringtap.errors import MeasurementError

_NOISE_BYTES = 1 << 20  # of what a login prints, on standard output and on standard error
_NOISE_CHECK_S = 0.25
_FACTS_BYTES = 1 << 16
_LAST_WORDS_BYTES = 1 << 16
_CLOSE_S = 5.0

Answer = dict[str, Any]

# fields of the frames that answer a request, and of those that an answer may have
_ANSWERS: dict[str, dict[str, type]] = {
    "exit": {"code": int},
    "answer": {"code": int, "out": str, "err": str},
    "done": {},
}
_OPTIONAL = {"why": str, "listens": bool}


class Call(NamedTuple):
    """A request: its number, and the answer, whose exception is the host's loss."""

    number: int
    answer: Future[Answer]


class Channel:
    """A host that is being reached, is reached, or is lost.

    Args:
        host: its name.
        command: what carries standard input and output to ``python -m ringtap.agents.hosts.servant`` on it.
        patience_s: how long the connection may take, and how long the host may then be silent.
        sink: takes what the host sends of its files, on this channel's own thread.
        explain: makes a reason for the loss out of what the command said on standard error, what was noticed here, and
            the command's exit code.
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
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: a Ctrl-C at the terminal is for the controller, which ends things in order.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, start_new_session=True
        )
        self._thread = threading.Thread(target=self._listen, name=f"host {host}", daemon=True)
        self._thread.start()

    def tell(self, item: Answer, data: bytes = b"") -> None:
        """Send a frame; to a lost host it goes nowhere."""
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(frames.pack(item, data))
            self._process.stdin.flush()

    def request(self, item: Answer, data: bytes = b"") -> Call:
        """Send a frame that is answered."""
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
        """Take in what the host says until it says no more."""
        why = ""
        try:
            rest = self._await_marker()
            unpacker = frames.Unpacker()
            while rest:
                for item, data in unpacker.feed(rest):
                    self._take(item, data)
                rest = self._read(self._silent_s)
        except Exception as error:  # whatever it is: all would wait for a thread that has died unseen
            why = str(error) or type(error).__name__
        self._end(why)

    def _read(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError(f"not a word for {seconds:.0f} s")
        return os.read(self._process.stdout.fileno(), 1 << 18)

    def _await_marker(self) -> bytes:
        """Skip what a login shell says first; returns what has come after the servant's first line."""
        data, deadline_s = b"", time.monotonic() + self._connect_s
        while True:
            before, marker, line = data.partition(frames.MARKER)
            if marker and b"\n" in line:
                line, _, rest = line.partition(b"\n")
                self.facts.set_result(_facts(line))
                return rest or self._read(self._silent_s)
            if max(len(before), os.fstat(self._words.fileno()).st_size) > _NOISE_BYTES:
                raise ValueError(f"its login prints more than {_NOISE_BYTES >> 20} MiB before ringtap is started")
            if len(line) > _FACTS_BYTES:
                raise ValueError(frames.NOISE)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"ringtap was not started there within {self._connect_s:.0f} s")
            with contextlib.suppress(TimeoutError):
                piece = self._read(min(left_s, _NOISE_CHECK_S))
                if not piece:
                    return b""
                data += piece

    def _take(self, item: Answer, data: bytes) -> None:
        op = item.get("op")
        if op == "file":
            self._sink(self.host, item, data)
        elif op != "beat":
            if not _is_answer(item):
                raise ValueError(frames.NOISE)
            with self._lock:
                answer = self._answers.pop(item["id"], None)
            if answer is not None:
                answer.set_result(item)

    def _end(self, why: str) -> None:
        """The host is lost, or left."""
        if why:
            self._process.kill()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        said = self._words.read().decode(errors="replace")
        lost = self._explain(self.host, said, why, self._process.returncode)
        with self._lock:
            self.lost = lost
            waiting, self._answers = list(self._answers.values()), {}
        for answer in (self.facts, *waiting):
            if not answer.done():
                answer.set_exception(self._loss())

    def hang_up(self) -> None:
        """Let the servant go: it ends what may still run there."""
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Leave the host."""
        self.hang_up()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._words.close()


def _is_answer(item: Answer) -> bool:
    """Tell if a host's frame is an answer with all of its fields: a host may send anything."""
    op = item.get("op")
    wanted = _ANSWERS.get(op) if isinstance(op, str) else None
    if wanted is None or type(item.get("id")) is not int:
        return False
    given = {name: kind for name, kind in _OPTIONAL.items() if name in item}
    return all(type(item.get(name)) is kind for name, kind in (wanted | given).items())


def _facts(line: bytes) -> Answer:
    """What the servant says of itself.

    Raises:
        ValueError: it is not of this version.
    """
    facts = frames.read_object(line)
    if not isinstance(facts.get("workdir"), str):
        raise ValueError(frames.NOISE)
    if facts.get("protocol") != frames.PROTOCOL or facts.get("ringtap") != ringtap.__version__:
        raise ValueError(
            f"it has ringtap {facts.get('ringtap')}, this machine {ringtap.__version__}: install the same on both"
        )
    return facts
