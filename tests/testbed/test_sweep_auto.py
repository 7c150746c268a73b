"""A sweep that chooses its loads on the real testbed, interrupted and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ringtap.core.append_only_logs import read_json_lines
from tests.testbed.sweeps import one_sentence, run, start, status, wait_for
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
RANK = str(Path(__file__).with_name("sharing_rank.py"))
# a job without torch, which starts in no time; cross traffic takes of the link on which it sends
PLAN = f"""\
[sweep]
name = "chosen"
scale = 250
loads = "auto"
traffic = ["consistent"]
target_interval = "3gbit"
target_mean = 0.2
budget = "16s"

[window]
warmup_iterations = 2
settle = "500ms"
min_time = "1500ms"
min_iterations = 5
max_time = "4s"

[testbed]
configuration = "custom"
hosts = ["S0", "S1", "S2"]
workers = ["S0", "S1"]
cross_from = "S2"
cross_to = "S0"

[[models]]
name = "exchange"
parameters = 1
command = ["{{python}}", {json.dumps(RANK)}]
"""
FIRST = [0.0, 0.51, 0.76, 0.88]


def points(out: Path) -> list[dict[str, object]]:
    found, torn = read_json_lines(out / "points.jsonl")
    assert torn == 0
    return found


def loads(out: Path) -> list[float]:
    return [point["requested_bps"] / 1e8 for point in points(out)]  # type: ignore[operator]


def test_it_chooses_stops_and_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN)
    with ended(start("sweep", plan, "-o", out)) as process:
        wait_for(lambda: (out / "points.jsonl").exists() and len(points(out)) >= 2, process)
        (chooser,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "next_load" in " ".join(child.cmdline())
        ]
        assert chooser.nice() == 19
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not psutil.pid_exists(chooser.pid)
    assert status(out)[0] == "partial"
    before = points(out)
    info = json.loads((out / "run.json").read_text())
    assert info["plan"]["auto"] == {"target_interval_gbps": 3.0, "target_mean": 0.2, "budget_s": 16.0}
    # it may have been interrupted before it chose again
    assert info["chosen_loads"]["exchange-consistent"]["load"] in FIRST[len(before) - 1 : len(before) + 1]
    shown = run("status", out)
    assert "exchange-consistent" in shown.stdout

    plan.write_text(PLAN.replace('"3gbit"', '"2500mbit"'))  # no measured point depends on it
    done = run("sweep", plan, "-o", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert "auto.target_interval_gbps" in done.stderr
    after = points(out)
    assert after[: len(before)] == before
    assert [point["step"] for point in after] == list(range(len(after)))
    # on a busy machine, 16 s may be too short for the fourth one
    assert loads(out)[:4] == pytest.approx(FIRST[: len(after)])
    chosen = json.loads((out / "run.json").read_text())["chosen_loads"]["exchange-consistent"]
    assert chosen["load"] is None
    assert chosen["stop"] in ("the targets are reached", "the budget of 16 s is spent")[len(after) < 4 :]
    spent_s = sum(0.5 + (point["window_end_ns"] - point["window_start_ns"]) / 1e9 for point in after)  # type: ignore[operator]
    assert spent_s <= 16 + 4.5, "its last window at most"
    assert chosen["known"] in done.stderr
    assert status(out) == ("complete", "")

    again = run("sweep", plan, "-o", out, "--resume")
    assert again.returncode == 0, again.stderr
    assert "Testbed up" not in again.stderr, "nothing is left to measure"
    assert points(out) == after

    # three windows take longer than 6 s, so the budget does not allow for the last of the first loads
    lines = (out / "points.jsonl").read_text().splitlines(keepends=True)
    (out / "points.jsonl").write_text("".join(lines[:3]))
    plan.write_text(PLAN.replace('"16s"', '"8s"'))
    spent = run("sweep", plan, "-o", out, "--resume")
    assert spent.returncode == 0, spent.stderr
    assert "Testbed up" not in spent.stderr
    assert points(out) == after[:3]


def test_without_the_analysis_it_is_one_sentence_before_anything_is_measured(tmp_path: Path) -> None:
    plan, hidden = tmp_path / "plan.toml", tmp_path / "hidden"
    plan.write_text(PLAN)
    hidden.mkdir()
    # an import system without SciPy, as after an installation without extras
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'scipy' else find(name, *rest)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ringtap", "sweep", str(plan), "-o", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(hidden)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert 'loads = "auto" needs scipy, not installed here: ' in one_sentence(done.stderr)
    assert not (tmp_path / "out").exists()
