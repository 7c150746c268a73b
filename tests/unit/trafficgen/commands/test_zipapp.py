"""``ringtap traffic zipapp``: the file runs where nothing is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.traffic_processes import rows, serving, traffic

pytestmark = [pytest.mark.shares, pytest.mark.together]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "traffic.pyz"
    assert f"Wrote {path}" in traffic("zipapp", "-o", path).stdout
    return path


def alone(archive: Path) -> list[str]:
    """Isolated from folders, environment (-I) and whatever is installed (-S)."""
    return [sys.executable, "-I", "-S", str(archive)]


def run(command: Sequence[str], folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_it_plans_serves_and_sends_away_from_here(archive: Path, tmp_path: Path) -> None:
    command = alone(archive)
    with serving("--log", tmp_path / "r.rec", "--workers", 2, command=command) as serve:
        shape = ("--kind", "consistent", "--load", "20mbit", "--duration", "200ms", "--scale", 100)
        planned = run(command, tmp_path, "plan", *shape, "--to", serve.address, "-o", "p.plan")
        assert planned.returncode == 0, planned.stderr
        sent = run(command, tmp_path, "send", "p.plan", "--log", "s.rec", "--json", "--workers", 2)
        assert sent.returncode == 0, sent.stderr
        assert json.loads(sent.stdout)["finished"] == serve.end()["flows"] > 10
    assert {row["flow"] for row in rows(tmp_path / "s.rec")} == {row["flow"] for row in rows(tmp_path / "r.rec")}


def test_what_it_cannot_do_is_one_sentence(archive: Path, tmp_path: Path) -> None:
    replay = ("plan", "--kind", "replay", "--replay", "x.pcap", "--to", "h:1", "--summary")
    for arguments in (("verify", "p.plan"), replay):
        done = run(alone(archive), tmp_path, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("ringtap: ")
        assert "analysis" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_it_is_helpful(archive: Path, tmp_path: Path) -> None:
    for arguments in ((), ("--help",), ("plan", "--help"), ("send", "--help"), ("calibrate", "--help")):
        done = run(alone(archive), tmp_path, *arguments)
        assert done.returncode == (0 if arguments else 2)
        assert done.stdout if arguments else done.stderr


def test_a_file_that_is_there_is_kept_unless_forced(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.pyz"
    path.write_text("mine")
    assert "--force" in traffic("zipapp", "-o", path, expect=2).stderr.splitlines()[-1]
    assert path.read_text() == "mine"
    traffic("zipapp", "-o", path, "--force")
    assert run(alone(path), tmp_path, "plan", "--help").returncode == 0
    assert "cannot be written" in traffic("zipapp", "-o", tmp_path / "no" / "x.pyz", expect=2).stderr.splitlines()[-1]
    assert {child.name for child in tmp_path.iterdir()} == {"mine.pyz"}


def test_what_it_writes_is_the_usual_plan(archive: Path, tmp_path: Path) -> None:
    """Byte for byte: a plan made on a bare node is the one that others can make again."""
    shape = ("plan", "--kind", "burst", "--load", "50mbit", "--duration", "100ms", "--scale", 100, "--to", "h:1")
    assert run(alone(archive), tmp_path, *shape, "-o", "bare.plan").returncode == 0
    traffic(*shape, "-o", tmp_path / "usual.plan")
    assert (tmp_path / "bare.plan").read_bytes() == (tmp_path / "usual.plan").read_bytes()
