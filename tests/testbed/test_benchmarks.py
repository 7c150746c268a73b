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
    "plan_million_rss_mb",
]


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    figures, results, tables = quick("traffic", tmp_path, "--repeats", "1")
    assert list(figures) == KEYS
    if figures["load_error_pct_max"] is None:  # other programs took this machine's cores, and the result says so
        assert any(note.startswith("This run cannot judge ") for note in results["notes"])
        del figures["load_error_pct_max"]
    for key, value in figures.items():
        assert isinstance(value, (int, float)), (key, value)
        assert math.isfinite(value), (key, value)
        assert value > 0, (key, value)
    assert results["samples"]["concurrent flows"][0]["open_at_once"] == 10_000
    assert results["machine"]["kernel"] in tables
    assert "| loaded |" in tables


def test_interrupted_it_ends_at_once() -> None:
    """The fixture sees to it that servers, clients and namespaces are gone."""
    interrupt("traffic", "--only", "throughput", at="throughput", after_s=1)  # into a transfer


def test_without_privilege_it_still_has_a_veth_pair(tmp_path: Path) -> None:
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_admin,-net_admin,-net_raw,-sys_ptrace,-dac_override"]
    raw = tmp_path / "raw.json"
    arguments = ["--quick", "--only", "throughput", "--repeats", "1", "-o", str(raw)]
    done = subprocess.run([*drop, *TRAFFIC, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {sample["route"] for sample in json.loads(raw.read_text())["samples"]["throughput"]} == {"loopback", "veth"}


def test_a_peer_that_cannot_be_driven_is_refused_in_a_sentence() -> None:
    done = subprocess.run([*TRAFFIC, "--peer", "cat=/bin/cat"], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "peer cat: cat is neither iperf3 nor iperf 2" in done.stderr
    assert "Traceback" not in done.stderr
