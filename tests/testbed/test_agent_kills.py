"""The agent is killed at many moments of a running job; the job must not notice, and the log must read back."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ringtap.core.append_only_logs import open_records
from tests.unit.agent_processes import ROOT, agents_of, ended, gone, rows_of, wait_for, wrapped

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
# moments 12 ms apart: the longest gap of a hundred random ones would be five times that
KILLS, AT_ONCE, MAX_DELAY_S = 100, 4, 1.2

# Gradient descent on y = 3x + 1, a mark an iteration, every loss printed to the last digit
# the last one follows once a file exists: the job is not over before its agent has been seen
DESCENT = """
import os, random, sys, time
import ringtap
numbers = random.Random(5)
points = [(x, 3 * x + 1 + numbers.gauss(0, 0.1)) for x in (numbers.uniform(-1, 1) for _ in range(200))]
slope = offset = 0.0
for number in range(40):
    while number == 39 and not os.path.exists(sys.argv[1]):
        time.sleep(0.005)
    errors = [(slope * x + offset - y, x) for x, y in points]
    print(repr(sum(error * error for error, _ in errors) / len(points)))
    slope -= 0.1 * 2 * sum(error * x for error, x in errors) / len(points)
    offset -= 0.1 * 2 * sum(error for error, _ in errors) / len(points)
    ringtap.step()
    time.sleep(0.02)
"""


def kill_once(run: Path, delay_s: float) -> tuple[str, int, float]:
    """Wrap the job, kill its agent after a delay; returns the job's output, its code, and when it was killed."""
    options, seen = ("--collect", "nic,host,steps", "--every", "5ms"), run.with_suffix(".seen")
    with ended(wrapped(run, sys.executable, "-c", DESCENT, str(seen), options=options)) as process:
        (agent,) = wait_for(lambda: agents_of(run))
        # one that is killed before its supervisor has connected counts as not started
        wait_for(lambda: psutil.Process(process.pid).net_connections("unix"))
        seen.touch()
        time.sleep(delay_s)
        killed_s = time.time()
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return output, process.returncode, killed_s


@pytest.mark.timeout(400)
def test_a_hundred_killed_agents_harm_no_job_and_no_log(tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "-c", DESCENT, ROOT], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    ).stdout
    assert len(set(alone.split())) == 40
    delays = [MAX_DELAY_S * number / KILLS for number in range(KILLS)]
    random.Random(20260101).shuffle(delays)
    runs = [tmp_path / f"run{number}" for number in range(KILLS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(kill_once, runs, delays))
    assert [output for output, _, _ in results] == [alone] * KILLS
    assert {code for _, code, _ in results} == {0}
    partial = 0
    for run, (_, _, killed_s) in zip(runs, results, strict=True):
        gone(run)
        info = json.loads((run / "run.json").read_text())
        assert info["status"] in ("partial", "complete")
        node = run / "nodes" / "here"
        if info["status"] == "partial":
            partial += 1
            assert "killed or crashed" in info["why"]
            assert not (node / "DONE").exists()
        (steps,) = node.glob("steps/rank*.rec")
        assert open_records(steps).count == 40
        # an empty one: killed between making the file and writing its header
        logs = {path: open_records(path) for path in node.rglob("*.rec") if path.stat().st_size}
        assert not any(log.torn_bytes for log in logs.values())
        log = node / "nic" / "nic.rec"
        if log in logs and logs[log].count > 20:
            # the log goes up to the last second before the kill, or up to its own end
            assert rows_of(run)[-1][0] / 1e9 > min(killed_s, node.stat().st_mtime) - 1
    assert partial > KILLS / 3


# the second half follows once a file exists
TRAINING = """
import os, sys, time
import torch
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True).sin()
for number in range(60):
    while number == 30 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    time.sleep(0.02)
"""


def test_torch_computes_the_same_beside_a_killed_agent(tmp_path: Path) -> None:
    training, killed = [sys.executable, "-c", TRAINING], tmp_path / "killed"
    alone = subprocess.run([*training, tmp_path], capture_output=True, text=True, check=True, timeout=120)
    with ended(wrapped(tmp_path / "run", *training, str(killed), options=("--every", "10ms"))) as process:
        steps = tmp_path / "run" / "nodes" / "here" / "steps"
        (log,) = wait_for(lambda: [path for path in steps.glob("rank0-*.rec") if path.suffixes == [".rec"]], 120)
        wait_for(lambda: log.stat().st_size and open_records(log).count > 10)
        (agent,) = agents_of(tmp_path / "run")
        agent.kill()
        killed.touch()
        output, _ = process.communicate(timeout=120)
    assert (output, process.returncode) == (alone.stdout, 0)
    records = open_records(log)
    assert (records.count, records.torn_bytes) == (60, 0)
    assert len(alone.stdout.split()) == 60
    gone(tmp_path / "run")
