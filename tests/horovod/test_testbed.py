"""A sweep whose job is Horovod's scale model, over two hosts of the virtual testbed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.core.append_only_logs import open_records
from tests.frameworks.ranks import quick
from tests.horovod.conftest import needs_horovod

pytestmark = [pytest.mark.alone(1), needs_horovod]

PARAMETERS = 276_715
PLAN = f"""\
[sweep]
name = "horovod"
scale = 500
loads = [0]
traffic = ["consistent"]

[testbed]
configuration = "custom"
hosts = ["S0", "S1", "S2"]
workers = ["S0", "S1"]
cross_from = "S2"
cross_to = "S0"

[window]
warmup_iterations = 2
settle = "200ms"
min_time = "2s"
min_iterations = 8
max_time = "10s"

[[models]]
name = "horovod"
framework = "horovod"
parameters = {PARAMETERS * 500}
layers = 8
compute = "150ms"
"""


@pytest.mark.usefixtures("unchanged_machine")
def test_a_sweep_with_horovod_moves_the_bytes_of_the_equation(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN)
    command = [sys.executable, "-m", "ringtap.cli", "sweep", str(plan), "-o", str(out), "--json"]
    done = subprocess.run(command, env=os.environ | quick(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (point,) = map(json.loads, (out / "points.jsonl").read_text().splitlines())
    nodes = out / point["directory"] / "nodes"
    wanted = demand(PARAMETERS, workers=2).worker_bytes
    for rank, host in enumerate(["S0", "S1"]):
        (records,) = (path for path in (nodes / host / "steps").glob(f"rank{rank}-*.rec") if path.suffixes == [".rec"])
        steps = open_records(records).tail()
        assert [row[0] for row in steps] == list(range(len(steps)))
        ends = [row[3] for row in steps if point["window_start_ns"] < row[3] <= point["window_end_ns"]]
        assert abs(len(ends) - point["iterations"]) <= 1
        nic = open_records(nodes / host / "nic" / "nic.rec")
        names = [field.name for field in nic.fields]
        rows = np.array(nic.tail(), float)
        sent, packets = (rows[:, names.index(f"eth0.tx_{what}")] for what in ("bytes", "packets"))
        span = [point["window_start_ns"], point["window_end_ns"]]

        def each(counter: np.ndarray, times: np.ndarray = rows[:, 0], span: list[int] = span) -> float:
            return float(np.diff(np.interp(span, times, counter))[0] / point["iterations"])

        # without headers of Ethernet, IP and TCP; the rest is Horovod's negotiation, a message a cycle of 1 ms
        payload = each(sent) - 66 * each(packets)
        assert wanted < payload < 1.04 * wanted
