"""Text from elsewhere cannot steer the reader's terminal, and a command to type means the path it was made for."""

import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.terminal_escaping import guarded, masked, shell_word, unguarded, visible
from ringtap.slurm.batch_script import print_script
from ringtap.slurm.submission_file_names import SubmitPaths
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long]

# clears the screen, sets the title, overwrites the line, turns the text round, hides it, is not a character at all
HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rover\x9b31m\u202eright\u2066\u200b\x00\x7f\ud800\u2028end\nNext: ringtap rm"
ROOT = Path(__file__).resolve().parents[3]
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
    assert masked(text) == text.replace("\t", " ").replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("naïve", "naïve"),
        ("na\udcc3\udcafve", "naïve"),
        ("b\udce9 \udcc3\udcbc", "b\\xe9 ü"),
        (repr("na\udcc3\udcafve"), "'naïve'"),
        ("\udcc2\udc9b31m", "\\x9b31m"),  # hides a control character
        ("\ud800", "\\ud800"),
    ],
)
def test_names_that_python_could_not_decode_are_shown(name: str, shown: str) -> None:
    assert visible(name) == shown


def test_names_beyond_ascii_are_readable_where_the_locale_has_none(tmp_path: Path) -> None:
    """Python would else print ``na\\udcc3\\udcafve``."""
    environment = dict(os.environ) | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "ringtap.cli"]
    options = ["--node", "here", "--collect", "nic"]
    for arguments, code in ((["run", "-o", "naïve", *options, "--", "true", "größe"], 0), (["analyze", "naïv"], 2)):
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "na\\xefv" in done.stderr
        assert "udc" not in done.stderr
    for path in (tmp_path / "naïve" / "run.json", tmp_path / "naïve" / "nodes" / "here" / "node.json"):
        assert "größe" in str(json.loads(path.read_text()))


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


# modules that write for a program alone: JSON in ASCII, frames, machine code, or metrics
_FOR_PROGRAMS = {
    *(
        "agents/sweep/host_facts.py",
        "agents/hosts/worker.py",
        "agents/testbed/init_process.py",
        "agents/sweep/tcp_reachability.py",
    ),
    "analysis/pcap/kernels/compile.py",
    "analysis/sweeps/next_load.py",
    "analysis/live/metrics.py",
}
# functions that go past the guard, and why
_PAST_THE_GUARD = {
    ("agents/job/foreground_command.py", "become"): "a forked child writes one line that is made visible",
    ("agents/hosts/worker.py", "_write"): "frames to the controller",
    ("slurm/job_state_file.py", "_append"): "handlers of signals write one line that is made visible",
    ("slurm/batch_script.py", "print_script"): "to a file or a pipe; a terminal gets guarded text",
    ("analysis/pcap/kernels/compile.py", ""): "machine code to the process that asked for it",
    ("ringtap/doctor.py", "_doctor"): "a table with colours; texts are made visible",
    ("trafficgen/commands/send.py", "_show_progress"): "two numbers",
}

_LIKELY = re.compile(r"os\.write\([12]|unguarded\(|\.buffer\b|sys\.__std|sys\.exit\(f?['\"]")
_PAST = re.compile(
    r"(?s)os\.write\([12],.*|unguarded\(.*|sys\.std(out|err)\.buffer|sys\.__std(out|err)__|sys\.exit\(f?['\"].*"
)


def test_every_way_to_a_terminal_passes_the_guard() -> None:
    """Read the source: whoever adds a way past the guard has to name it above, with its reason."""
    modules, past = set(), set()
    for room in ("agents", "analysis", "collectors", "ringtap", "slurm", "trafficgen", "workload"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            own = ("ringtap/core/terminal_escaping.py", "ringtap/cli.py", "ringtap/__main__.py")
            if name in own or path.parent.is_symlink():
                continue
            text = path.read_text()
            if '__name__ == "__main__"' in text and "as_command(" not in text:
                modules.add(name)
            if _LIKELY.search(text):  # a syntax tree takes its time
                past |= {(name, function) for function in _unguarded_writes(ast.parse(text))}
    assert modules == _FOR_PROGRAMS
    assert past == set(_PAST_THE_GUARD)


def _unguarded_writes(tree: ast.Module) -> Iterator[str]:
    """Names of the functions that write past the guard; empty: the module itself."""
    inside = {id(node): "" for node in ast.walk(tree)}
    for function in ast.walk(tree):  # outer ones first
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {id(node): function.name for node in ast.walk(function)}
    for node in ast.walk(tree):
        words = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
        if _PAST.fullmatch(words):
            yield inside[id(node)]


@pytest.mark.parametrize(
    "words",
    [
        ["agents.testbed.run_on_host", HOSTILE, "a", "true"],
        ["agents.node.record_unsupervised_process", HOSTILE, "n0", "1"],
        ["slurm.run_job_steps", "run", HOSTILE],
        pytest.param(
            ["collectors.python_capture", "--interface", "lo", "--write", HOSTILE + "/x/y"],
            marks=pytest.mark.needs_root("capture packets of lo"),
        ),
        ["collectors.python_capture", "--interface", "lo", "--write", "x.pcap", "tcp", HOSTILE],
        ["cli", "run", "--", HOSTILE],
    ],
    ids=lambda words: words[0],
)
def test_a_module_that_runs_on_its_own_steers_no_terminal(words: list[str], tmp_path: Path) -> None:
    given = [os.fsencode(word.replace("\0", "").replace("\ud800", "")) for word in words[1:]]
    line = [sys.executable, "-m", f"ringtap.{words[0]}", *given]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert done.returncode in (1, 2, 127)
    assert b"\\x1b[2J" in done.stderr
    assert not STEERING.search(done.stderr.decode())
    assert b"Traceback" not in done.stderr


def test_a_script_is_printed_byte_by_byte_unless_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with guarded():
        print_script("echo \x1b[2J \udcff\n")
        sys.stdout.flush()
        assert capfdbinary.readouterr().out == b"echo \x1b[2J \xff\n"
        monkeypatch.setattr(unguarded(sys.stdout), "isatty", lambda: True)
        print_script("echo \x1b[2J \udcff\n")
        sys.stdout.flush()
    assert capfdbinary.readouterr().out == b"echo \\x1b[2J \\xff\n"


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


@pytest.mark.parametrize("verb", ["analyze", "report", "live", "status", "merge"])
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
    run.node("n0")
    run.finish("complete")
    paths = SubmitPaths(path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [], "tasks": []})
    for verb in ("status", "merge"):
        assert main([verb, str(path)]) == 0
        (command,) = re.findall(r"Next: (.*)", capsys.readouterr().out)
        assert shlex.split(command) == ["ringtap", "analyze", str(path)]
