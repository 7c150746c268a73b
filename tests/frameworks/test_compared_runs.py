"""Two real jobs over loopback, one with twice the parameters: a comparison finds twice the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.analysis.compare.run_comparison import compare_runs
from tests.frameworks.ranks import launch, quick

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

SCALE_MODEL = Path(__file__).resolve().parents[2] / "examples" / "scale_model.py"
PARAMETERS, ITERATIONS = 300_000, 30
COMPUTE_S = 0.08  # in four sleeps, of which each ends milliseconds late where a machine is busy


def record(run: Path, parameters: int) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | quick()
    job = [sys.executable, str(SCALE_MODEL), "--parameters", str(parameters), "--layers", "4"]
    job += ["--compute-s", str(COMPUTE_S), "--iterations", str(ITERATIONS)]
    settings = ["--every", "10ms", "--collect", "default,packets", "--interface", "lo", "-o", str(run)]
    command = [sys.executable, "-m", "ringtap.cli", "run", *settings, "--", *launch(2, *job)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.needs_root("capture packets of lo")
def test_twice_the_parameters_are_twice_the_bytes(tmp_path: Path) -> None:
    record(tmp_path / "small", PARAMETERS)
    record(tmp_path / "large", 2 * PARAMETERS)
    found = compare_runs([tmp_path / "small", tmp_path / "large"])
    rows = {row.name: row for row in found.rows}
    # packets have no sampling; gloo's headers and what is sent again are less than 1 %
    captured = rows["packet_training_bytes"]
    assert captured.ratio == pytest.approx(2, rel=0.01)
    assert captured.is_beyond_chance
    assert captured.values[0] == pytest.approx(2 * 4 * PARAMETERS, rel=0.02), "equation 3.1, of two ranks"
    assert [run.facts["ranks"] for run in found.runs] == [2, 2]
    for run in found.runs:
        assert run.matrix.shape == (2, 2)
        assert all(name in run.measures for name in ("exposed_s", "overlap_s", "duty_cycle"))
    assert rows["compute_s"].values[0] == pytest.approx(COMPUTE_S, rel=0.5)
