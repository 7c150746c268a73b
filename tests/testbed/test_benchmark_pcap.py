"""The benchmark of the readers runs from end to end and says what it found; what it finds is no matter of a test."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

BENCHMARK = [sys.executable, str(Path(__file__).resolve().parents[2] / "benchmarks" / "pcap.py")]
KEYS = ["packets_per_s", "vs_tcpdump", "vs_tshark", "vs_dpkt", "vs_scapy", "peak_rss_mb"]
# --quick promises a minute on two cores of its own; a test shares them with whatever else the machine does meanwhile
BUDGET_S = 60 + 60


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    raw, markdown = tmp_path / "raw.json", tmp_path / "tables.md"
    begun_s = time.monotonic()
    arguments = ["--quick", "--repeats", "2", "-o", str(raw), "--markdown", str(markdown)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*BENCHMARK, *arguments], capture_output=True, text=True, check=False, timeout=BUDGET_S + 60, env=environment
    )
    took_s = time.monotonic() - begun_s
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures)[: len(KEYS)] == KEYS
    for key, value in figures.items():
        assert isinstance(value, (int, float)), (key, value)
        assert math.isfinite(value), (key, value)
        assert value > 0, (key, value)
    assert took_s < BUDGET_S, done.stderr
    results = json.loads(raw.read_text())
    assert results["figures"] == figures
    assert not results["failures"]
    assert "| tshark -z conv,tcp |" in markdown.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.json", "tables.md"]


def test_without_tshark_the_rest_goes_on(tmp_path: Path) -> None:
    """A PATH without it; interrupted when the next reader begins, nothing is left behind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PATH": str(programs)}
    command = [*BENCHMARK, "--quick", "--repeats", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = ""
    while "tool=scapy" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    output, rest = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    assert output == ""
    assert "nothing was left running" in rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]
