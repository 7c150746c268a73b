"""Controls a capture program beside the agent; finds tcpdump, checks it, and builds its command line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.collectors.kernel_files import text_of
from ringtap.core.errors import failure_message
from ringtap.core.parent_death import run_helper

# A shell watches the program and gets signal names on its standard input. When that closes (the agent has ended, for
# any reason), the shell ends the program a second later, after it has received what the kernel still holds. A signal
# on the parent's death would not do: the kernel clears it when a program changes its user or gains a capability.
_WATCH = """
exec 3<&0
"$@" </dev/null 3<&- &
exec 2>&-
while read -r word <&3; do kill -s "$word" $! 2>/dev/null; last=$word; done
if [ "$last" != INT ] && [ "$last" != KILL ]; then sleep 1.1; kill -s INT $! 2>/dev/null; fi
wait $!
"""
_COUNT = re.compile(rb"(\d+) packets? (captured|received by filter|dropped by kernel|dropped by interface)")
_READY = "listening on "
_START_S = 5.0
END_S = 5.0  # time limit for its end
_ANSWER_S = 0.5
_NICENESS = 10
_WRAP = 2**32


@dataclass
class Counts:
    """A capture program's own counts since its start, 64 bit; ``received_by_filter`` includes dropped packets.

    They have the names that the program prints.
    """

    captured: int = 0
    received_by_filter: int = 0
    dropped_by_kernel: int = 0
    dropped_by_interface: int = 0

    def update(self, words: dict[str, int]) -> None:
        """Update the counts; the programs print 32 bit counts, which wrap."""
        for name, value in words.items():
            old = getattr(self, name)
            setattr(self, name, old + (value - old) % _WRAP)


class Tool:
    """tcpdump, or a program with the same signals and output; it runs at low priority, so that the job has precedence.

    Attributes:
        counts: the last counts that it printed.
        ended: reason of its end, empty while it runs.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._name = os.path.basename(command[0])  # noqa: PTH119 - a word, not a file
        self._line = b""
        self._words: deque[str] = deque(maxlen=5)
        self._told = 0
        self.counts = Counts()
        self.ended = ""

    def start(self) -> None:
        """Start the program and wait until it captures.

        Raises:
            OSError: it cannot be started or ends at once; the message contains its output.
        """
        self._process = subprocess.Popen(
            ["nice", "-n", str(_NICENESS), "sh", "-c", _WATCH, "sh", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach it: it has to write what it received first
        )
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        due_s = time.monotonic() + _START_S
        while not any(_READY in words for words in self._words):
            if not self.poll() or time.monotonic() > due_s:
                self.kill()
                raise OSError(0, f"{self._name} did not start: {self._last_words()}")
            time.sleep(0.01)

    def _last_words(self) -> str:
        words = [line for line in self._words if _READY not in line]
        return " ".join(words)[-300:] or "it said nothing"

    def poll(self) -> bool:
        """Read its output; return True if it still runs."""
        if self.ended:
            return False
        if self._process.poll() is not None:  # without its shell, nothing would end it after the agent
            self.signal("INT")
        if self._take_all():
            self._reap()
        return not self.ended

    def _take_all(self) -> bool:
        """Take what it has said; return True if it can say no more."""
        while said := self._read():
            *lines, self._line = (self._line + said).split(b"\n")
            for line in lines:
                self._take(line)
        return said is not None

    def _read(self) -> bytes | None:
        try:
            return os.read(self._process.stderr.fileno(), 65536)  # type: ignore[union-attr]
        except BlockingIOError:
            return None

    def _take(self, line: bytes) -> None:
        words = {name.decode().replace(" ", "_"): int(count) for count, name in _COUNT.findall(line)}
        if words:
            self.counts.update(words)
            self._told += 1
        elif line.strip():
            self._words.append(line.decode(errors="replace").strip())

    def _reap(self) -> None:
        """Collect the exit status through the watching shell, after the program has closed its standard error."""
        self.signal("INT")
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # the shell does nothing: it and the program are one group
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        with contextlib.suppress(AttributeError):
            self._take_all()  # it may have ended by itself when nobody waited any longer
            self._process.stderr.close()  # type: ignore[union-attr]
        number = code - 128 if code > 128 else -code
        how = f"signal {signal.Signals(number).name}" if 0 < number < signal.NSIG else f"exit code {code}"
        self.ended = f"{how}: {self._last_words()}" if code else "ended"

    def signal(self, word: str) -> None:
        """Send it a signal, by name without SIG; do nothing if it has ended."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.poll() is None:
                os.write(self._process.stdin.fileno(), word.encode() + b"\n")  # type: ignore[union-attr]
            else:  # the shell was killed; the program is left in its group
                os.killpg(self._process.pid, signal.Signals[f"SIG{word}"])

    def ask(self) -> bool:
        """Ask for its counts and wait for them; return True if it answered."""
        told = self._told
        self.signal("USR1")
        due_s = time.monotonic() + _ANSWER_S
        while self.poll() and time.monotonic() < due_s:
            if self._told > told:
                return True
            time.sleep(0.005)
        return False

    def settle(self, sees_twice: bool, limit_s: float = 1.5) -> None:
        """Wait until it has written what it received: packets stay in the kernel's blocks for up to a second.

        Args:
            sees_twice: True for loopback, where the kernel counts a packet when it is sent and when it is received.
            limit_s: longest wait, for an interface that is never idle.
        """
        due_s = time.monotonic() + limit_s
        while self.poll() and time.monotonic() < due_s:
            if not self.ask():
                continue
            received = self.counts.received_by_filter // (2 if sees_twice else 1)
            if self.counts.captured + self.counts.dropped_by_kernel >= received:
                return
            time.sleep(0.05)

    def stop(self) -> bool:
        """End the program and wait; if it does not end in time, kill it, which loses its last counts.

        Returns:
            True if it ended without being killed.
        """
        self.signal("INT")
        due_s = time.monotonic() + END_S
        while self.poll() and time.monotonic() < due_s:
            time.sleep(0.01)
        self.kill()
        return not self.ended.startswith(f"signal {signal.SIGKILL.name}")

    def kill(self) -> None:
        """Kill it."""
        if not self.ended:
            self.signal("KILL")
            self._reap()


_ASK_S = 0.9


def find() -> str:
    """Return the path of tcpdump, empty if it is not installed; it is often outside an ordinary user's PATH."""
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", "/usr/local/sbin"))
    return shutil.which("tcpdump", path=places) or ""


def _ask(arguments: list[str]) -> tuple[int, str]:
    try:
        done = run_helper(arguments, _ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, failure_message(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def version(path: str) -> tuple[int, ...]:
    """Return its version, for example ``(4, 99, 3)``; empty if it does not print one."""
    match = re.search(r"version (\d+)\.(\d+)(?:\.(\d+))?", _ask([path, "--version"])[1])
    return tuple(int(part) for part in match.groups(default="0")) if match else ()


def cannot_drop_root() -> bool:
    """True if this is the root of a user namespace with one user, where tcpdump fails to change to any user."""
    return os.geteuid() == 0 and text_of("/proc/self/setgroups") == "deny"


def refusal(path: str, interface: str) -> str:
    """Return the reason why tcpdump may not capture on an interface, empty if it may; captures nothing."""
    code, said = _ask([path, "-i", interface, "-L"])
    return said.replace("\n", " ") if code else ""


def filter_error(path: str, interface: str, words: str) -> str:
    """Return the error in a filter; empty if there is none."""
    code, said = _ask([path, "-i", interface, "-d", words])
    return said.removeprefix("tcpdump: ").splitlines()[0] if code and said else ""


def command(path: str, wanted: dict[str, Any], file: Path) -> list[str]:
    """Return the command line of a capture with tcpdump.

    Args:
        path: path of tcpdump.
        wanted: ``interface``, ``snap_bytes``, ``buffer_bytes``, ``file_bytes`` (size after which another file begins,
            in whole MB; 0: never) and ``filter``.
        file: first file; the following ones have 1, 2, … appended.
    """
    line = [path, "-n", "-i", wanted["interface"], "-s", str(wanted["snap_bytes"])]
    line += ["-B", str(wanted["buffer_bytes"] // 1024), "--time-stamp-precision=nano", "-w", str(file)]
    if os.geteuid() == 0:
        # as another user it could not create the second file in a folder that it does not own
        line += ["-Z", "root"]
    if wanted["file_bytes"]:
        line += ["-C", str(max(1, wanted["file_bytes"] // 1_000_000))]
    return [*line, wanted["filter"]] if wanted["filter"] else line
