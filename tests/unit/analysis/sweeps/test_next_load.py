"""Loads chosen by the measurement: where they lie, when they end, and what a run directory tells."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import signal, special

from ringtap.analysis.model.congestion_point import CURVED_SHARE
from ringtap.analysis.model.congestion_point_on_curve import find_curve_point, place
from ringtap.analysis.report.findings import overview
from ringtap.analysis.statistics.mean_errors import independent_counts, mean_errors, relative_error
from ringtap.analysis.sweeps.next_load import Aims, Choice, Measured, choose, main
from ringtap.analysis.sweeps.sweep import open_sweep
from tests.gold.analysis_sweep import edit_info, write_sweep

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

FIRST = (0.0, 0.35, 0.57, 0.72, 0.82, 0.88)
AIMS = Aims(
    capacity_gbps=25, first=FIRST, interval_gbps=1, mean=0.05, budget_s=1200, settle_s=3, min_s=4, min_iterations=10,
    max_s=15,
)  # fmt: skip
# ResNet-50 over TCP under consistent traffic (thesis, Table 3.9)
A, B = 0.0645, 3.311


def true_s(load_gbps: float) -> float:
    return A * math.exp(B / (25 - load_gbps) ** 0.5)


def window(asked: float, draw: np.random.Generator, spread: float = 0.1, curve=true_s) -> Measured:
    mean = curve(asked * 25)
    times = mean * np.exp(spread * draw.normal(size=max(10, round(4 / mean))))
    return Measured(asked, asked * 25, times, 3 + float(times.sum()))


def loads_of(aims: Aims, spread: float, seed: int = 0, most: int = 400, **kinds: object) -> tuple[list[Measured], str]:
    """Measure what is chosen until it stops."""
    draw, windows = np.random.default_rng(seed), []
    while (choice := choose(windows, aims)).load is not None:
        assert len(windows) < most
        windows.append(window(choice.load, draw, spread, **kinds))  # type: ignore[arg-type]
    return windows, choice.stop


def test_the_curve_point_is_where_the_two_lines_of_the_construction_meet() -> None:
    """The same lines, drawn by other means on a dense grid of the true curve."""
    b = B / 5
    steep = np.linspace(0, 0.95, 200_001) * 25
    times = A * np.exp(B / np.sqrt(25 - steep))
    elasticity = 0.5 * B / np.sqrt(25 - steep)
    start = int(np.flatnonzero(elasticity >= elasticity[0] + CURVED_SHARE * (1 - elasticity[0]))[0])
    slope, level = np.polyfit(steep[:start], times[:start], 1)
    tangent = (times[start + 1] - times[start]) / (steep[start + 1] - steep[start])
    meeting = (times[start] - tangent * steep[start] - level) / (slope - tangent)
    assert 25 * -math.expm1(-place(b, 0.5)) == pytest.approx(meeting, abs=1e-3)
    assert place(2.0, 0.5) == 0, "from no load on the time grows as fast as the bandwidth shrinks"


def test_its_interval_contains_the_truth_and_narrows_with_the_points() -> None:
    truth, loads = 25 * -math.expm1(-place(B / 5, 0.5)), np.linspace(0, 0.9, 12) * 25
    draw, halves = np.random.default_rng(3), {}
    for repeats in (4, 16):
        load = np.repeat(loads, repeats)
        found = []
        for _ in range(40):
            times = A * np.exp(B / np.sqrt(25 - load)) * np.exp(0.03 * draw.normal(size=len(load)))
            point = find_curve_point(load, times, 25, spread_s=0.03 * times).point
            assert point is not None
            found.append((point.low_gbps <= truth <= point.high_gbps, point.half_width_gbps))
        covered, halves[repeats] = np.mean([hit for hit, _ in found]), np.median([half for _, half in found])
        assert covered >= 0.85, "40 draws of 95 %: fewer than 34 happen once in 500"
    # curves with a corner stay close to a smooth one, so that it narrows less than with the root of the points
    assert halves[16] < 0.9 * halves[4]


@pytest.mark.parametrize(
    ("times", "why"),
    [
        (np.full(7, 0.3), "does not measurably grow"),
        (0.3 / (1 - np.linspace(0, 0.8, 7)) ** 1.2, "no flat region"),
        (0.3 * np.exp(0.02 * np.linspace(0, 0.8, 7)), "beyond the heaviest load"),
    ],
)
def test_there_is_no_curve_point_and_the_reason_says_why(times: np.ndarray, why: str) -> None:
    load = np.linspace(0, 20, 7)
    noise = np.exp(1e-3 * np.random.default_rng(1).normal(size=7))
    found = find_curve_point(load, times * noise, 25)
    assert found.point is None
    assert why in found.reason
    few = find_curve_point(load[:4], times[:4], 25)
    assert few.reason == "fewer than 5 different loads cannot place it"
    assert few.is_open


@pytest.mark.parametrize("at", [0.08, 0.4, 0.88])
def test_a_window_is_expected_to_narrow_the_point_as_windows_do(at: float) -> None:
    loads, expected, real = np.array(FIRST) * 25, 0.0, 0.0
    for seed in range(12):
        draw = np.random.default_rng(seed)
        times = np.array([true_s(load) * math.exp(0.02 * draw.normal()) for load in loads])
        curves = find_curve_point(loads, times, 25, spread_s=0.02 * times).curves
        assert curves is not None
        for time in (curves.time_s(at), *(true_s(25 * at) * math.exp(0.02 * draw.normal()) for _ in range(3))):
            more = np.append(times, time)
            after = find_curve_point(np.append(loads, 25 * at), more, 25, spread_s=0.02 * more).curves
            assert after is not None
            if time == curves.time_s(at):
                expected += after.variance / curves.variance / 12
            else:
                real += after.variance / curves.variance / 36
    # 0.53, 0.90 and 0.91 against 0.57, 0.89 and 1.03: what a window shows is not what was expected
    assert expected == pytest.approx(real, abs=0.15)


def test_few_iterations_that_agree_by_chance_are_not_believed() -> None:
    draw = np.random.default_rng(5)
    windows = [np.exp(0.2 * draw.normal(size=40)) for _ in range(8)]
    loads = np.linspace(0, 20, 9)
    chance = np.array([1.0, 1.001])
    errors = mean_errors(loads, 25, [*windows, chance])
    assert relative_error(chance) < 0.001
    assert 0.06 < errors[-1] < 0.3, "0.2 over the root of 2 is 0.14"
    assert errors[:8] == pytest.approx([relative_error(one) for one in windows], rel=0.15), "40 against 4 degrees"
    assert mean_errors([5.0], 25, [np.array([1.0])]) == [1.0], "a single iteration tells nothing"


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("count", [10, 20, 60])
def test_short_windows_share_their_correlation(count: int, correlation: float) -> None:
    """At least 90 % of the intervals of means hold the true one, less three standard errors, of 8 windows each."""
    draw, held, trials = np.random.default_rng([count, 4]), 0, 300
    for _ in range(trials):
        noise = draw.normal(size=(8, count + 50)) * math.sqrt(1 - correlation**2)
        windows = list(np.exp(0.2 * signal.lfilter([1.0], [1.0, -correlation], noise)[:, 50:]))
        of_first, first = independent_counts(windows)[0], windows[0]
        reach = special.stdtrit(max(of_first - 1, 1), 0.975) * first.std(ddof=1) / math.sqrt(of_first)
        held += abs(first.mean() - math.exp(0.02)) <= reach
    assert held / trials >= 0.90 - 3 * math.sqrt(0.9 * 0.1 / trials)
    if correlation == 0.0:
        assert held / trials <= 0.985, "no wider than needed"
    assert list(independent_counts([np.ones(5), np.ones(1)])) == [5.0, 1.0]


def test_the_first_pass_comes_first_and_then_loads_that_narrow_the_point() -> None:
    windows, stop = loads_of(AIMS, 0.1)
    asked = [one.asked for one in windows]
    assert tuple(asked[:6]) == FIRST
    assert stop == "the targets are reached"
    # of 88 candidates, those near the point, and light ones for the level of the flat line
    point = -math.expm1(-place(B / 5, 0.5))
    added = asked[6:12]
    near = [load for load in added if abs(load - point) <= 0.2]
    assert len(near) >= len(added) / 2 > 0, added
    assert all(load in near or load <= 0.2 for load in added), added
    # the same windows give the same loads
    assert [one.asked for one in loads_of(AIMS, 0.1)[0]] == asked


def test_it_stops_at_the_target_and_names_what_it_knows() -> None:
    windows, stop = loads_of(AIMS, 0.02)
    assert (len(windows), stop) == (7, "the targets are reached")
    known = choose(windows, AIMS).known
    assert known.startswith("congestion point ")
    assert "±" in known
    assert "worse" not in known


def test_uncertain_means_are_measured_longer_once_the_point_is_known() -> None:
    draw = np.random.default_rng(2)
    windows = [window(load, draw, 0.02) for load in FIRST[:-1]]
    windows.append(window(FIRST[-1], draw, 0.5))
    choice = choose(windows, replace(AIMS, interval_gbps=5))
    assert choice.load == FIRST[-1]
    assert "means known worse than 5% at 22.0 Gbit/s" in choice.known


def test_the_budget_ends_it_before_a_window_that_it_has_no_room_for() -> None:
    for budget_s in (30, 60, 120):
        windows, stop = loads_of(replace(AIMS, interval_gbps=0.01, budget_s=budget_s), 0.2)
        assert stop == f"the budget of {budget_s} s is spent"
        # a window may take longer than expected, by the longest one at most
        assert sum(one.spent_s for one in windows) <= budget_s + max(one.spent_s for one in windows)


def test_windows_that_were_measured_again_spend_the_budget_and_leave_its_name() -> None:
    choice = choose(loads_of(AIMS, 0.02)[0][:3], replace(AIMS, budget_s=60), lost_s=55)
    assert choice == Choice(None, "", "the budget of 60 s is spent")


def test_a_series_that_does_not_slow_down_ends_and_says_so() -> None:
    windows, stop = loads_of(AIMS, 0.02, curve=lambda load: 0.3)
    assert stop == "more loads would not show one"
    assert len({one.asked for one in windows}) == 10
    assert (
        "no congestion point was found, because the iteration time does not measurably grow"
        in choose(windows, AIMS).known
    )


@settings(max_examples=12, deadline=None)
@example(0.5, -0.125, 2.0, FIRST, 0)  # no curve has a point
@given(
    st.floats(0.001, 0.6),
    st.floats(-0.5, 3.0),
    st.floats(0.1, 3.0),
    st.sampled_from([FIRST, (0.0, 0.02, 0.04, 0.06, 0.08, 0.1)]),
    st.integers(0, 5),
)
def test_whatever_is_measured_it_stops_within_its_loads_and_its_budget(spread, steep, power, first, seed):
    aims = replace(AIMS, first=first, budget_s=60, min_s=2)
    curve = lambda load: 0.2 * math.exp(steep * ((1 - load / 25) ** -power - 1) / 8)  # noqa: E731
    windows, stop = loads_of(aims, spread, seed, most=60 // 5 + 1, curve=lambda load: min(max(curve(load), 0.01), 5.0))
    assert stop
    assert all(0 <= one.asked <= first[-1] for one in windows)
    assert sum(one.spent_s for one in windows[:-1]) <= 60
    for load in {one.asked for one in windows}:
        of_load = [one for one in windows if one.asked == load]
        assert len(of_load) <= 60 / aims.settle_s


@pytest.fixture
def chosen_run(tmp_path: Path) -> Path:
    """A sweep's run directory whose plan chooses loads."""
    path = tmp_path / "run"
    write_sweep(path, [("resnet50", "consistent")])
    plan = json.loads((path / "run.json").read_text())["plan"] | {
        "loads": [0.0, 0.315, 0.88],  # two that are measured, and one that is not
        "auto": {"target_interval_gbps": 1.0, "target_mean": 0.05, "budget_s": 6000.0},
        "window": {"settle_s": 1.0, "min_s": 2.0, "min_iterations": 5, "max_s": 9.0},
    }
    edit_info(path, plan=plan)
    return path


def ask(path: Path, *questions: dict[str, object]) -> list[dict[str, object]]:
    lines = "".join(f"{json.dumps(question)}\n" for question in questions)
    command = [sys.executable, "-m", "ringtap.analysis.sweeps.next_load", str(path)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_process_answers_by_the_run_directory_alone(
    chosen_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask_here(question: dict[str, object]) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["next_load", str(chosen_run)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(question)))
        main()
        return dict(json.loads(capsys.readouterr().out))

    name = {"series": "resnet50-consistent"}
    missing, new, mean = ask(chosen_run, name, {"series": "vgg16-burst"}, {"iteration_s": [1.0, 1.1, 0.9]})
    assert missing == {"load": 0.88, "known": "", "stop": ""}
    assert new == {"load": 0.0, "known": "", "stop": ""}
    assert mean["error"] == pytest.approx(0.1 / math.sqrt(3))
    plan = json.loads((chosen_run / "run.json").read_text())["plan"]
    edit_info(chosen_run, plan=plan | {"loads": [0.0, 0.315, 0.84]})
    known = ask_here(name)
    assert str(known["known"]).startswith("congestion point ")
    lines = (chosen_run / "points.jsonl").read_text().splitlines()
    # windows that were measured again count for the budget
    (chosen_run / "rejected.jsonl").write_text("\n".join(lines * 300))
    spent = ask_here(name)
    assert spent["load"] is None
    assert "budget of" in str(spent["stop"])
    edit_info(chosen_run, bottleneck={})
    assert "has no load or no iteration: cross traffic: run.json names no counter" in str(ask_here(name))
    (chosen_run / "run.json").write_text("{")
    assert "run.json" in str(ask_here(name)["problem"])


def test_a_report_leads_with_the_point_that_the_loads_were_chosen_for(chosen_run: Path) -> None:
    (series,) = open_sweep(chosen_run)
    (row,) = overview([series])
    point = series.curve.point
    assert point is not None
    assert point.weighted
    assert row["congestion"]["bandwidth_gbps"] == point.bandwidth_gbps
    assert series.to_json()["curve_point"]["low_gbps"] == point.low_gbps
