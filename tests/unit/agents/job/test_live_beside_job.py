"""``--live``: the view has the terminal, the job a file; leaving the view leaves job and recording alone."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.agent_processes import RINGTAP, agent_of, ended, gone, node_item, run_item, wait_for
from tests.unit.agents.job.test_foreground_command import Terminal

pytestmark = pytest.mark.shares

# runs until a file is there
UNTIL = (
    'import os, sys, time; print("words", sys.stdin.read() == "", flush=True); '
    '[time.sleep(0.05) for _ in range(1200) if not os.path.exists("{end}")]; exit(3)'
)


def live(verb: str, run: Path, *rest: str) -> list[str]:
    options = ("--live", "-o", str(run), "--node", "here", "--collect", "nic,steps", "--every", "10ms")
    return [*RINGTAP, verb, *options, *rest]


def test_without_a_terminal_a_line_a_second(tmp_path: Path) -> None:
    run, end, shown = (tmp_path / name for name in ("run", "end", "shown"))
    command = live("run", run, "--", sys.executable, "-c", UNTIL.format(end=end))
    with (
        shown.open("w") as file,
        ended(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, text=True)
        ) as process,
    ):
        wait_for(lambda: sum(line.startswith("time=") for line in shown.read_text().splitlines()) >= 2, 60)
        end.touch()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 3
    assert "words" not in shown.read_text()
    assert (run / "nodes" / "here" / "log" / "job.out").read_text() == "words True\n"
    assert errors.splitlines()[-1].startswith("Wrote ")
    assert run_item(run)["status"] == "failed"


@pytest.mark.parametrize("verb", ["run", "record"])
def test_without_textual_nothing_is_started_for_a_terminal(tmp_path: Path, terminal: Terminal, verb: str) -> None:
    code = (
        "import importlib.util as u, sys; found = u.find_spec; "
        'u.find_spec = lambda name, *rest: None if name == "textual" else found(name, *rest); '
        "from ringtap.cli import main; sys.exit(main())"
    )
    words = live(verb, tmp_path / "run", *(["--", "touch", "started"] if verb == "run" else []))
    terminal.type(shlex.join([sys.executable, "-c", code, *words[len(RINGTAP) :]]) + "; echo code=$?\n")
    said = terminal.wait_for("code=")
    assert "ringtap: --live needs textual, not installed here: " in said
    assert "[tui]" in said
    terminal.wait_for("2")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "started").exists()


@pytest.fixture
def terminal(tmp_path: Path):  # type: ignore[no-untyped-def]
    shell = Terminal(tmp_path)
    shell.type("export TERM=xterm; stty rows 24 cols 80\n")
    yield shell
    shell.close()


def test_leaving_the_view_leaves_the_job_alone(tmp_path: Path, terminal: Terminal) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    code = UNTIL.format(end=end)
    terminal.type(shlex.join(live("run", run, "--", sys.executable, "-c", code)) + "; echo code=$?\n")
    terminal.wait_for("\x1b[?1049h")  # the view takes the screen
    agent = agent_of(run)
    terminal.wait_for("here")
    terminal.type("q")
    terminal.wait_for("the recording goes on")
    assert agent.is_running()
    end.touch()
    terminal.wait_for("Wrote")
    terminal.wait_for("code=3")
    gone(run)
    assert node_item(run)["status"] == "complete"
    assert (run / "nodes" / "here" / "log" / "job.out").read_text() == "words True\n"


def test_leaving_the_view_of_a_recording(tmp_path: Path, terminal: Terminal) -> None:
    run = tmp_path / "run"
    terminal.type(shlex.join(live("record", run)) + "; echo code=$?\n")
    terminal.wait_for("\x1b[?1049h")
    agent = agent_of(run, jobs=0)
    terminal.wait_for("here")
    terminal.type("q")
    terminal.wait_for("the recording goes on")
    assert agent.is_running()
    terminal.type("\x03")
    terminal.wait_for("Wrote")
    terminal.wait_for("code=0")
    gone(run)
    assert run_item(run)["status"] == "complete"
