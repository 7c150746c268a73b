"""Jobs that share links: their circles, scores and time shifts, and ``ringtap schedule``."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.workload.collectives import Shape, message_graph
from ringtap.workload.commands.schedule import read_job, read_link
from ringtap.workload.interleaving import (
    MAX_SLOTS,
    Circles,
    InterleavedLink,
    PeriodicJob,
    Phase,
    affinity_edges,
    draw_circles,
    interleave,
    place,
    schedule,
    score_with,
    simulated_job,
    slowdown,
    time_shifts,
    worst_shifts,
)
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.model_workloads import model_workload
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.simulation import Simulation
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, check_workload, write_workload

pytestmark = [pytest.mark.computes, pytest.mark.long]

FULL = 50e9


def job(period_ms: int, *phases: tuple[int, int], rate_bps: float = FULL) -> PeriodicJob:
    made = tuple(Phase(begin * 10**6, end * 10**6, rate_bps) for begin, end in phases)
    return PeriodicJob("job", period_ms * 10**6, made)


def score(rates: list[list[float]], shifts: tuple[int, ...], capacity_bps: float) -> float:
    """The definition, slot by slot."""
    slots = math.lcm(*map(len, rates))
    demand = [
        sum(rate[(slot - shift) % len(rate)] for rate, shift in zip(rates, shifts, strict=True))
        for slot in range(slots)
    ]
    return 1 - sum(max(0.0, each - capacity_bps) for each in demand) / (slots * capacity_bps)


def test_worked_values_of_cassini() -> None:
    circles = draw_circles([job(40, (30, 40)), job(60, (50, 60))])
    assert (circles.slots, circles.quantum_s) == (12, 0.01)
    found = interleave(circles.rates_bps, FULL)
    assert (found.score_unshifted, found.score, found.shifts) == (pytest.approx(0.91667, abs=1e-5), 1.0, (0, 1))
    circles = draw_circles([job(100, (0, 60)), job(100, (0, 60))])
    assert circles.slots * circles.quantum_s == pytest.approx(0.1)
    found = interleave(circles.rates_bps, FULL)
    assert (found.score_unshifted, found.score) == (pytest.approx(0.4), pytest.approx(0.8))
    assert found.shifts[1] * circles.quantum_s == pytest.approx(0.04)
    assert (found.search, found.optimal) == ("exhaustive", True)


RATES = st.lists(st.sampled_from([0.0, 10.0, 25.0, 40.0]), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(RATES, RATES)
def test_two_jobs_as_brute_force(one: list[float], other: list[float]) -> None:
    found = interleave([np.array(one), np.array(other)], 40.0)
    scores = [score([one, other], (0, shift), 40.0) for shift in range(len(other))]
    assert found.score == pytest.approx(max(scores))
    assert found.score_unshifted == pytest.approx(scores[0])
    assert found.shifts == (0, next(shift for shift, each in enumerate(scores) if each > max(scores) - 1e-9))
    circles = Circles(1.0, (np.array(one), np.array(other)), (0.0, 0.0))
    worst = next(shift for shift, each in enumerate(scores) if each < min(scores) + 1e-9)
    assert worst_shifts(circles, [InterleavedLink("link", 40.0, (0, 1))]) == (0, worst)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 20.0, 40.0]), min_size=2, max_size=5), min_size=3, max_size=3))
def test_three_jobs_as_brute_force(rates: list[list[float]]) -> None:
    found = interleave([np.array(rate) for rate in rates], 40.0)
    every = itertools.product([0], *(range(len(rate)) for rate in rates[1:]))
    assert found.optimal
    assert found.score == pytest.approx(max(score(rates, shifts, 40.0) for shifts in every))
    assert found.score == pytest.approx(score(rates, found.shifts, 40.0))


def test_six_jobs_by_descent() -> None:
    circles = draw_circles([job(100, (0, 20))] * 5 + [job(100, (0, 13))])
    found = interleave(circles.rates_bps, FULL)
    assert found.search.startswith("coordinate descent from ")
    assert (found.score_unshifted, found.score, found.optimal) == (pytest.approx(0.07), pytest.approx(0.87), True)
    assert found.score == pytest.approx(score([rate.tolist() for rate in circles.rates_bps], found.shifts, FULL))


def test_jobs_that_need_no_shift() -> None:
    found = interleave(draw_circles([job(30, (0, 20), rate_bps=20e9)] * 2).rates_bps, FULL)
    assert (found.shifts, found.score, found.search, found.optimal) == ((0, 0), 1.0, "not needed", True)


def test_periods_without_a_common_multiple_are_quantised() -> None:
    jobs = [
        PeriodicJob("a", 314_159_265, (Phase(0, 100_000_003, 40e9),)),
        PeriodicJob("b", 271_828_182, (Phase(1, 50_000_000, 30e9),)),
    ]
    circles = draw_circles(jobs)
    assert circles.slots <= MAX_SLOTS
    for one, rate, error in zip(jobs, circles.rates_bps, circles.period_errors, strict=True):
        assert len(rate) * circles.quantum_s * 1e9 / one.period_ns - 1 == pytest.approx(error, abs=1e-12)
        assert abs(error) < 0.003
        (begin, end, rate_bps), = one.phases  # fmt: skip
        assert rate.mean() == pytest.approx((end - begin) * rate_bps / one.period_ns)  # no byte is lost
    with pytest.raises(UsageError, match="do not fit on one circle of 5,040 slots within 5%"):
        draw_circles([job(1, (0, 1)), job(3_600_000, (0, 1))])


def two_links() -> tuple[Circles, list[InterleavedLink]]:
    """Jobs 0 and 1 on link a, 1 and 2 on link b, each half of the time, with periods of 4, 4 and 8 slots."""
    circles = draw_circles([job(40, (0, 20)), job(40, (0, 20)), job(80, (0, 20))])
    return circles, [InterleavedLink("a", FULL, (0, 1)), InterleavedLink("b", FULL, (1, 2))]


def test_shifts_along_the_affinity_graph() -> None:
    circles, links = two_links()
    found = schedule(circles, links)
    # on a, job 1 starts 20 ms after job 0; on b, job 2 starts 20 ms after job 1
    assert [each.shifts for each in found.interleavings] == [(0, 1), (0, 1)]
    assert (circles.quantum_s, found.shifts) == (0.02, (0, 1, 2))
    assert (found.score, found.score_unshifted) == (1.0, pytest.approx((0.5 + 0.75) / 2))
    edges = affinity_edges(links, 3)
    assert edges == [(0, 0, 1), (1, 1, 2)]
    assert worst_shifts(circles, links) == (0, 0, 0), "all at once on both"
    backward = [InterleavedLink("b", FULL, (1, 2)), InterleavedLink("a", FULL, (0, 1))]
    assert schedule(circles, backward).shifts == found.shifts
    assert time_shifts(circles, links, found.interleavings, edges) == found.shifts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 40.0]), min_size=2, max_size=6), min_size=4, max_size=4))
def test_shifts_of_a_graph_keep_the_score_of_each_link(rates: list[list[float]]) -> None:
    links = [
        InterleavedLink("a", 40.0, (0, 2)),
        InterleavedLink("b", 40.0, (1, 2, 3)),
        InterleavedLink("c", 40.0, (1,)),
    ]
    found = schedule(Circles(1.0, tuple(map(np.array, rates)), (0.0,) * 4), links)
    for link, each in zip(links, found.interleavings, strict=True):
        shifts = tuple(found.shifts[number] for number in link.jobs)
        assert score([rates[number] for number in link.jobs], shifts, 40.0) == pytest.approx(each.score)


@pytest.mark.parametrize(
    ("links", "loop"),
    [
        ([("a", (0, 1)), ("b", (0, 1))], "job 0 - b - job 1 - a - job 0"),
        ([("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2))], "job 0 - a - job 1 - b - job 2 - c - job 0"),
        ([("a", (0, 1, 2)), ("b", (1, 2))], "a - job 1 - b - job 2 - a"),
    ],
)
def test_loops_are_named(links: list[tuple[str, tuple[int, ...]]], loop: str) -> None:
    with pytest.raises(UsageError, match="the affinity graph has the loop") as caught:
        affinity_edges([InterleavedLink(name, FULL, jobs) for name, jobs in links], 3)
    assert loop in str(caught.value)


def test_placement_puts_together_what_fits() -> None:
    # two jobs that send 60 % of the time and two that send 40 %: one of each per link
    circles = draw_circles([job(100, (0, 60)), job(100, (0, 60)), job(100, (0, 40)), job(100, (0, 40))])
    found = place(circles, FULL, 2)
    assert sorted(len(link.jobs) for link in found.links) == [2, 2]
    assert {0, 1} not in [set(link.jobs) for link in found.links]
    assert (found.score, found.score_unshifted) == (1.0, pytest.approx(0.6))
    assert [link.jobs for link in place(circles, FULL, 6).links] == [(0,), (1,), (2,), (3,), (), ()]


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("all_reduce", ["ring", "double-tree", "parameter-server"])
def test_phases_of_a_workload_have_its_bytes(all_reduce: str, per_host: int, lowered: bool) -> None:
    workload, algorithms = model_workload(PROFILES["vgg16"], 4), Algorithms(all_reduce)
    if lowered:
        workload, algorithms = lower(workload, algorithms), Algorithms()
        check_workload(workload)  # puts nodes in order
    found = simulated_job(workload, "w", algorithms, 10e9, per_host)
    network = star(-(-(workload.ranks + algorithms.others) // per_host), 10e9)
    simulated = simulate(workload, network, algorithms, iterations=5, ranks_per_host=per_host)
    assert found.period_ns == pytest.approx(1e9 * simulated.iteration_s, rel=1e-6)
    size_bytes = sum((phase.end_ns - phase.begin_ns) * phase.rate_bps for phase in found.phases) / 8e9
    assert size_bytes == pytest.approx(simulated.link_bytes[network.hosts], rel=1e-6)
    assert all(0 < phase.rate_bps <= 10e9 * (1 + 1e-6) for phase in found.phases)
    ends = [0, *(time_ns for phase in found.phases for time_ns in phase[:2]), found.period_ns]
    assert ends == sorted(ends)


def simulated_together(shift_s: float) -> list[float]:
    """Iteration times of two jobs on two hosts of 10 Gbit/s: 60 ms of computation, then 50 MB each way."""
    simulation = Simulation(star(2, 10e9))
    ring = simulation.place(message_graph("ring", Shape(2, 1 << 20)), [0, 1])
    ends: list[list[int]] = [[], []]
    for number in (0, 1):
        last = [simulation.compute(number * shift_s)] * 2
        for _ in range(5):
            collective = simulation.collective(ring, 50e6)
            last = [simulation.part(collective, worker, [simulation.compute(0.06, last[worker])]) for worker in (0, 1)]
            ends[number].append(last[0])
    end_s = simulation.run().end_s
    return [float(np.diff(end_s[each]).mean()) for each in ends]


def test_shifts_make_simulated_jobs_as_fast_as_alone() -> None:
    circles = draw_circles([job(100, (60, 100), rate_bps=10e9)] * 2)
    found = interleave(circles.rates_bps, 10e9)
    shift_s = found.shifts[1] * circles.quantum_s
    assert (found.score_unshifted, found.score, shift_s) == (pytest.approx(0.6), 1.0, pytest.approx(0.04))
    assert simulated_together(0.0) == pytest.approx([0.14, 0.14])
    assert simulated_together(shift_s) == pytest.approx([0.1, 0.1])


def test_a_workload_without_messages_is_refused() -> None:
    with pytest.raises(UsageError, match="sends nothing"):
        simulated_job(model_workload(PROFILES["vgg16"], 1), "w", Algorithms(), 10e9, 1)


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["schedule", *map(str, arguments)]) == code
    done = capsys.readouterr()
    if not code:
        return done.out
    assert done.err.startswith("ringtap: ")
    assert done.err.count("\n") == 1
    return done.err


PAIR = ("--job", "100ms:0ms-60ms@50gbit", "--job", "100ms:0ms-60ms@50gbit")


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, *PAIR, "--capacity", "50gbit", "--figure", tmp_path / "circles.svg")
    assert text.startswith("Partially compatible: score 0.8 with shifts of 0, 40 ms, 0.4 without\n")
    assert "Circle of 100 ms in 5 slots of 20 ms; periods are exact" in text
    assert "\nScores of links: 1 if jobs never need more than the capacity, less by the share of it" in text
    assert "job 1" not in text
    assert (tmp_path / "circles.svg").read_text().startswith("<?xml")
    found = json.loads(
        run(
            capsys, "--job", "40ms:30ms-40ms@50gbit", "--job", "60ms:50ms-60ms@50gbit", "--capacity", "50gbit", "--json"
        )
    )
    assert (found["perimeter_ms"], found["quantum_ms"], found["slots"]) == (120, 10, 12)
    assert (found["score_unshifted"], found["score"]) == (pytest.approx(0.91667, abs=1e-5), 1)
    assert found["shifts_ms"] == [0, 10]
    placed = json.loads(run(capsys, *PAIR, "--capacity", "50gbit", "--links", 2, "--json"))
    assert ([link["jobs"] for link in placed["links"]], placed["score"]) == ([[0], [1]], 1)
    links = ("--link", "$up^=50gbit:1,0", "--link", "down=25gbit:1")
    shared = json.loads(run(capsys, *PAIR, *links, "--figure", tmp_path / "links.png", "--json"))
    assert [(link["name"], link["jobs"]) for link in shared["links"]] == [("$up^", [0, 1]), ("down", [1])]
    assert [link["score"] for link in shared["links"]] == [pytest.approx(0.8), pytest.approx(0.4)]


def test_workloads_as_jobs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_workload(model_workload(PROFILES["vgg16"], 4), tmp_path / "w")
    found = json.loads(run(capsys, tmp_path / "w", tmp_path / "w", "--capacity", "25gbit", "--json"))
    assert found["score_unshifted"] < found["score"] <= 1
    assert [each["name"] for each in found["jobs"]] == [str(tmp_path / "w")] * 2
    write_workload(Workload([[]]), tmp_path / "empty")
    assert "takes no time" in run(capsys, tmp_path / "w", tmp_path / "empty", "--capacity", "25gbit", code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (PAIR, "the capacity of the link is missing"),
        ((*PAIR, "--links", 2), "the capacity of the link is missing"),
        ((*PAIR[:2], "--capacity", "50gbit"), "1 job given: give 2 to 6"),
        ((*(PAIR * 4), "--capacity", "50gbit"), "8 jobs given: give 2 to 6"),
        ((*PAIR, "--capacity", "0gbit"), "is not above 0"),
        ((*PAIR, "--capacity", "50"), "write a number and a unit"),
        ((*PAIR, "--capacity", "50gbit", "--link", "a=50gbit:0,1"), "give one of them"),
        ((*PAIR, "--capacity", "50gbit", "--links", 0), "--links 0 is outside 1 to 6"),
        ((*PAIR, "--capacity", "50gbit", "--links", "two"), "is not a whole number"),
        ((*PAIR, "--capacity", "50gbit", "--figure", "circles.txt"), "circles.txt is no picture"),
        ((*PAIR, "--link", "a=50gbit:0,2"), "--link a has job 2, but there are jobs 0 to 1"),
        ((*PAIR, "--link", "a=50gbit:0,-1"), "--link a has job -1"),
        ((*PAIR, "--link", "a=50gbit:0,0"), "--link a names a job twice"),
        ((*PAIR, "--link", "a=50gbit:0"), "job 1 is on no link"),
        ((*PAIR, "--link", "a:0,1"), "is not NAME=RATE:JOB"),
        ((*PAIR, "--link", "a=50gbit:0,1", "--link", "a=50gbit:1"), "different names"),
        ((*PAIR, "--link", "a=50gbit:0,1", "--link", "b=50gbit:0,1"), "has the loop"),
        (("w", *PAIR, "--capacity", "50gbit"), "w is not a directory"),
    ],
)
def test_wrong_calls(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], says: str) -> None:
    assert says in run(capsys, *arguments, code=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0ms:0ms-60ms@50gbit", "the period is 0"),
        ("0.1ns:0ms-60ms@50gbit", "the period is 0"),
        ("100:0ms-60ms@50gbit", "write a number and a unit"),
        ("100ms:0-60ms@50gbit", "write a number and a unit"),
        ("100ms:0ms-60ms@50", "write a number and a unit"),
        ("100ms:0ms-60ms@0gbit", "is not above 0"),
        ("100ms:0ms-60ms@1e7gbit", "is not above 0"),
        ("100ms:0ms-110ms@50gbit", "is not within the period"),
        ("100ms:60ms-60ms@50gbit", "is not within the period"),
        ("100ms:0ms-60ms@50gbit,50ms-70ms@50gbit", "after the phase before"),
        ("100ms", "is not START-END@RATE"),
        ("100ms:0ms-60ms", "is not START-END@RATE"),
        ("1e300s:0ms-60ms@50gbit", "is longer than 3,600 s"),
        ("100ms:" + ",".join(f"{i}us-{i + 1}us@1gbit" for i in range(1001)), "1,001 phases"),
    ],
)
def test_wrong_jobs(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_job(text)


@settings(deadline=None)
@given(st.text("0123456789.:-,@=emsgbit \0é", max_size=40))
def test_damaged_text_is_refused_or_read(text: str) -> None:
    for read in (read_job, lambda text: read_link(text, 3), lambda text: read_job(f"100ms:0ms-{text}@1gbit")):
        try:
            read(text)
        except UsageError as error:
            assert str(error)


def test_many_phases_end() -> None:
    phases = [(3 * i, 3 * i + 1 + i % 2) for i in range(900)]
    circles = draw_circles([job(2749, *phases), job(2753, *phases), job(2767, *phases)])
    begin_s = time.monotonic()
    assert interleave(circles.rates_bps, FULL).score > 0
    assert time.monotonic() - begin_s < 100


def circles_of(*texts: str) -> Circles:
    return draw_circles([read_job(text) for text in texts])


@pytest.mark.parametrize(
    ("texts", "shift_ms", "factor"),
    [
        # as the simulation of docs/commands/schedule.md: 140 ms if they begin together, 100 ms apart
        (("100ms:60ms-100ms@50gbit",) * 2, 0, 1.4),
        (("100ms:60ms-100ms@50gbit",) * 2, 40, 1.0),
        # what exceeds the capacity is sent before the iteration ends
        (("100ms:10ms-50ms@50gbit",) * 2, 0, 1.0),
        # 120 ms of communication do not fit into 100 ms, whatever the shift is
        (("100ms:0ms-60ms@50gbit",) * 2, 40, 1.2),
        # the longer job communicates when the shorter one does not
        (("100ms:0ms-20ms@50gbit", "200ms:180ms-200ms@50gbit"), 0, 1.0),
    ],
)
def test_jobs_become_longer_by_what_waits_at_the_end(texts: tuple[str, ...], shift_ms: int, factor: float) -> None:
    circles = circles_of(*texts)
    shifts = (0, round(shift_ms / 1e3 / circles.quantum_s))
    assert slowdown(circles, shifts, 50e9) == pytest.approx(factor)


@given(
    st.lists(st.lists(st.floats(0, 2), min_size=12, max_size=12), min_size=2, max_size=3),
    st.lists(st.integers(0, 11), min_size=3, max_size=3),
)
def test_a_slowdown_lies_between_the_load_and_all_one_after_another(
    rates: list[list[float]], shifts: list[int]
) -> None:
    circles = Circles(0.01, tuple(np.array(each) for each in rates), (0.0,) * len(rates))
    load = sum(map(sum, rates)) / 12
    found = slowdown(circles, shifts[: len(rates)], 1.0)
    assert max(1.0, load) - 1e-9 <= found <= 1 + load + 1e-9
    if score_with(shifts[: len(rates)], circles.rates_bps, 1.0) == 1:
        assert found == 1
