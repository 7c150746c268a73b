"""Replay of a workload as the job of a sweep on the testbed, beside the job that it stands for."""

import json
from pathlib import Path

import pytest

import ringtap
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import open_sent_log
from ringtap.workload.workload import write_workload
from tests.testbed.sweeps import SMALL, WORKERS, run, small_messages

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
REPLAY = """
[[models]]
name = "replay"
parameters = 25_000_000
command = ["env", "RINGTAP_TOKEN=test", "{{python}}", "-m", "ringtap", "traffic", "send", "{plan}", "--as", "{{host}}",
    "--receive", "--log", "{logs}/{{host}}.rec"]
"""


@pytest.mark.alone(1)
def test_a_replay_takes_as_long_as_the_job(tmp_path: Path) -> None:
    write_workload(small_messages(), tmp_path / "w")
    nodes = [word for host in WORKERS for word in ("--node", f"{host}:5101")]
    kind = ("--kind", "workload", "--from", tmp_path / "w", "--iterations", "2000")
    made = run("traffic", "plan", *kind, *nodes, "-o", tmp_path / "p.plan")
    assert made.returncode == 0, made.stderr
    text = SMALL.format(capacity="25gbit").replace('["iperf"]', '["consistent"]')
    (tmp_path / "plan.toml").write_text(
        text.replace("[0, 0.7]", "[0, 0.5]") + REPLAY.format(plan=tmp_path / "p.plan", logs=tmp_path)
    )
    done = run("sweep", tmp_path / "plan.toml", "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    points = ringtap.open_sweep(tmp_path / "run").points
    job, replay = (points[points["model"] == name].reset_index() for name in ("small", "replay"))
    assert (replay["iterations"] >= 5).all()
    # without a load 5 % was measured; windows of 2.5 s under web-search traffic differ by 10 % among themselves
    assert replay["mean_s"][0] == pytest.approx(job["mean_s"][0], rel=0.15)
    assert replay["mean_s"][1] == pytest.approx(job["mean_s"][1], rel=0.3)
    # what a worker sends in an iteration is 2 (N - 1) / N of a million bytes, in frames with 5 % of headers
    volume = replay["unscaled_training_bps"] * replay["mean_s"] / 8
    assert volume.tolist() == [pytest.approx(4 / 3 * 1e6 * 1.05, rel=0.1)] * 2
    # the sweep ends one node after the other: flows to those that have gone may fail, but none that it measured
    window = json.loads((tmp_path / "run" / "points.jsonl").read_text().splitlines()[-1])
    from_ns = window["window_end_ns"] - replay["mean_s"][1] * 1e9
    flows = [flow for host in WORKERS for flow in open_sent_log(tmp_path / f"{host}.rec").flows()]
    failed = [flow for flow in flows if flow.state == FLOW_STATES["failed"]]
    assert all(max(flow.start_ns, flow.intended_start_ns) > from_ns for flow in failed)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "complete"
