"""Ends of iterations that a sweep reads while its job runs, and what the analysis makes of windows between them."""

from pathlib import Path

import pytest

from ringtap.agents.sweep.step_watcher import StepWatcher
from ringtap.analysis.runs.run import JobRun, read_run, window_on_reference
from ringtap.core.run_directory import RunDirectory
from tests.gold.clocks_apart import set_ahead
from tests.gold.job_run import MS, START_NS, Node

pytestmark = pytest.mark.computes
AHEAD_NS = {"a": 0, "b": 50 * MS, "c": -20 * MS}
LATE_MS = {"a": (0, 90, 3), "b": (5, 0, 2), "c": (80, 10, 0)}  # of a second, in turn: another rank is the last


def test_windows_by_the_clocks_of_hosts_are_those_of_the_same_iterations(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    for rank, (name, late_ms) in enumerate(LATE_MS.items()):
        node = Node(run, name)
        ends = [START_NS + number * 1000 * MS + late_ms[number % 3] * MS for number in range(30)]
        rows = [(number, 0, end - MS, end, 0, 0, 0, 0) for number, end in enumerate(ends)]
        node.steps(rank, [row for row in rows if row[3] > START_NS + 500 * MS])
        node.wide("nic/nic.rec", {"eth0.rx_bytes": "counter"}, [(START_NS, 0), (START_NS + 30_000 * MS, 5)])
    expected = read_run(run.path)
    assert isinstance(expected, JobRun)
    true_ns = expected.iterations["end_ns"].tolist()
    own_ns = set_ahead(run.path, AHEAD_NS, "a")
    ends_ns = StepWatcher(run, dict.fromkeys(AHEAD_NS, 1)).iteration_ends_ns()
    assert ends_ns[1:] == [own_ns[end] for end in true_ns]
    job = read_run(run.path)
    assert isinstance(job, JobRun)
    assert job.iterations.equals(expected.iterations)
    windows = [window_on_reference((begin, end), job) for begin, end in zip(ends_ns[1:], ends_ns[4:], strict=False)]
    assert windows == list(zip(true_ns, true_ns[3:], strict=False))
