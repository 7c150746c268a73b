"""Text from elsewhere cannot steer the reader's terminal, and a command to type means the path it was made for."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.rundir import RunDirectory, write_json
from ringtap.slurm.paths import SubmitPaths
from ringtap.terminal import guarded, masked, shell_word, unguarded, visible
from tests.gold.job_run import Truth, write_ddp_job

# clears the screen, sets the title, overwrites the line, turns the text round, hides it, is no character at all
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rover\x9b31m\u202eright\u2066\u200b\x00\x7f\ud800\u2028end\nNext: ringtap rm"
STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]")


@given(st.text())
def test_what_is_shown_has_nothing_that_steers(text: str) -> None:
    assert not STEERING.search(visible(text))
    assert not STEERING.search(masked(text))
    assert len(masked(text)) == len(text)
    assert "\n" not in masked(text)
    visible(text).encode()


@pytest.mark.parametrize("text", ["plain", "a\tb\nc", "für 25 Gbit/s ± 3 % …", "日本", "[bold]x[/bold]"])
def test_ordinary_text_is_shown_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_everything_printed_passes_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        with guarded():  # once is enough
            print("a\x1bb")
        print("\x1b[1mown\x1b[0m", file=unguarded(sys.stdout))
    shown = capsys.readouterr()
    assert not STEERING.search(shown.err)
    assert shown.out.startswith(
        "a\\x1b[2J\\x1b]0;title\\ab\\rover\\x9b31m\\u202eright\\u2066\\u200b\\x00\\x7f\\ud800\\u2028end\n"
    )
    assert shown.out.endswith("a\\x1bb\n\x1b[1mown\x1b[0m\n")


def test_a_terminal_of_another_encoding_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    with guarded():
        print("für 5 … 6")
        sys.stdout.flush()
    assert stream.buffer.getvalue() == "für 5 \\u2026 6\n".encode("latin-1")  # type: ignore[attr-defined]


def test_no_standard_output_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with guarded():
        print("nobody reads this")
    assert sys.stdout is None


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_shell_reads_back_the_path(tmp_path: Path) -> None:
    names = [
        "plain",
        "with space",
        "a'b",
        '"$(touch x)"',
        "`id`",
        "semi;colon",
        "-n",
        "new\nline",
        "esc\x1b[2J",
        "t\tab",
    ]
    names += ["back\\slash'\r", "für", "\u202egnp.x", os.fsdecode(b"raw\xff\x01'"), "*", "~", "!"]
    for name in names:
        word = shell_word(Path(name))
        assert visible(word) == word
        assert "\n" not in word
        found = subprocess.run(["bash", "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, check=True)
        assert os.path.normpath(os.fsdecode(found.stdout)) == name
    assert not any(tmp_path.iterdir())


def hostile_job(path: Path) -> Path:
    """A job's run whose every text is hostile."""
    write_ddp_job(path, Truth(iterations=4, every_ms=50))
    run = RunDirectory.open(path)
    run.info |= {"argv": ["ringtap", HOSTILE], "not_collected": [{"what": HOSTILE, "why": HOSTILE}]}
    run.finish("partial", HOSTILE)
    node = path / "nodes" / "n0"
    collector = {"state": "failed", "reason": HOSTILE, "remedy": HOSTILE}
    write_json(node / "node.json", {"status": "partial", "why": HOSTILE, "collectors": {HOSTILE: collector}})
    (node / "nccl").mkdir()
    (node / "nccl" / "x.log").write_text(f"h:1:1 [0] NCCL WARN {HOSTILE}\n", errors="surrogatepass")
    (path / "marks.jsonl").write_text(json.dumps({"t_ns": 1_700_000_000_100_000_000, "text": HOSTILE}) + "\n")
    odd = path / "nodes" / os.fsdecode(b"n\x1b[2J\xff")
    odd.mkdir()
    write_json(odd / "node.json", {"status": "partial", "why": HOSTILE})
    return path


@pytest.mark.parametrize("verb", ["analyze", "report", "live", "status", "collect"])
def test_a_hostile_run_steers_no_terminal(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostile_job(tmp_path / "a \x1b[2J run")
    paths = SubmitPaths(path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": "7"}], "tasks": [[0]]})
    paths.state("7").write_text(f"1 begun on {HOSTILE}\n2 stopped {HOSTILE}\n3 ended 9\n", errors="surrogatepass")
    assert main([verb, str(path), *(["--plain"] if verb == "live" else [])]) == 0
    shown = capsys.readouterr()
    assert shown.out
    assert not STEERING.search(shown.out + shown.err)
    assert not re.search(r"^ *Next: ringtap rm", shown.out + shown.err, re.MULTILINE)
    for command in re.findall(r"Next: ringtap (?!rm)\w+ (.*)", shown.out + shown.err):
        assert command == shell_word(path)


def test_a_refusal_shows_the_path_without_its_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "no\x1b[2Jrun\rx")]) == 2
    shown = capsys.readouterr().err
    assert "no\\x1b[2Jrun\\rx" in shown
    assert not STEERING.search(shown)


@pytest.mark.parametrize("name", ["with space", "a;b", "plain"])
def test_next_commands_are_quoted(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    run = RunDirectory.create(path, "job", [], 0)
    run.finish("complete")
    paths = SubmitPaths(path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [], "tasks": []})
    for verb in ("status", "collect"):
        assert main([verb, str(path)]) == 0
        (command,) = re.findall(r"Next: (.*)", capsys.readouterr().out)
        assert shlex.split(command) == ["ringtap", "analyze", str(path)]
