"""Help begins with a first use and ends with examples; wrong words are answered with the nearest right ones."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap.cli import EXAMPLES, VERBS, build_parser, build_whole_parser, main
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[2]
# examples that no page has, and what runs such commands
IMPORT = "ringtap workload import astra-sim.log --workload vgg --capacity 25gbit"
ELSEWHERE = {
    "ringtap live runs/mine": "tests/testbed/test_live_terminal.py",
    "ringtap compare runs/small runs/large": "below",
    IMPORT: "tests/unit/workload/commands/test_commands.py",
    "ringtap traffic calibrate": "tests/unit/trafficgen/commands/test_commands.py",
    "ringtap traffic zipapp -o ringtap-traffic.pyz": "below",
    "ringtap status runs/two-models": "tests/slurm/test_arrays.py",
    "ringtap merge runs/two-models": "tests/slurm/test_arrays.py",
    "ringtap bundle --site narval -o bundle": "tests/unit/slurm/test_bundle.py",
    "ringtap completion bash": "below",
}


def test_help_groups_the_verbs_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    sections = re.findall(r"^(\w[\w ]+):\n((?:  \w+ .*\n)+)", text.partition("\noptions:")[0], re.MULTILINE)
    listed = {heading: [line.split()[0] for line in text.splitlines()] for heading, text in sections}
    assert listed["Learn these"] == ["doctor", "run", "live", "analyze", "report", "compare", "sweep"]
    assert listed["Slurm"] == ["submit", "status", "merge", "bundle"]
    assert [verb for verbs in listed.values() for verb in verbs] == list(VERBS)


def test_help_of_a_command_is_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("analyze",), ("traffic", "send")):
        said = []
        for arguments in (["help", *words], [*words, "--help"]):
            with pytest.raises(SystemExit) as end:
                main(arguments)
            assert end.value.code == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
        assert " ".join(["usage: ringtap", *words]) in said[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("anaylze", "there is no command 'anaylze': did you mean 'analyze'? (see ringtap --help)"),
        ("help anaylze", "there is no command 'anaylze': did you mean 'analyze'? (see ringtap --help)"),
        ("xyz", "there is no command 'xyz' (see ringtap --help)"),
        ("lab up", "there is no command 'lab': it is testbed now (see ringtap --help)"),
        ("capture", "there is no command 'capture': it is record now (see ringtap --help)"),
        ("collect runs/x", "there is no command 'collect': it is merge now (see ringtap --help)"),
        ("traffic bundle", "there is no command 'bundle': it is zipapp now (see ringtap traffic --help)"),
        ("testbed exec --lab x S0", "there is no option --lab: it is --testbed now (see ringtap testbed exec --help)"),
        ("report x --scheduler local", "there is no option --scheduler: it is --dask now (see ringtap report --help)"),
        (
            "traffic send x --line-rate 1gbit",
            "there is no option --line-rate: it is --capacity now (see ringtap traffic send --help)",
        ),
        ("traffic sned", "there is no command 'sned': did you mean 'send'? (see ringtap traffic --help)"),
        ("analyze --jsn x", "there is no option --jsn: did you mean '--json'? (see ringtap analyze --help)"),
        (
            "whatif w --bandwidth 1gbit",
            "there is no option --bandwidth: it is --capacity now (see ringtap whatif --help)",
        ),
        (
            "workload show w --rate=1gbit",
            "there is no option --rate: it is --capacity now (see ringtap workload show --help)",
        ),
        ("testbed up --rate 1gbit", "there is no option --rate: it is --capacity now (see ringtap testbed up --help)"),
        ("analyze x --rate 1", "there is no option --rate (see ringtap analyze --help)"),
        ("--json analyze x", "--json comes after the command (see ringtap analyze --help)"),
        ("-o runs/x sweep vt.toml", "-o comes after the command (see ringtap sweep --help)"),
        ("traffic --bind 127.0.0.1:5001 serve", "--bind comes after the command (see ringtap traffic serve --help)"),
        ("start x", "there is no command 'start': did you mean 'run'? (see ringtap --help)"),
        (
            "record -- python3 train.py",
            "no command goes here: ringtap run -- COMMAND starts a job (see ringtap record --help)",
        ),
        ("analyze x --force", "there is no option --force (see ringtap analyze --help)"),
        ("traffic send --xyz=1 x", "there is no option --xyz (see ringtap traffic send --help)"),
        (
            "sweep plan.toml --clean --dry-run",
            "argument --dry-run: not allowed with argument --clean (see ringtap sweep --help)",
        ),
        ("analyze x y", "'y' is one argument too many (see ringtap analyze --help)"),
        (
            "traffic plan --kind brust",
            "--kind: 'brust' is not known: did you mean 'burst'? (see ringtap traffic plan --help)",
        ),
        ("completion fish", "shell: 'fish' is not known: choose bash, zsh, tcsh (see ringtap completion --help)"),
    ],
)
def test_what_is_misspelled_is_answered_with_the_nearest(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err == f"ringtap: {sentence}\n"


def leaves(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the commands without sub-commands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog.removeprefix("ringtap ")
    for action in below:
        for one in action.choices.values():
            yield from leaves(one)


def run_by_tests() -> set[str]:
    """The commands in blocks of pages that tests run, without comments and what is not the command's."""
    found = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found.add(" ".join(re.split(r" # | &(?: |$)", line)[0].split()))
    return found


def test_each_command_has_examples_which_tests_run() -> None:
    assert sorted(EXAMPLES) == sorted(leaves(build_whole_parser()))
    examples = [example for some in EXAMPLES.values() for example in some]
    assert sorted(set(examples) - run_by_tests()) == sorted(ELSEWHERE)
    for where in set(ELSEWHERE.values()) - {"below"}:
        assert (ROOT / where).is_file(), where


@pytest.mark.parametrize("example", [example for some in EXAMPLES.values() for example in some])
def test_an_example_is_accepted_and_ends_the_help(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(example)
    options = build_parser(*words[:2]).parse_args(words)
    assert callable(options.handler)
    prog = next(prog for prog, some in EXAMPLES.items() if example in some)
    with pytest.raises(SystemExit):
        main(["help", *prog.split()])
    *_, after = capsys.readouterr().out.partition("\nexamples:\n")
    assert example in " ".join(after.replace("\\\n", " ").split())
    assert max(map(len, after.splitlines())) <= 80


def test_examples_that_no_page_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, compute_ms in (("small", 100), ("large", 130)):
        write_ddp_job(tmp_path / "runs" / name, Truth(compute_ms=(compute_ms, compute_ms)))
    for example in (example for example, where in ELSEWHERE.items() if where == "below"):
        assert main(shlex.split(example)[1:]) == 0
        assert capsys.readouterr().out
