"""The benchmark of large runs goes from end to end at a small size, and what it makes and finds is right."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import benchmark

pytestmark = pytest.mark.usefixtures("unchanged_machine")
# so long that bytes per iteration can be told from samples of 100 ms
NODES, ITERATIONS = 12, 30


def test_a_small_size_is_measured_whole(tmp_path: Path) -> None:
    raw, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [*benchmark("scale"), "--quick", "--nodes", str(NODES), "--iterations", str(ITERATIONS)]
    command += ["--gigabytes", "0.02", "-o", str(raw)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert done.returncode == 0, done.stderr
    figures, results = json.loads(done.stdout.splitlines()[-1]), json.loads(raw.read_text())
    assert results["figures"] == figures
    assert not results["failures"]
    assert all(value is not None and value > 0 for value in figures.values())
    assert list(scratch.iterdir()) == []

    jobs = [one for one in results["samples"]["nodes"] if one["of"] == "job"]
    assert [(one["found_nodes"], one["found_ranks"], one["found_iterations"]) for one in jobs] == [
        (NODES, NODES, ITERATIONS)
    ] * 2
    for one in jobs:
        # copies come in pairs that reduce between themselves: by equation 3.1 a rank of two sends its gradients once
        assert one["sent_bytes"] == pytest.approx(one["gradient_bytes"], rel=0.1)
    (whole,) = (one["sets"][-1] for one in results["samples"]["read"] if one["workers"] == 2)
    (again,) = (one["sets"][-1] for one in results["samples"]["read"] if one["workers"] == 1)
    assert (whole["packets"], whole["bytes"]) == (again["packets"], again["bytes"])


def test_minutes_of_nodes_are_measured_as_hours_are(tmp_path: Path) -> None:
    """The recorded iterations are repeated, and each sample of an analysis finds all of them."""
    raw, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [*benchmark("hours"), "--nodes", "2", "4", "--seconds", "60", "--workers-nodes", "0", "-o", str(raw)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(raw.read_text())
    found = results["samples"]["analyze"]
    assert [one["found_nodes"] for one in found] == [2, 4]
    assert found[0]["found_iterations"] == found[1]["found_iterations"] > 200  # recorded were 150
    known = {name for name, value in results["figures"].items() if value is not None}
    assert set(results["figures"]) - known == {"workers_speedup", "resumed_share"}  # of Dask, kill and resume
    assert list(scratch.iterdir()) == []
