"""The benchmark of the readers runs from end to end and says what it found; what it finds is no matter of a test."""

import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import benchmark, quick
from tests.unit.agent_processes import ended

pytestmark = pytest.mark.shares

KEYS = ["packets_per_s", "vs_tcpdump", "vs_tshark", "peak_rss_mb", "speedup_all_cores"]


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    figures, _, tables = quick("pcap", tmp_path, "--repeats", "2", "--packets", "500_000")
    assert list(figures) == KEYS
    for key, value in figures.items():
        assert isinstance(value, (int, float)), (key, value)
        assert math.isfinite(value), (key, value)
        assert value > 0, (key, value)
    assert "| tshark -z conv,tcp |" in tables
    assert list((tmp_path / "scratch").iterdir()) == []


def test_without_tshark_the_rest_goes_on(tmp_path: Path) -> None:
    """A PATH without it; interrupted when the next reader begins, nothing is left behind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PATH": str(programs)}
    # it reads on until it is interrupted, however late
    command = [*benchmark("pcap"), "--packets", "500_000", "--repeats", "1000"]
    with ended(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    ) as process:
        assert process.stderr is not None
        said = ""
        while "tool=ringtap" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    assert output == ""
    assert "nothing was left running" in rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]
