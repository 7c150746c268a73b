"""The benchmark of chosen loads goes from end to end with few seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

BENCHMARK = Path(__file__).resolve().parents[4] / "benchmarks" / "loads.py"


def test_quick_compares_both_kinds_of_sweep(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "-o", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    assert [one["model"] for one in found["summaries"]] == ["resnet50", "vgg16"]
    for one in found["summaries"]:
        assert one["reached_by_grid"] == one["reached_by_auto"] == one["seeds"] == 2
        # of 4 seeds, the medians are 0.43 and 0.44
        assert one["ratio_median"] < 0.75
    assert len(found["rows"]) == 4
