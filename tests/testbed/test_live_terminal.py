"""The view in a real terminal (a pty), beside a run that is really being recorded: it shows it and never ends it."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 40.0
pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]


class Terminal:
    """A program on a pty, and the screen that what it writes makes: cursor moves, erasing, text; no colours."""

    _SEQUENCE = re.compile(
        r"\x1b\[([<=>?]?)([0-9;]*)([@-~])|\x1b[@-Z\\^_=>78]|\x1b[()].|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    )

    def __init__(self, command: list[str], lines: int = 24, columns: int = 80) -> None:
        self.size = lines, columns
        self.raw = ""
        self.alternate = False
        self._rest = b""
        self._screen: dict[tuple[int, int], str] = {}
        self._at = [0, 0]
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
            os.environ |= {"LINES": "24", "COLUMNS": "80"}  # as some launchers do; the terminal's own size counts
            os.execv(command[0], command)
        self.pid, self.code = pid, None
        self.resize(lines, columns)

    def resize(self, lines: int, columns: int) -> None:
        self.size = lines, columns
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def text(self) -> str:
        lines, columns = self.size
        return "\n".join("".join(self._screen.get((y, x), " ") for x in range(columns)) for y in range(lines))

    def read(self, seconds: float) -> int:
        """Take in what comes within so many seconds; returns how many bytes."""
        deadline, count = time.monotonic() + seconds, 0
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # the program is gone
                    data = b""
                if not data:
                    break
                count += len(data)
                self._take(data)
        return count

    def wait_for(self, *words: str) -> str:
        """Read until all these words stand on the screen."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self.read(0.2)
            if all(word in self.text() for word in words):
                return self.text()
        raise AssertionError(f"{words} not on the screen:\n{self.text()}")

    def end(self) -> int:
        """Wait for the program's end; returns its exit code, or minus the signal."""
        deadline = time.monotonic() + WAIT_S
        while self.code is None and time.monotonic() < deadline:
            self.read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        self.read(1.0)  # what it wrote at last
        assert self.code is not None, self.text()
        return self.code

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _take(self, data: bytes) -> None:
        data = self._rest + data
        cut = len(data)
        while cut and data[cut - 1] & 0xC0 == 0x80:  # a character may be cut in two
            cut -= 1
        cut -= 1 if cut and data[cut - 1] >= 0xC0 else 0
        whole = data.decode(errors="strict") if _is_text(data) else data[:cut].decode(errors="replace")
        used = len(whole.encode())
        tail = whole.rfind("\x1b")
        if tail >= 0 and not self._SEQUENCE.match(whole, tail):
            used, whole = len(whole[:tail].encode()), whole[:tail]
        self._rest = data[used:]
        self.raw += whole
        position = 0
        while position < len(whole):
            match = self._SEQUENCE.match(whole, position)
            if match:
                self._sequence(match)
                position = match.end()
            else:
                self._character(whole[position])
                position += 1

    def _character(self, character: str) -> None:
        if character == "\r":
            self._at[1] = 0
        elif character == "\n":
            self._at[0] += 1
        elif character == "\b":
            self._at[1] -= 1
        elif character >= " ":
            if self._at[1] >= self.size[1]:
                self._at = [self._at[0] + 1, 0]
            self._screen[self._at[0], self._at[1]] = character
            self._at[1] += 1

    def _sequence(self, match: re.Match[str]) -> None:
        private, parameters, final = match[1] or "", match[2] or "", match[3] or ""
        numbers = [int(number or 0) for number in parameters.split(";")]
        if private == "?" and numbers[0] in (1049, 47):
            self.alternate = final == "h"
            self._screen.clear()
        elif final in "Hf" and not private and final:
            self._at = [max(0, numbers[0] - 1), max(0, (numbers[1] if len(numbers) > 1 else 1) - 1)]
        elif final == "J" and not private:
            self._screen.clear()
        elif final == "K":
            for x in range(self._at[1], self.size[1]):
                self._screen.pop((self._at[0], x), None)
        elif final in "ABCD" and final:
            axis, step = {"A": (0, -1), "B": (0, 1), "C": (1, 1), "D": (1, -1)}[final]
            self._at[axis] += step * max(1, numbers[0])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def terminal(command: list[str]) -> Iterator[Terminal]:
    made = Terminal(command)
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def capture(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A capture of this node that goes on until it is interrupted."""
    run = tmp_path / "run"
    command = [*RINGTAP, "record", "-o", str(run), "--node", "here", "--collect", "nic,host,sockets,qdisc"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until((run / "nodes" / "here" / "nic" / "nic.rec").exists, "no capture")
        yield process, run
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)


def test_the_view_shows_a_capture_and_leaves_it_alone(capture: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = capture
    with terminal([*RINGTAP, "live", str(run)]) as view:
        screen = view.wait_for("run ", "running", "1 node", "tx Gbit/s", "nic ok", "q quit")
        assert view.alternate
        assert len(screen.splitlines()) == 24
        view.press("3")
        view.wait_for("drops/s", " lo ")
        view.press("/zzz\r")
        view.wait_for("Nothing matches the filter.")
        view.press("\x1b")
        view.wait_for(" lo ")
        view.press("mhere it began\r")
        view.wait_for("Marked: here it began")
        view.press("9")
        view.wait_for("collector", "missed", "host")
        view.read(2.0)
        sent = view.read(5.0)
        assert sent < 5 * 8000, f"{sent} bytes in 5 s are a burden to a slow line"
        view.resize(30, 120)
        view.wait_for("written", "0 Log")  # a column that has no room at 80
        view.press("q")
        assert view.end() == 0
        assert not view.alternate
        assert "\x1b[?25h" in view.raw.rpartition("\x1b[?1049l")[2] + view.raw[-400:]  # the cursor is back
        assert "The recording goes on" in view.text()
    assert process.poll() is None
    log = run / "nodes" / "here" / "nic" / "nic.rec"
    before = open_records(log).count
    until(lambda: open_records(log).count > before + 5, "the capture has stopped")
    (mark,) = map(json.loads, (run / "marks.jsonl").read_text().splitlines())
    assert mark["text"] == "here it began"
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert (run / "nodes" / "here" / "DONE").exists()
    assert json.loads((run / "run.json").read_text())["status"] == "complete"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_view_that_is_ended_gives_the_terminal_back(
    capture: tuple[subprocess.Popen[str], Path], number: signal.Signals
) -> None:
    process, run = capture
    with terminal([*RINGTAP, "live", str(run)]) as view:
        view.wait_for("running", "q quit")
        os.kill(view.pid, number)
        assert view.end() == 0
        assert not view.alternate
    assert process.poll() is None


def test_the_end_of_a_run_is_shown_and_the_view_stays(capture: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = capture
    with terminal([*RINGTAP, "live", str(run)]) as view:
        view.wait_for("running")
        process.send_signal(signal.SIGINT)
        view.wait_for("The run is complete", "q quit, then: ringtap analyze")
        view.press("q")
        assert view.end() == 0
        assert f"Next: ringtap analyze {run}" in view.text().replace("\n", "").replace("  ", "")


def seconds_of(line: str) -> int:
    """Time of day of a plain line."""
    hours, minutes, seconds = map(int, line.partition("time=")[2][:8].split(":"))
    return (hours * 60 + minutes) * 60 + seconds


@pytest.mark.alone(1)
def test_plain_lines_come_a_second_apart_and_end_with_the_run(capture: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = capture
    command = [*RINGTAP, "live", "--plain", str(run)]
    plain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert plain.stdout is not None
    lines = [plain.stdout.readline() for _ in range(6)]
    assert all("status=running" in line and "tx_gbps=" in line for line in lines)
    # by their own time: what reads them may be late
    times_s = [seconds_of(line) for line in lines[2:]]
    assert 2 <= (times_s[-1] - times_s[0]) % 86_400 < 6
    process.send_signal(signal.SIGINT)
    rest, errors = plain.communicate(timeout=WAIT_S)
    assert (plain.returncode, errors) == (0, "")
    assert "status=complete" in rest.splitlines()[-1]


def test_plain_in_a_pipe_that_closes_and_with_ctrl_c(capture: tuple[subprocess.Popen[str], Path]) -> None:
    _, run = capture
    words = shlex.join([*RINGTAP, "live", "--plain", str(run)])
    done = subprocess.run(["sh", "-c", f"{words} | head -n 1"], capture_output=True, text=True, check=False, timeout=60)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    plain = subprocess.Popen([*RINGTAP, "live", "--plain", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert plain.stdout is not None
    plain.stdout.readline()
    plain.send_signal(signal.SIGINT)
    _, errors = plain.communicate(timeout=WAIT_S)
    assert (plain.returncode, errors) == (0, b"")


def test_without_a_terminal_one_sentence(capture: tuple[subprocess.Popen[str], Path], tmp_path: Path) -> None:
    _, run = capture
    done = subprocess.run([*RINGTAP, "live", str(run)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "ringtap live --plain" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_that_is_just_being_made_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plain = subprocess.Popen(
        [*RINGTAP, "live", "--plain", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.5)
    command = [*RINGTAP, "record", "-o", str(run), "--node", "here", "--collect", "nic", "--duration", "2s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    lines, errors = plain.communicate(timeout=WAIT_S)
    assert plain.returncode == 0, errors
    assert "status=complete" in lines.splitlines()[-1]


def test_run_live_keeps_the_jobs_output_and_leaving_ends_nothing(tmp_path: Path) -> None:
    """The job goes on when its user leaves the view, and its exit code comes through."""
    run, flag = tmp_path / "run", tmp_path / "flag"
    code = (
        "import pathlib, sys, time\n"
        f"flag = pathlib.Path({str(flag)!r})\n"
        "print('the job speaks', flush=True)\n"
        "while not flag.exists(): time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    command = [*RINGTAP, "run", "--live", "-o", str(run), "--node", "here", "--", sys.executable, "-c", code]
    with terminal(command) as view:
        try:
            view.wait_for("running", "q quit")
            view.press("0")
            view.wait_for("the job speaks")
            view.press("q")
            view.wait_for("recording goes on")
            assert json.loads((run / "run.json").read_text())["status"] == "running"
        finally:
            flag.touch()
        assert view.end() == 7
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
