"""Jobs on a link that a rule divides: how they slide, priorities, and ``ringtap schedule --sharing``."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.workload.crux_scheduling import (
    choose_paths,
    gpu_intensity_flop_per_s,
    priority_levels,
    random_paths_flop_per_s,
)
from ringtap.workload.fluid_sharing_model import (
    MLTCP,
    Share,
    divide_links,
    mltcp_shift_s,
    share_link,
    share_paths,
)
from ringtap.workload.interleaving import PeriodicJob, Phase

pytestmark = [pytest.mark.computes, pytest.mark.long]

CAPACITY = 50e9
MS = 10**6


def job(period_ms: int, *phases: tuple[int, int], rate_bps: float = CAPACITY) -> PeriodicJob:
    return PeriodicJob("job", period_ms * MS, tuple(Phase(begin * MS, end * MS, rate_bps) for begin, end in phases))


def test_worked_values_of_mltcp() -> None:
    offset, found = 5.0, []
    for _ in range(3):
        offset += mltcp_shift_s(offset, 50.0)
        found.append(offset)
    assert found == [pytest.approx(23.529, abs=1e-3), pytest.approx(43.836, abs=1e-3), pytest.approx(49.136, abs=1e-3)]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 45), st.floats(0.5, 3.0), st.floats(0.1, 1.0))
def test_jobs_slide_as_the_equation_of_mltcp_says(offset_ms: int, slope: float, intercept: float) -> None:
    jobs, share = [job(100, (50, 100))] * 2, Share(intercept, slope)
    one, other = share_link(jobs, [share] * 2, [0.0, offset_ms / 1e3], CAPACITY, 6)
    offset_s = offset_ms / 1e3
    for found_s in (other.begin_s - one.begin_s)[1:]:
        offset_s += mltcp_shift_s(offset_s, 0.05, share)
        assert found_s == pytest.approx(offset_s, rel=1e-3)


def test_fair_shares_keep_jobs_where_they_are() -> None:
    jobs = [job(100, (60, 100))] * 2
    for offset_s, time_s in ((0.0, 0.14), (0.01, 0.13), (0.04, 0.1)):
        found = share_link(jobs, [Share()] * 2, [0.0, offset_s], CAPACITY, 50)
        assert all(run.iteration_s[1:] == pytest.approx(time_s) for run in found)
        assert found[1].begin_s - found[0].begin_s == pytest.approx(offset_s)


def test_unequal_weights_and_priorities_part_jobs() -> None:
    jobs = [job(100, (60, 100))] * 2
    heavy, light = share_link(jobs, [Share(2.0), Share(1.0)], [0.0, 0.0], CAPACITY, 30)
    # two thirds of the link for 60 ms; then the other one sends the half that is left alone
    assert (heavy.iteration_s[0], light.iteration_s[0]) == (pytest.approx(0.12), pytest.approx(0.14))
    assert heavy.iteration_s[-1] == pytest.approx(0.1) == light.iteration_s[-1]
    first, second = share_link(jobs, [Share(priority=1), Share()], [0.0, 0.0], CAPACITY, 5)
    assert first.iteration_s == pytest.approx(0.1)
    assert second.iteration_s == pytest.approx([0.14, 0.1, 0.1, 0.1, 0.1])
    assert second.sent_s[:2] == pytest.approx([0.08, 0.04])


def test_jobs_with_room_for_all_are_not_slowed_and_several_phases_count() -> None:
    jobs = [job(50, (0, 10), (20, 30), rate_bps=20e9), job(80, (5, 65), rate_bps=30e9)]
    found = share_link(jobs, [MLTCP] * 2, [0.0, 0.0], CAPACITY, 20)
    assert found[0].iteration_s == pytest.approx(0.05)
    assert found[1].iteration_s == pytest.approx(0.08)
    assert found[0].sent_s == pytest.approx(0.03)


SENDERS = st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 10), st.integers(0, 2)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(SENDERS)
def test_a_link_is_divided_without_a_rest(senders: list[tuple[float, float, int]]) -> None:
    wanted, weights, priorities = map(list, zip(*senders, strict=True))
    rates = np.array(divide_links([(100.0, range(len(wanted)))], wanted, weights, priorities))
    assert rates.sum() == pytest.approx(min(100.0, sum(wanted)))
    assert (rates <= np.array(wanted) + 1e-9).all()
    for number, (want, weight, priority) in enumerate(senders):
        if rates[number] < want - 1e-6:  # nobody beside it has a larger share, and nobody below anything
            for other, (_, other_weight, other_priority) in enumerate(senders):
                if other_priority == priority:
                    assert rates[other] / other_weight <= rates[number] / weight + 1e-6
                elif other_priority < priority:
                    assert rates[other] == pytest.approx(0.0, abs=1e-6)


def test_several_links_are_divided_by_their_slowest_part() -> None:
    links = [(10.0, (0, 1)), (4.0, (1, 2))]
    assert divide_links(links, [20.0] * 3, [1.0] * 3, [0] * 3) == pytest.approx([8.0, 2.0, 2.0])
    assert divide_links(links, [20.0] * 3, [1.0] * 3, [0, 1, 0]) == pytest.approx([6.0, 4.0, 0.0])
    assert divide_links(links, [1.0, 20.0, 20.0], [1.0, 3.0, 1.0], [0] * 3) == pytest.approx([1.0, 3.0, 1.0])
    assert divide_links([], [5.0, 6.0], [1.0, 1.0], [0, 1]) == pytest.approx([5.0, 6.0])


@given(st.lists(SENDERS.map(lambda senders: senders[0]), min_size=1, max_size=5), st.data())
def test_no_sender_of_several_links_can_have_more(senders: list[tuple[float, float, int]], data: st.DataObject) -> None:
    wanted, weights, priorities = map(list, zip(*senders, strict=True))
    members = st.sets(st.integers(0, len(senders) - 1), min_size=1).map(sorted)
    links = data.draw(st.lists(st.tuples(st.floats(1.0, 100.0), members), max_size=4))
    rates = divide_links(links, wanted, weights, priorities)
    for capacity, numbers in links:
        assert sum(rates[number] for number in numbers) <= capacity + 1e-6
    for number, want in enumerate(wanted):
        # it has what it wants, or a full link in which no sender of its priority has a larger share, or any of a lower
        assert rates[number] >= want - 1e-6 or any(
            number in numbers
            and sum(rates[other] for other in numbers) >= capacity - 1e-6
            and all(
                rates[other] <= 1e-6
                if priorities[other] < priorities[number]
                else priorities[other] > priorities[number]
                or rates[other] / weights[other] <= rates[number] / weights[number] + 1e-6
                for other in numbers
            )
            for capacity, numbers in links
        )


TWO = ["schedule", *["--job", "100ms:0ms-40ms@50gbit"] * 2, "--capacity", "50gbit"]


def test_the_command_says_what_sharing_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--sharing", "mltcp", "--start", "0ms,5ms", "--iterations", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sharing"]
    assert (found["rule"], found["iterations"], found["starts_ms"]) == ("mltcp", 20, [0.0, 5.0])
    assert found["alone_ms"] == pytest.approx([100.0, 100.0])
    assert [each["last_ms"] for each in found["unshifted"]] == pytest.approx([100.0, 100.0], rel=1e-3)
    assert [each["mean_ms"] for each in found["shifted"]] == pytest.approx([100.0, 100.0])
    assert all(len(each["begin_ms"]) == 21 for each in found["unshifted"])
    assert main([*TWO, "--sharing", "fair"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["1", "100", "140", "140", "140", "100"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(1, 5))
def test_levels_lose_least_of_all(intensities: list[float], levels: int) -> None:
    def kept(found: tuple[int, ...]) -> float:
        pairs = itertools.combinations(sorted(zip(intensities, found, strict=True)), 2)
        return sum(high[0] if high[1] > low[1] else 0.0 if high[1] == low[1] else -100.0 for low, high in pairs)

    found = priority_levels(intensities, levels)
    assert max(found) < levels
    assert sorted(set(found)) == list(range(max(found) + 1))
    every = itertools.product(range(min(levels, len(intensities))), repeat=len(intensities))
    assert kept(tuple(found)) == pytest.approx(max(map(kept, every)))


def test_crux_lets_the_job_with_the_higher_gpu_intensity_go_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_intensity_flop_per_s(8e12, job(100, (60, 100), rate_bps=25e9), CAPACITY) == pytest.approx(4e14)
    # together they want more than the link has, so that priorities decide
    jobs = ["--job", "100ms:0ms-40ms@50gbit", "--job", "50ms:0ms-40ms@50gbit"]
    words = ["schedule", *jobs, "--capacity", "50gbit", "--sharing", "crux", "--flop", "9e12,1e12", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["sharing"]
    assert found["priorities"] == [1, 0]
    assert found["gpu_intensity_flop_per_s"] == pytest.approx([2.25e14, 2.5e13])
    assert found["unshifted"][0]["mean_ms"] == pytest.approx(found["alone_ms"][0])
    expected = sum(1e3 * flop / each["mean_ms"] for flop, each in zip((9e12, 1e12), found["unshifted"], strict=True))
    assert found["crux_flop_per_s"] == pytest.approx(expected)
    assert found["crux_flop_per_s"] > found["fair_flop_per_s"]


def test_crux_spreads_jobs_over_links(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for end in (60, 60, 40, 40) for word in ("--job", f"100ms:0ms-{end}ms@50gbit")]
    words += ["--capacity", "50gbit", "--links", "2", "--sharing", "crux", "--flop", "9e12,8e12,2e12,1e12"]
    assert main(["schedule", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sharing"]
    # the most intense job has the first link, the next one the other; the third joins the lower load of the first two
    assert (found["paths"], found["priorities"]) == ([0, 1, 0, 1], [3, 2, 1, 0])
    assert [each["last_ms"] for each in found["unshifted"]] == pytest.approx([100.0] * 4)
    assert "shifted" not in found
    assert main(["schedule", *words]) == 0
    assert "compared with fair shares of random links" in capsys.readouterr().out


def test_mean_throughput_on_random_paths_is_that_over_all_placements() -> None:
    jobs, flop, starts_s = [job(100, (60, 100)), job(100, (40, 100)), job(50, (20, 50))], [3.0, 2.0, 1.0], [0.0] * 3
    rates = []
    for paths in itertools.product(range(2), repeat=3):
        runs = share_paths(jobs, paths, [Share()] * 3, starts_s, CAPACITY, 10)
        rates.append(sum(each / run.iteration_s.mean() for each, run in zip(flop, runs, strict=True)))
    assert random_paths_flop_per_s(jobs, flop, starts_s, CAPACITY, 10, 2) == pytest.approx(np.mean(rates))
    assert choose_paths([1.0, 3.0, 2.0], jobs, 2) == [0, 0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sharing", "x"], "'x' is not fair, mltcp, weights=2,1, priorities=1,0 or crux"),
        (["--sharing", "weights=1"], "needs weights of 2 jobs"),
        (["--sharing", "weights=0,1"], "weights of at least 1"),
        (["--sharing", "priorities=a,1"], "priorities"),
        (["--start", "0ms,1ms"], "are for --sharing: add a rule"),
        (["--sharing", "crux"], "needs the --flop of each job"),
        (["--sharing", "fair", "--levels", "2"], "no other rule has --flop or --levels"),
        (["--sharing", "crux", "--flop", "1,x"], "is not a number above 0 for each of 2 jobs"),
        (["--sharing", "crux", "--flop", "1,2", "--levels", "7"], "outside 1 to 6"),
        (["--sharing", "fair", "--start", "1ms"], "there are 2 jobs"),
        (["--sharing", "fair", "--iterations", "0"], "outside 1 to 1,000"),
        (["--sharing", "fair", "--links", "2"], "one link of all jobs"),
    ],
)
def test_wrong_rules_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, *words]) == 2
    assert said in capsys.readouterr().err
