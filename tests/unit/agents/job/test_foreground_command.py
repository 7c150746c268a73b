"""Signals, stops, terminals and ways of ending: to whoever started it, a wrapped job is the job."""

import contextlib
import ctypes
import os
import pty
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.unit.agent_processes import (
    PLAIN,
    RINGTAP,
    agent_of,
    ended,
    gone,
    node_item,
    python,
    rows_of,
    run_item,
    wait_for,
    wrapped,
)

pytestmark = pytest.mark.shares

# Says every signal that comes, and ends on the line "end"
LISTENER = """
import os, signal, sys
def say(number, _):
    os.write(1, f"{signal.Signals(number).name}\\n".encode())  # at once: the next signal may interrupt it
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
               signal.SIGALRM, signal.SIGCONT, signal.SIGRTMIN + 3):
    signal.signal(number, say)
print("up", flush=True)
for line in sys.stdin:
    if line == "end\\n":
        break
"""
SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT)


@contextlib.contextmanager
def listening(tmp_path: Path) -> "Iterator[tuple[subprocess.Popen[str], Callable[[], list[str]]]]":
    """A wrapper whose supervisor attends to a listening job, and what the job has heard so far."""
    said = tmp_path / "said"

    def words() -> list[str]:
        return said.read_text().split()[1:]

    with (
        said.open("w") as file,
        ended(
            wrapped(tmp_path / "run", *python(LISTENER), stdin=subprocess.PIPE, stdout=file, start_new_session=True)
        ) as process,
    ):
        wait_for(said.read_text)
        agent_of(tmp_path / "run")
        yield process, words


def hear(words: Callable[[], list[str]], count: int) -> None:
    """Wait until a job has heard so many signals."""
    wait_for(lambda: len(words()) >= count)


def end_listening(process: "subprocess.Popen[str]") -> None:
    process.communicate("end\n", timeout=30)
    assert process.returncode == 0


def is_pending(pid: int, number: int) -> bool:
    """True if a signal was sent to a process that has not taken it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("ShdPnd:"))


def children_of(process: "subprocess.Popen[str]", name: str = "") -> list[psutil.Process]:
    """The children of a process, or those of this name; one may end meanwhile."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] * (name in ("", child.name()))
    return found


def heard(tmp_path: Path, send: str, *numbers: int, gap_s: float = 0.15) -> list[str]:
    """What a listening job hears of signals sent to its wrapper, or to the wrapper's process group."""
    with listening(tmp_path) as (process, words):
        for count, number in enumerate(numbers, 1):
            if send == "group":
                os.killpg(process.pid, number)
            else:
                below = psutil.Process(process.pid).children() if send == "each" else []
                for pid in (process.pid, *(child.pid for child in below)):
                    os.kill(pid, number)
            if gap_s:
                hear(words, count)
                time.sleep(gap_s)
        hear(words, len(numbers))
        time.sleep(0.5)
        end_listening(process)
        return words()


@pytest.mark.parametrize("send", ["process", "group"])
def test_every_signal_reaches_the_job_once(tmp_path: Path, send: str) -> None:
    assert heard(tmp_path, send, *SENT) == [number.name for number in SENT]


@pytest.mark.parametrize("send", ["process", "group", "each"])
def test_signals_sent_at_once_reach_the_job_once(tmp_path: Path, send: str) -> None:
    """As Slurm sends SIGCONT and SIGTERM; the kernel delivers them in another order."""
    assert sorted(heard(tmp_path, send, *SENT, gap_s=0)) == sorted(number.name for number in SENT)


def test_a_signal_that_reached_the_watch_alone_hides_no_later_one(tmp_path: Path) -> None:
    """Nor does a watch that was stopped, or one that was killed: another is started."""

    def watches() -> list[psutil.Process]:
        return children_of(process, "ringtap-group")

    with listening(tmp_path) as (process, words):
        (first,) = wait_for(watches)
        first.send_signal(signal.SIGUSR1)
        first.suspend()
        wait_for(lambda: not is_pending(first.pid, signal.SIGUSR1))  # two looks of the supervisor
        process.send_signal(signal.SIGUSR1)
        hear(words, 1)
        assert words() == ["SIGUSR1"]
        first.kill()
        wait_for(lambda: watches() not in ([], [first]))
        os.killpg(process.pid, signal.SIGUSR2)
        hear(words, 2)
        time.sleep(0.3)
        end_listening(process)
        assert words() == ["SIGUSR1", "SIGUSR2"]


def test_a_signal_to_all_does_not_hide_the_next_one(tmp_path: Path) -> None:
    """Sent to the group and then to the wrapper alone: twice."""
    with listening(tmp_path) as (process, words):
        group = [process.pid, *(child.pid for child in children_of(process))]
        for count, send in enumerate([os.killpg, os.kill] * 3, 1):
            send(process.pid, signal.SIGUSR1)
            hear(words, count)
            # where one still waits, another one counts as the same
            wait_for(lambda: not any(is_pending(pid, signal.SIGUSR1) for pid in group))
        time.sleep(0.2)
        end_listening(process)
        assert words() == ["SIGUSR1"] * 6


def test_a_job_that_signals_its_own_group_hears_it_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\nheard = []\nsignal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
        "os.killpg(0, signal.SIGUSR1)\ntime.sleep(0.5)\nprint(len(heard))"
    )
    with ended(wrapped(tmp_path / "run", *python(code), start_new_session=True)) as process:
        assert process.communicate(timeout=30)[0] == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT])
def test_death_by_a_signal_is_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    code = f"import os, signal; signal.signal({int(number)}, signal.SIG_DFL); os.kill(os.getpid(), {int(number)})"
    if number == signal.SIGKILL:
        code = "import os; os.kill(os.getpid(), 9)"
    with ended(wrapped(tmp_path / "run", *python(code), cwd=tmp_path)) as process:
        assert process.wait(30) == -number
    info, node = run_item(tmp_path / "run"), node_item(tmp_path / "run")
    assert (info["status"], info["why"].partition(": ")[0]) == ("partial", f"the job was ended by {number.name}")
    assert ("memory" in info["why"]) == (number == signal.SIGKILL)
    assert node["jobs"][0]["exit_code"] == 128 + number
    assert node["jobs"][0]["signal"] == number.name
    assert node["status"] == "complete"
    gone(tmp_path / "run")


def test_a_job_that_was_asked_to_end_is_partial_whatever_its_code(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: exit(3)); print('up', flush=True); time.sleep(60)"
    with ended(wrapped(tmp_path / "run", *python(code))) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 3
    assert run_item(tmp_path / "run")["why"] == "the job ended with exit code 3 after SIGTERM"
    assert run_item(tmp_path / "run")["status"] == "partial"


def test_a_pipe_that_closes_ends_the_job_as_ever(tmp_path: Path) -> None:
    """Python ignores SIGPIPE, and what it starts would inherit that."""
    run = tmp_path / "run"
    command = shlex.join([*RINGTAP, "run", "-o", str(run), "--collect", "nic", "--", "yes"])
    line = f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == f"y\n{128 + signal.SIGPIPE}\n"


@pytest.mark.parametrize("ignored", ["HUP", "INT", "TERM"])
def test_what_the_caller_ignores_the_job_ignores(tmp_path: Path, ignored: str) -> None:
    code = f"import signal; print(signal.getsignal(signal.SIG{ignored}) == signal.SIG_IGN)"
    arguments = [*RINGTAP, "run", "-o", str(tmp_path / "run"), "--collect", "nic", "--", *python(code)]
    script = ["sh", "-c", f'trap "" {ignored}; exec "$@"', "sh", *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "True\n"


def test_under_nohup_a_hang_up_ends_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = "import sys; print('up', flush=True); sys.stdin.readline(); print('done')"
    arguments = ["nohup", *RINGTAP, "run", "-o", str(run), "--node", "here", "--collect", "nic", "--", *python(code)]
    with ended(
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"up\n"
        agent_of(run)
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(0.5)
        process.stdin.close()
        assert process.stdout.read() == b"done\n"
        assert process.wait(20) == 0
    assert run_item(run)["status"] == "complete"


def test_a_supervisor_killed_leaves_job_and_recording_to_their_end(tmp_path: Path) -> None:
    run, result = tmp_path / "run", tmp_path / "result"
    code = f"import sys; print('up', flush=True); sys.stdin.readline(); open({str(result)!r}, 'w').write('42')"
    with ended(wrapped(run, *python(code), stdin=subprocess.PIPE)) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "up\n"
        agent_of(run)
        killed_ns = time.time_ns()
        process.kill()
        process.wait()
        assert not result.exists()
        time.sleep(1.1)
        process.stdin.close()
        wait_for(lambda: result.exists() and result.read_text() == "42")
    gone(run)
    assert rows_of(run)[-1][0] - killed_ns > 1e9
    item, info = node_item(run), run_item(run)
    assert (item["status"], item["jobs"][0]["exit_code"]) == ("partial", None)
    assert "was killed: its exit code is not known" in item["why"]
    assert (info["status"], info["why"]) == ("partial", item["why"])
    assert (run / "nodes" / "here" / "DONE").exists()


def test_supervisor_and_agent_killed_leave_the_job_alone(tmp_path: Path) -> None:
    run, result = tmp_path / "run", tmp_path / "result"
    code = f"import sys; sys.stdin.readline(); open({str(result)!r}, 'w').write('42')"
    with ended(wrapped(run, *python(code), stdin=subprocess.PIPE)) as process:
        agent = agent_of(run)
        process.kill()
        agent.kill()
        assert process.stdin
        process.stdin.close()
        wait_for(lambda: result.exists() and result.read_text() == "42")
    gone(run)
    assert rows_of(run)


# -- stops ------------------------------------------------------------------------------------------------------------

# Ends with code 7 on the line "end"
WAITER = "import sys; print('up', flush=True); sys.exit(7 if sys.stdin.readline() == 'end\\n' else 8)"
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


class Stoppable:
    """A wrapped job that waits for a word: its wrapper, the job itself, and a process that the job has started."""

    def __init__(self, run: Path) -> None:
        script = '"$@"; exit $?'
        command = ["sh", "-c", script, "sh", *python(WAITER)]
        self.process = wrapped(run, *command, stdin=subprocess.PIPE, start_new_session=True)

    def begin(self, run: Path) -> None:
        assert self.process.stdout and self.process.stdout.readline() == "up\n"
        agent_of(run)
        (job,) = (one for one in psutil.Process(self.process.pid).children() if one.cmdline()[:1] == ["sh"])
        self.pids = {"supervisor": self.process.pid, "job": job.pid, "grandchild": job.children()[0].pid}
        self.pids["group"] = -self.process.pid

    def send(self, target: str, number: int) -> None:
        os.kill(self.pids[target], number)

    def await_state(self, stopped: bool, *targets: str) -> None:
        states = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        wait_for(lambda: all((psutil.Process(self.pids[one]).status() in states) == stopped for one in targets))

    def end(self) -> int:
        assert self.process.stdin
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        return self.process.wait(20)


@pytest.fixture
def stoppable(tmp_path: Path):  # type: ignore[no-untyped-def]
    one = Stoppable(tmp_path / "run")
    with ended(one.process):
        one.begin(tmp_path / "run")
        yield one
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
    gone(tmp_path / "run")


STOPPED_BY = {
    "job": ("job", "supervisor"),
    "group": ("job", "supervisor", "grandchild"),
    "supervisor": ("supervisor",),
    "grandchild": ("grandchild",),
}


@pytest.mark.parametrize(
    ("stopped", "continued"),
    [
        *(("job", one) for one in ("job", "group", "supervisor")),
        *(("group", one) for one in ("group", "job")),
        *(("supervisor", one) for one in ("supervisor", "job")),
        ("grandchild", "grandchild"),
    ],
)
def test_the_wrapper_returns_whoever_was_stopped_and_continued(
    tmp_path: Path, stoppable: Stoppable, stopped: str, continued: str
) -> None:
    """Where the job goes on, or has ended, its wrapper does by itself."""
    stoppable.send(stopped, signal.SIGSTOP)
    stoppable.await_state(True, *STOPPED_BY[stopped])
    stoppable.send(continued, signal.SIGCONT)
    if stopped == "group":
        stoppable.send("grandchild", signal.SIGCONT)
    assert stoppable.end() == 7
    assert run_item(tmp_path / "run")["why"] == "the job ended with exit code 7"
    assert node_item(tmp_path / "run")["status"] == "complete"


@pytest.mark.parametrize("stopped", ["job", "group"])
def test_a_stopped_job_that_is_killed_ends_its_wrapper(stoppable: Stoppable, stopped: str) -> None:
    stoppable.send(stopped, signal.SIGSTOP)
    stoppable.await_state(True, *STOPPED_BY[stopped])
    stoppable.send("job", signal.SIGKILL)
    assert stoppable.process.wait(20) == -signal.SIGKILL


def test_stops_in_a_row_leave_no_process_behind(stoppable: Stoppable) -> None:
    for _ in range(20):
        stoppable.send("job", signal.SIGSTOP)
        stoppable.send("job", signal.SIGCONT)
    for _ in range(3):
        stoppable.send("job", signal.SIGSTOP)
        stoppable.await_state(True, *STOPPED_BY["job"])
        stoppable.send("job", signal.SIGCONT)
        stoppable.await_state(False, *STOPPED_BY["job"])
    wait_for(lambda: not children_of(stoppable.process, "ringtap-waker"))
    assert stoppable.end() == 7


def test_a_job_stopped_again_as_its_wrapper_wakes_stops_it_again(stoppable: Stoppable) -> None:
    """The signal that woke the wrapper still waits there, and is not taken for one that continues the job."""
    stat = Path(f"/proc/{stoppable.process.pid}/stat")
    stoppable.send("job", signal.SIGSTOP)
    for _ in range(20):
        stoppable.await_state(True, *STOPPED_BY["job"])
        stoppable.send("job", signal.SIGCONT)
        while b") T " in stat.read_bytes():
            pass
        stoppable.send("job", signal.SIGSTOP)
    stoppable.await_state(True, *STOPPED_BY["job"])
    stoppable.send("job", signal.SIGCONT)
    assert stoppable.end() == 7


@pytest.mark.parametrize(
    ("target", "was_stopped"), [("job", False), ("job", True), ("grandchild", True), ("supervisor", False)]
)
def test_a_debugger_comes_and_goes(stoppable: Stoppable, target: str, was_stopped: bool) -> None:
    """Attached as gdb does, to a process that runs or that is stopped already."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = stoppable.pids[target]
    if was_stopped:
        stoppable.send(target, signal.SIGSTOP)
        stoppable.await_state(True, *STOPPED_BY[target])
    if libc.ptrace(PTRACE_ATTACH, pid, None, None):
        pytest.skip(f"no process may be traced here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, 0x40000000)  # __WALL
    time.sleep(0.3)
    assert libc.ptrace(PTRACE_DETACH, pid, None, None) == 0
    stoppable.send(target, signal.SIGCONT)
    stoppable.await_state(False, "job", "grandchild", "supervisor")
    assert stoppable.end() == 7


# -- on a real terminal ------------------------------------------------------------------------------------------------


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = dict(os.environ) | {"PS1": "", "PS2": "", "ENV": "", "HISTFILE": "", "TERM": "dumb"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
        self.text = ""
        self.type("stty -echo\n")
        self.type("echo rea''dy\n")
        self.wait_for("ready")

    def type(self, words: str) -> None:
        os.write(self._fd, words.encode())

    def wait_for(self, words: str, seconds: float = 25.0) -> str:
        """Read until some words appear; returns what came up to and with them, and forgets it."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"no {words!r} in {self.text!r}"
            if select.select([self._fd], [], [], left)[0]:
                try:
                    self.text += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"the terminal closed before {words!r}: {self.text!r}") from None
        before, _, self.text = self.text.partition(words)
        return before + words

    def close(self) -> None:
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path):  # type: ignore[no-untyped-def]
    shell = Terminal(tmp_path)
    yield shell
    shell.close()


def command(run: Path, code: str) -> str:
    return shlex.join([*RINGTAP, "run", "-o", str(run), "--node", "here", *PLAIN, "--", *python(code)])


def test_ctrl_c_reaches_the_job_once(tmp_path: Path, terminal: Terminal) -> None:
    code = (
        "import signal, time; heard = []; signal.signal(2, lambda *_: heard.append(1)); print('u' + 'p', flush=True); "
        "[time.sleep(0.05) for _ in iter(lambda: bool(heard), True)]; "
        "time.sleep(1); print('heard', len(heard)); exit(7)"
    )
    terminal.type(command(tmp_path / "run", code) + "; echo code=$?\n")
    terminal.wait_for("up")
    agent_of(tmp_path / "run")
    terminal.type("\x03")
    assert "heard 1" in terminal.wait_for("code=7")
    assert run_item(tmp_path / "run")["why"] == "the job ended with exit code 7 after SIGINT"


def test_ctrl_c_ends_an_ordinary_job(tmp_path: Path, terminal: Terminal) -> None:
    terminal.type(
        command(tmp_path / "run", "import time; print('u' + 'p', flush=True); time.sleep(60)") + "; echo code=$?\n"
    )
    terminal.wait_for("up")
    agent_of(tmp_path / "run")
    terminal.type("\x03")
    assert "KeyboardInterrupt" in terminal.wait_for("KeyboardInterrupt")
    terminal.type("\n")
    gone(tmp_path / "run")
    assert run_item(tmp_path / "run")["status"] == "partial"
    assert (tmp_path / "run" / "nodes" / "here" / "DONE").exists()


def test_ctrl_z_stops_and_fg_continues(tmp_path: Path, terminal: Terminal) -> None:
    code = "import sys, time; print('u' + 'p', flush=True); [print(line, end='', flush=True) for line in sys.stdin]"
    terminal.type(command(tmp_path / "run", code) + "\n")
    terminal.wait_for("up")
    agent_of(tmp_path / "run")
    terminal.type("one\n")
    terminal.wait_for("one")
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    log = tmp_path / "run" / "nodes" / "here" / "nic" / "nic.rec"
    size = log.stat().st_size
    wait_for(lambda: log.stat().st_size > size + 1000)  # the recording goes on
    terminal.type("fg\n")
    terminal.type("two\n")
    terminal.wait_for("two")
    terminal.type("\x04")
    terminal.type("echo left=$?\n")
    terminal.wait_for("left=0")
    assert run_item(tmp_path / "run")["status"] == "complete"


def test_ctrl_z_and_bg_let_the_job_end_in_the_background(tmp_path: Path, terminal: Terminal) -> None:
    go = tmp_path / "go"
    code = (
        "import os, time; print('u' + 'p', flush=True); "
        f"[time.sleep(0.05) for _ in iter(lambda: os.path.exists({str(go)!r}), True)]; exit(7)"
    )
    terminal.type(command(tmp_path / "run", code) + "\n")
    terminal.wait_for("up")
    agent_of(tmp_path / "run")
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    terminal.type("bg\n")
    # in one line: between two, bash forgets a job that has ended
    terminal.type("echo free''hand; wait %1; echo code=$?\n")
    terminal.wait_for("freehand")
    go.touch()
    terminal.wait_for("code=7")


def test_ctrl_z_stops_a_capture_and_its_recording_goes_on(tmp_path: Path, terminal: Terminal) -> None:
    run = tmp_path / "run"
    terminal.type(shlex.join([*RINGTAP, "record", "-o", str(run), "--node", "here", *PLAIN]) + "\n")
    agent_of(run, jobs=0)
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    log = run / "nodes" / "here" / "nic" / "nic.rec"

    def grows() -> None:
        size = log.stat().st_size
        wait_for(lambda: log.stat().st_size > size + 1000)

    grows()
    time.sleep(0.6)  # longer than the command waits for a signal at once
    terminal.type("fg\n")
    (wrapper,) = psutil.Process(terminal.pid).children()
    wait_for(lambda: wrapper.status() != psutil.STATUS_STOPPED)
    time.sleep(0.6)
    grows()
    terminal.type("\x03")
    terminal.type("echo code=$?\n")
    terminal.wait_for("code=0")
    wait_for(lambda: run_item(run)["status"] == "complete")  # a busy machine's agent may end later than the command


@pytest.mark.parametrize("stop", ["STOP", "TSTP"])
def test_a_job_stopped_and_continued_alone_is_a_stopped_and_a_running_job_to_the_shell(
    tmp_path: Path, terminal: Terminal, stop: str
) -> None:
    code = "import sys; print('u' + 'p', flush=True); print('got', sys.stdin.readline()); exit(7)"
    terminal.type(command(tmp_path / "run", code) + "\n")
    terminal.wait_for("up")
    agent_of(tmp_path / "run")
    (job,) = node_item(tmp_path / "run")["jobs"]
    os.kill(job["pid"], getattr(signal, f"SIG{stop}"))
    terminal.wait_for("Stopped")
    process, (wrapper,) = psutil.Process(job["pid"]), psutil.Process(terminal.pid).children()
    switches = process.num_ctx_switches().voluntary
    os.kill(job["pid"], signal.SIGCONT)  # in the background now: reading the terminal stops it again
    # foreground before that would be followed by this stop
    wait_for(lambda: process.num_ctx_switches().voluntary > switches and process.status() == psutil.STATUS_STOPPED)
    time.sleep(0.5)  # until ringtap has seen it
    wait_for(lambda: wrapper.status() == psutil.STATUS_STOPPED)
    terminal.type("\n")
    terminal.type("fg\n")
    terminal.type("words\n")
    terminal.wait_for("got words")
    terminal.type("echo code=$?\n")
    terminal.wait_for("code=7")


def test_a_job_in_the_background_that_reads_the_terminal_stops(tmp_path: Path, terminal: Terminal) -> None:
    terminal.type(command(tmp_path / "run", "print('got', input())") + " &\n")
    terminal.wait_for("ringtap: recording to ")
    (wrapper,) = psutil.Process(terminal.pid).children()
    wait_for(lambda: wrapper.status() == psutil.STATUS_STOPPED)
    terminal.type("\njobs\n")
    terminal.wait_for("Stopped")
    terminal.type("fg\n")
    terminal.type("words\n")
    terminal.wait_for("got words")


def test_stop_and_continue_sent_to_the_wrapper_alone(tmp_path: Path) -> None:
    code = "import time\nwhile True:\n    print(time.monotonic(), flush=True)\n    time.sleep(0.02)"
    with ended(wrapped(tmp_path / "run", *python(code), start_new_session=True)) as process:
        agent_of(tmp_path / "run")
        job = next(
            child for child in psutil.Process(process.pid).children() if "monotonic" in " ".join(child.cmdline())
        )
        process.send_signal(signal.SIGTSTP)
        # an orphaned process group ignores SIGTSTP, as it would without a wrapper
        time.sleep(0.3)
        assert job.status() != psutil.STATUS_STOPPED
        job.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: job.status() != psutil.STATUS_STOPPED)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM


# what interrupts the wait lasts longer than the wait itself, as a stop of the process does
INTERRUPTED = """
import os, signal, time
from ringtap.agents.job import foreground_command
class Relay(foreground_command.SignalRelay):
    def _pass_on(self, info):
        print("passes on", info.si_signo)
foreground_command.block_signals()
signal.signal(signal.SIGSYS, lambda *_: time.sleep(0.8))
reader, writer = os.pipe()
os.dup2(reader, 0)
relay, pid = Relay(foreground_command.spawn(["cat"], os.environ)), os.getpid()
if os.fork() == 0:
    time.sleep(0.1)
    os.kill(pid, signal.SIGSYS)
    os._exit(0)
waited = relay.wait(0.5)
os.close(writer)
print(waited, relay.wait())
"""


def test_a_wait_that_is_interrupted_passes_on_no_signal_that_nobody_sent() -> None:
    done = subprocess.run(python(INTERRUPTED), capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("None 0\n", "", 0)


def test_a_group_that_is_stopped_hears_once_that_it_goes_on(tmp_path: Path) -> None:
    with listening(tmp_path) as (process, words):
        group = [psutil.Process(process.pid), *children_of(process)]
        for count in range(1, 5):
            os.killpg(process.pid, signal.SIGSTOP)
            wait_for(lambda: all(one.status() == psutil.STATUS_STOPPED for one in group))
            time.sleep(0.4)
            os.killpg(process.pid, signal.SIGCONT)
            hear(words, count)
            time.sleep(0.4)
        end_listening(process)
        assert words() == ["SIGCONT"] * 4
