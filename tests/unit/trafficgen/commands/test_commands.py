"""``ringtap traffic`` as typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.cli import main

pytestmark = pytest.mark.shares

PLAN = ["traffic", "plan", "--kind", "consistent", "--load", "10gbit", "--duration", "2s", "--seed", "1"]


def test_the_summary_is_one_json_object_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, "--to", "127.0.0.1:5001", "--summary", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary) == {"flows", "bytes", "duration_s", "mean_size_bytes", "offered_bps"}
    assert summary["bytes"] == 2_500_000_000
    assert summary["offered_bps"] == pytest.approx(10e9)
    assert summary["mean_size_bytes"] == pytest.approx(1_711_250, rel=1e-3)
    assert list(tmp_path.iterdir()) == []


def test_plan_writes_once_and_says_what_to_type_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.plan"
    command = [*PLAN, "--scale", "10", "--to", "127.0.0.1:5001", "-o", str(path)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert f"Wrote {path}" in printed.out
    assert f"ringtap traffic send {path}" in printed.out
    assert printed.err == ""
    before = path.read_bytes()
    assert main(command) == 2
    assert path.read_bytes() == before
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (PLAN, "-o"),
        ([*PLAN, "-o", "x"], "--to"),
        ([*PLAN, "--summary", "--load", "10"], "--load '10' has no unit"),
        ([*PLAN, "--summary", "--load", "80%"], "--load 80% is a share: add the --capacity of the link"),
        ([*PLAN, "--summary", "--capacity", "10gbit"], "is a rate: leave --capacity out"),
        ([*PLAN, "--summary", "--duration", "2sec"], "--duration '2sec' is not understood: did you mean 2s?"),
        ([*PLAN, "--summary", "--load", "0bit"], "load"),
        ([*PLAN, "--summary", "--duration", "0s"], "duration"),
        ([*PLAN, "--summary", "--to", "nowhere"], "HOST:PORT"),
        ([*PLAN, "--summary", "--kind", "burst", "--burst-height", "10"], "--burst-height"),
        (["traffic", "send", "missing.plan"], "missing.plan"),
        (["traffic", "serve", "--bind", "nowhere"], "HOST:PORT"),
        (["traffic", "serve", "--bind", "no.such.host.invalid:1"], "not known"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("ringtap: ")
    assert words in complaint


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys, ringtap.cli\n"
        "try: ringtap.cli.main(['traffic', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('asyncio' in sys.modules or 'socket' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan" in done.stdout
