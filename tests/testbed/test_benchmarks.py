"""The benchmark runs from end to end, keeps to its time, says what it found, and leaves nothing behind.

What it finds is no matter of a test: how fast a machine is today would make a test that fails tomorrow.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import benchmark, interrupt, quick

pytestmark = [pytest.mark.alone(2), pytest.mark.usefixtures("unchanged_machine")]
TRAFFIC = benchmark("traffic")
KEYS = [
    "one_stream_vs_iperf3_z",
    "n_streams_vs_iperf3",
    "load_error_pct_max",
    "lateness_p50_us",
    "lateness_p99_us",
    "kept_flows_per_s",
    "new_flows_per_s",
]


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    figures, results, tables = quick("traffic", tmp_path, "--repeats", "1")
    assert list(figures) == KEYS
    if figures["load_error_pct_max"] is None:  # others took this machine's cores or time, as the result says
        why = ("This run cannot judge ", "The time of --quick did not allow ")
        assert any(note.startswith(why) for note in results["notes"])
        del figures["load_error_pct_max"]
    for key, value in figures.items():
        assert isinstance(value, (int, float)), (key, value)
        assert math.isfinite(value), (key, value)
        assert value > 0, (key, value)
    assert results["machine"]["kernel"] in tables
    assert "| loaded |" in tables


def test_interrupted_it_ends_at_once() -> None:
    """The fixture sees to it that servers, clients and namespaces are gone."""
    interrupt("traffic", "--only", "throughput", at="throughput", after_s=1)  # into a transfer


def test_without_privilege_it_has_a_network_of_its_own(tmp_path: Path) -> None:
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_admin,-net_admin,-net_raw,-sys_ptrace,-dac_override"]
    raw = tmp_path / "raw.json"
    arguments = ["--quick", "--only", "throughput", "-o", str(raw)]
    done = subprocess.run([*drop, *TRAFFIC, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(raw.read_text())
    assert len(results["samples"]["throughput"]) == 4
    assert results["notes"] == []  # it would name the loopback of the machine
