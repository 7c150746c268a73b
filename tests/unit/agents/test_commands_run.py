"""``ringtap run`` around jobs that behave and jobs that do not: the job must not notice."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.unit.agent_processes import ended

pytestmark = pytest.mark.shares

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
ROOT = Path(__file__).resolve().parents[3]


def wrapped(tmp_path: Path, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
    arguments = [*RINGTAP, "run", "-o", str(tmp_path / "run"), "--node", "here", "--", *command]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("code", [0, 1, 2, 77, 255])
def test_the_exit_code_is_passed_on(tmp_path: Path, code: int) -> None:
    done = wrapped(tmp_path, sys.executable, "-c", f"raise SystemExit({code})")
    assert done.returncode == code
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == ("failed" if code else "complete")
    assert json.loads((tmp_path / "run" / "nodes" / "here" / "node.json").read_text())["jobs"][0]["exit_code"] == code


def test_the_first_line_says_where_the_run_goes_and_v_how_it_is_recorded(tmp_path: Path) -> None:
    first = wrapped(tmp_path, "true").stderr.splitlines()[0]
    assert first == f"ringtap: recording to {tmp_path / 'run'}"
    command = [*RINGTAP, "run", "-v", "-o", str(tmp_path / "v"), "--node", "here", "--collect", "nic", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    expected = f"ringtap: recording to {tmp_path / 'v'} node=here collect=nic every=100ms"
    assert done.stderr.splitlines()[0] == expected


def test_an_example_that_ships_with_ringtap_runs_from_any_folder(tmp_path: Path) -> None:
    read = "import sys; print(open(sys.argv[1]).readline())"
    done = wrapped(tmp_path, sys.executable, "-c", read, "examples/points.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith((ROOT / "examples" / "points.csv").read_text().splitlines()[0])
    assert [line for line in done.stderr.splitlines() if "ships with ringtap" in line] == [done.stderr.splitlines()[0]]


def test_a_job_ended_by_a_signal_ends_its_wrapper_by_the_same(tmp_path: Path) -> None:
    assert wrapped(tmp_path, "sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL


@pytest.mark.parametrize("closed", [False, True])
def test_a_command_that_is_not_there(tmp_path: Path, closed: bool) -> None:
    """Nor in a folder of $PATH that may not be looked into, which a shell passes over."""
    (tmp_path / "closed").mkdir(mode=0o700 * (not closed))
    path = f"{tmp_path / 'closed'}:{os.environ['PATH']}"
    done = wrapped(tmp_path, "no-such-program", env={**os.environ, "PATH": path})
    assert done.returncode == 127
    assert "no-such-program cannot be run" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"Wrote {tmp_path / 'run'}. There is nothing to analyze"
    why = "the job ended with exit code 127: no-such-program was not found"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["why"] == why


def test_streams_folder_and_process_group_pass_through(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.getcwd(), os.getpgrp()); print('to stderr', file=sys.stderr)"
    done = wrapped(tmp_path, sys.executable, "-c", code, input="from stdin", cwd=tmp_path, env=environment())
    words = done.stdout.split()
    assert words[:3] == ["from", "stdin", str(tmp_path)]
    assert int(words[3]) == os.getpgrp()
    assert "to stderr" in done.stderr


def environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_job(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        f"import signal, time; signal.signal({int(number)}, lambda *_: exit(42)); "
        "print('up', flush=True); time.sleep(60)"
    )
    arguments = [*RINGTAP, "run", "-o", str(tmp_path / "run"), "--", sys.executable, "-c", code]
    with ended(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.wait(20) == 42


def test_counters_and_steps_are_recorded(tmp_path: Path) -> None:
    """A plain training loop, unedited; two interfaces at least could move, loopback is always there."""
    code = (
        "import os, pathlib, torch, time\n"
        "from ringtap.core.append_only_logs import open_records\n"
        "weight = torch.nn.Parameter(torch.zeros(3))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(7):\n"
        "    weight.sum().backward(); optimizer.step(); time.sleep(0.02)\n"
        "log = pathlib.Path(os.environ['RINGTAP_RUN'], 'nodes', 'here', 'nic', 'nic.rec')\n"
        "for _ in range(600):\n"
        "    if log.exists() and log.stat().st_size and open_records(log).count > 10: break\n"
        "    time.sleep(0.05)\n"
    )
    done = wrapped(tmp_path, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    node = tmp_path / "run" / "nodes" / "here"
    (log,) = (node / "steps").glob("*.rec")
    rows = open_records(log).tail()
    assert [row[0] for row in rows] == list(range(7))
    assert all(after[3] > before[3] for before, after in pairwise(rows))
    counters = open_records(node / "nic" / "nic.rec")
    assert "lo.rx_bytes" in {field.name for field in counters.fields}
    assert counters.count > 10
    item = json.loads((node / "node.json").read_text())
    assert item["collectors"]["nic"]["state"] == "ok"
    assert item["before"]["kernel"] == item["after"]["kernel"] == os.uname().release
    assert (node / "DONE").exists()


def test_a_disk_that_fills_up_does_not_touch_the_job(tmp_path: Path) -> None:
    """Files are limited to 8 kB (RLIMIT_FSIZE, its signal ignored): the counters stop, the job ends as ever."""
    code = "import time; time.sleep(1.5); print('result 42')"
    script = 'trap "" XFSZ; ulimit -f 8; exec "$@"'
    arguments = [*RINGTAP, "run", "-o", str(tmp_path / "run"), "--every", "1ms", "--", sys.executable, "-c", code]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "result 42\n")
    assert "Traceback" not in done.stderr


def test_a_killed_agent_leaves_what_it_had(tmp_path: Path) -> None:
    arguments = [*RINGTAP, "record", "-o", str(tmp_path / "run"), "--node", "here"]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    log = tmp_path / "run" / "nodes" / "here" / "nic" / "nic.rec"
    deadline = time.monotonic() + 20
    while not (log.exists() and log.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    records = open_records(log)
    assert records.count > 10
    assert records.torn_bytes == 0


def test_a_capture_ends_after_its_time(tmp_path: Path) -> None:
    arguments = [*RINGTAP, "record", "-o", str(tmp_path / "run"), "--node", "here", "--duration", "500ms"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    rows = open_records(tmp_path / "run" / "nodes" / "here" / "nic" / "nic.rec").tail()
    # the machine may be late in starting and ending it, never early
    assert 0.45e9 < rows[-1][0] - rows[0][0] < 5e9


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "--every", "0ms", "--", "true"],
        ["run", "--every", "often", "--", "true"],
        ["record", "--duration", "x"],
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [*RINGTAP, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
