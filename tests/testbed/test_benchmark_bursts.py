"""The benchmark of bursts measures one condition from end to end, and shows what the plans offer."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import benchmark

pytestmark = [pytest.mark.alone(1), pytest.mark.usefixtures("unchanged_machine")]


def test_quick_measures_one_condition(tmp_path: Path) -> None:
    command = [*benchmark("bursts"), str(tmp_path / "bursts"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    offered, simulated, measured = (part.splitlines()[2:] for part in done.stdout.strip().split("\n\n"))
    spreads = {line.split("|")[1].strip(): [float(x) for x in re.findall(r"([0-9.]+)%", line)] for line in offered}
    assert spreads["burst, each"] == [0, 0, 0, 0]
    # over 0.1 s and more, bursts whose quiet parts are drawn vary 0.77 times as much as consistent traffic;
    # the sampled ratio of 120 s of traffic is off by a tenth
    for burst, consistent in zip(spreads["burst, together"][1:], spreads["consistent"][1:], strict=True):
        assert burst / consistent == pytest.approx(0.77, abs=0.08)
    assert len(simulated) == 12
    spread = {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in simulated}
    at_80 = {plan: float(re.findall(r"([0-9.]+)%", spread["ResNet-50", plan, "80%"])[1]) for plan in spreads}
    # exact periods leave nothing to vary but the place of bursts; 15 iterations tell the others from them
    assert at_80["burst, each"] < 5
    assert min(at_80["burst, together"], at_80["consistent"]) > 10
    assert [line.split("|")[3].strip() for line in measured] == ["burst", "burst"]
