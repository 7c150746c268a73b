"""Completion in a shell: bash with the printed script completes verbs, sub-verbs, options and files."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.cli import SUB_VERBS, VERBS, main
from ringtap.completion import SHELLS

pytestmark = pytest.mark.shares

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "ringtap.bash"
    command = [sys.executable, "-m", "ringtap.cli", "completion", "bash"]
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return path


def completed(script: Path, *words: str, cwd: Path | None = None) -> set[str]:
    """The completions that bash offers for the last word of a command line."""
    code = f"source {shlex.quote(str(script))}; complete -p ringtap >/dev/null || exit 3\n"
    code += f"COMP_WORDS=({shlex.join(['ringtap', *words])}); COMP_CWORD={len(words)}\n"
    code += f"_shtab_ringtap ringtap {shlex.quote(words[-1])} {shlex.quote(['ringtap', *words][-2])}\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    bash = ["bash", "--noprofile", "--norc", "-c", code]
    done = subprocess.run(bash, cwd=cwd, check=True, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_every_verb(script: Path) -> None:
    assert completed(script, "") >= set(VERBS)
    assert completed(script, "s") == {"sweep", "structure", "submit", "status", "schedule"}


def test_bash_completes_sub_verbs(script: Path) -> None:
    assert completed(script, "traffic", "") >= set(SUB_VERBS["traffic"])
    assert completed(script, "testbed", "") >= {"up", "exec", "status", "down"}


def test_bash_completes_options_and_their_values(script: Path) -> None:
    assert completed(script, "sweep", "--re") == {"--report", "--resume"}
    assert completed(script, "traffic", "plan", "--burst-h") == {"--burst-height"}
    assert completed(script, "traffic", "plan", "--kind", "r") == {"ring", "replay"}
    assert completed(script, "export", "--to", "p") >= {"parquet"}
    assert completed(script, "completion", "") >= set(SHELLS)


def test_bash_completes_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.toml").touch()
    (tmp_path / "runs").mkdir()
    assert completed(script, "sweep", "de", cwd=tmp_path) == {"demo.toml"}
    assert completed(script, "sweep", "demo.toml", "-o", "ru", cwd=tmp_path) == {"runs"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert {"bash": "complete ", "zsh": "#compdef ringtap", "tcsh": "complete ringtap"}[shell] in printed
    assert [verb for verb in VERBS if verb not in printed] == []
