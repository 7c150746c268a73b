"""The loop that measures windows of one or several jobs: common windows, jobs that stop, and what is measured again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep import step_watcher
from ringtap.agents.sweep.detect_disturbances import Watch
from ringtap.agents.sweep.measurement_windows import Condition, JobWindows, MeasuredJob, WindowSpan, remarks
from ringtap.agents.sweep.step_watcher import StepWatcher
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, Window
from tests.unit.agents.sweep.test_cluster_preflight_cluster import plan_of
from tests.unit.agents.sweep.test_detect_disturbances import STAGE

pytestmark = pytest.mark.shares

S = 1_000_000_000
WINDOW = Window(settle_s=0.1, min_s=0.2, min_iterations=2, max_s=0.5, retries=2, start_timeout_s=0.2)
NETWORK = replace(STAGE, links={})


class Made(StepWatcher):
    """Steps of a job without logs: its iterations end at these seconds from now on."""

    def __init__(self, run: RunDirectory, ends_s: Sequence[float]) -> None:
        super().__init__(run, {"a": 1})
        now_ns = time.time_ns()
        self._ends_ns = [now_ns + round(end_s * S) for end_s in ends_s]

    def iteration_ends_ns(self) -> list[int]:
        return [end_ns for end_ns in self._ends_ns if end_ns <= time.time_ns()]


def every(period_s: float, until_s: float = 60.0) -> list[float]:
    return [number * period_s for number in range(1, int(until_s / period_s) + 1)]


def windows_of(tmp_path: Path, condition: Condition, /, **ends_s: Sequence[float]) -> JobWindows:
    plan: SweepPlan = replace(plan_of(tmp_path), window=WINDOW)
    found = JobWindows(plan, LocalHosts(["a"]), condition)
    jobs = []
    for name, ends in ends_s.items():
        run = RunDirectory.create(tmp_path / name, "job", [], 0)
        watch, model = Watch(run.path, NETWORK, 10**9, 0), replace(plan.models[0], title=name)
        jobs.append(MeasuredJob(model, NETWORK, run, watch, Made(run, ends), ["a"], []))
    found.jobs = jobs
    return found


def no_tick(_: float) -> None:
    """Show no progress."""


def test_a_window_has_whole_iterations_of_every_job(tmp_path: Path) -> None:
    windows = windows_of(tmp_path, Condition(), fast=every(0.03), slow=every(0.11))
    span = windows.window(WINDOW, no_tick)
    fast, slow = (job.ends_ns(span) for job in windows.jobs)
    assert span.start_ns in (fast[0], slow[0])
    assert span.end_ns in (fast[-1], slow[-1])
    assert span.iterations == len(slow) - 1 >= WINDOW.min_iterations
    assert len(fast) > len(slow)
    assert (span.end_ns - span.start_ns) / S >= WINDOW.min_s


def test_iterations_that_another_job_cuts_off_are_not_counted(tmp_path: Path) -> None:
    """Both jobs have ended more than enough of them, but not at the same time."""
    windows = windows_of(tmp_path, Condition(), early=every(0.1, 0.6), late=[0.55 + end_s for end_s in every(0.1)])
    with pytest.raises(MeasurementError, match=r"^early ended no two iterations in 1 s that all jobs have in common: "):
        windows.window(WINDOW, no_tick)


@pytest.mark.parametrize("others", [{}, {"goes": every(0.05)}])
def test_a_job_that_stops_gives_no_window_alone_or_beside_another(
    others: dict[str, Sequence[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watcher, "_LOG_DELAY_S", 0.2)
    windows = windows_of(tmp_path, Condition(), **others, stops=[0.15, 0.2, 0.25])
    with pytest.raises(MeasurementError, match=r"^stops ended no iteration for 1 s, where the longest .* 0.05 s: "):
        windows.window(WINDOW, no_tick)


def test_an_iteration_that_is_too_long_says_what_to_raise(tmp_path: Path) -> None:
    windows = windows_of(tmp_path, Condition(), slow=[0.5, 9.0])
    with pytest.raises(MeasurementError, match=r"^slow ended no two iterations in 1 s: raise window.max_time$"):
        windows.window(WINDOW, no_tick)
    assert MeasurementError.exit_code == 1


def test_a_job_that_makes_no_iterations_has_not_warmed_up(tmp_path: Path) -> None:
    windows = windows_of(tmp_path, Condition(), works=every(0.01), waits=[9.0])
    with pytest.raises(MeasurementError, match=r"^waits made 0 iterations in 0.2 s, too few to warm up: does it step"):
        windows.wait_for_iterations(1)


class Cut(Condition):
    """A condition that does not hold in its first windows."""

    def __init__(self, times: int) -> None:
        self._times, self.calls = times, list[str]()

    def begin(self, attempt: int) -> None:
        self.calls.append(f"begin {attempt}")

    def record(self, record: dict[str, Any], tick: Callable[[float], None]) -> None:
        record["packets"] = 7
        tick(0.0)

    def end(self) -> None:
        self.calls.append("end")

    def examine(self, record: dict[str, Any]) -> None:
        if self.calls.count("end") <= self._times:
            record["cut"].append("a link was cut")


@pytest.mark.parametrize(("times", "made"), [(0, 1), (1, 2), (9, 3)])
def test_a_disturbed_window_is_measured_again_and_the_best_is_kept(times: int, made: int, tmp_path: Path) -> None:
    condition = Cut(times)
    windows = windows_of(tmp_path, condition, fast=every(0.03), slow=every(0.05))
    *rejected, (kept, is_kept) = windows.measure(no_tick)
    assert condition.calls == [word for number in range(made) for word in (f"begin {number}", "end")]
    assert [(record["why"], one) for record, one in rejected] == [("a link was cut", False)] * (made - 1)
    assert is_kept
    assert kept["packets"] == 7
    assert kept["cut"] == (["a link was cut"] if times == 9 else [])
    assert kept["ended"] == "enough"
    for record, one in rejected:
        assert remarks("x", record, is_kept=one) == ["x: measured again: a link was cut"]
    assert remarks("x", kept, is_kept=True) == [f"warning: x: {words}" for words in kept["cut"]]


def test_windows_before_a_failure_are_not_lost(tmp_path: Path) -> None:
    class Ends(Cut):
        def check(self) -> None:
            if "begin 1" in self.calls:
                raise MeasurementError("the sender ended early")

    condition = Ends(9)
    windows = windows_of(tmp_path, condition, fast=every(0.03))
    records = windows.measure(no_tick)
    record, is_kept = next(records)
    assert (record["why"], is_kept) == ("a link was cut", False)
    with pytest.raises(MeasurementError, match="the sender ended early"):
        next(records)
    assert condition.calls[-1] == "end", "the condition ends with the failure"


def test_a_window_waits_until_the_mean_is_known(tmp_path: Path) -> None:
    asked: list[int] = []

    def is_known(ends_ns: Sequence[int]) -> bool:
        asked.append(len(ends_ns))
        return len(asked) > 2

    span = windows_of(tmp_path, Condition(), fast=every(0.03)).window(WINDOW, no_tick, is_known)
    assert isinstance(span, WindowSpan)
    assert len(asked) == 3
    assert asked[0] > WINDOW.min_iterations
