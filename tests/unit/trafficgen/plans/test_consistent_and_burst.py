"""Algorithms 1 and 2: exact bytes, Poisson starts, bursts, and the same plan for the same seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from ringtap.core.errors import UsageError
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH
from tests.unit.web_plans import PlanSpec, web_plan

pytestmark = [pytest.mark.computes, pytest.mark.long]

MS = 1_000_000
TO = ("10.0.0.1:5001",)
CONSISTENT = PlanSpec("consistent", 150e6, 20_000 * MS, TO, seed=1, scale=100)
BURST = PlanSpec("burst", 200e6, 2_000 * MS, TO, seed=1, scale=100)


def test_consistent_has_the_flows_and_bytes_of_algorithm_1() -> None:
    flows = list(web_plan(CONSISTENT).flows())
    assert len(flows) == int(150e6 * 20 / 8 / 17_112.5)
    assert sum(flow.size_bytes for flow in flows) == 375_000_000


def test_consistent_gaps_are_exponential() -> None:
    starts = np.array([flow.start_ns for flow in web_plan(CONSISTENT).flows()])
    gaps = np.diff(starts)
    assert stats.kstest(gaps, stats.expon(scale=20e9 / len(starts)).cdf).pvalue > 0.01
    counts = np.histogram(starts, bins=2000, range=(0, 20e9))[0]
    assert 0.9 < counts.var() / counts.mean() < 1.1
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("seed", range(5))
def test_consistent_starts_are_a_poisson_process(seed: int) -> None:
    """Given their number, its starts are independent and even: by Kolmogorov-Smirnov, and by counts in equal parts."""
    starts = np.array([flow.start_ns for flow in web_plan(replace(CONSISTENT, seed=seed)).flows()])
    assert stats.kstest(starts, stats.uniform(0, 20e9).cdf).pvalue > 0.01
    counts = np.histogram(starts, bins=1000, range=(0, 20e9))[0]
    assert stats.chisquare(counts).pvalue > 0.01
    # Counts of 22 on average against the Poisson distribution's, in classes of 100 expected parts
    edges = stats.poisson(counts.mean()).ppf(np.linspace(0, 1, 11)[1:-1])
    shares = np.diff([0, *stats.poisson(counts.mean()).cdf(edges), 1])
    classes = np.bincount(np.searchsorted(edges, counts), minlength=10)
    assert stats.chisquare(classes, shares * 1000).pvalue > 0.01


def test_consistent_sizes_keep_the_shape_of_the_distribution() -> None:
    plan = web_plan(CONSISTENT)
    sizes = np.array([flow.size_bytes for flow in plan.flows()]) / plan.header["size_factor"] * 100
    points, shares = zip(*WEB_SEARCH.points, strict=True)
    assert stats.kstest(sizes, lambda x: np.interp(x, points, shares)).pvalue > 0.01
    assert plan.header["size_factor"] == pytest.approx(1, abs=0.1)


def test_no_part_of_a_consistent_plan_is_favoured() -> None:
    thirds = np.zeros(3)
    for seed in range(20):
        spec = replace(CONSISTENT, seed=seed, duration_ns=3_000 * MS)
        for flow in web_plan(spec).flows():
            thirds[flow.start_ns // (1_000 * MS)] += flow.size_bytes
    assert thirds / thirds.mean() == pytest.approx([1, 1, 1], abs=0.06)


def test_each_burst_is_two_flows_with_three_tenths_of_its_period() -> None:
    periods: dict[int, list[list[int]]] = {}
    for flow in web_plan(BURST).flows():
        period, within = divmod(flow.start_ns, 10 * MS)
        periods.setdefault(period, [[], []])[within >= MS].append(flow.size_bytes)
    assert len(periods) == 200
    for burst, quiet in periods.values():
        assert (len(burst), sum(burst)) == (2, 75_000)
        assert len(quiet) == int(175_000 / 17_112.5)
        assert sum(quiet) == 175_000


def test_a_quiet_part_has_eight_flows_even_when_mean_sizes_would_give_fewer() -> None:
    flows = list(web_plan(replace(BURST, load_bps=50e6)).flows())
    assert len(flows) == 200 * (2 + 8)
    first = [flow.size_bytes for flow in flows if flow.start_ns < 10 * MS]
    assert sum(first) == 62_500
    assert sum(first[:2]) == 18_750


def test_burst_splits_are_normal_around_a_half() -> None:
    flows = [
        flow for flow in web_plan(replace(BURST, duration_ns=20_000 * MS)).flows() if flow.start_ns % (10 * MS) < MS
    ]
    shares = [first.size_bytes / 75_000 for first in flows[::2]]
    assert stats.kstest(shares, stats.truncnorm(-3, 3, 0.5, 1 / 6).cdf).pvalue > 0.01


def crossed_bytes(spec: PlanSpec, link_bps: float) -> tuple[np.ndarray, np.ndarray]:
    """What crosses a link in each burst and each quiet part of a plan, when flows queue for it in turn."""
    times, sent, busy_until = [0.0], [0], 0.0
    for flow in web_plan(spec).flows():
        if flow.start_ns > busy_until:
            times.append(flow.start_ns)
            sent.append(sent[-1])
            busy_until = flow.start_ns
        busy_until += flow.size_bytes * 8e9 / link_bps
        times.append(busy_until)
        sent.append(sent[-1] + flow.size_bytes)
    edges = [edge for start_ns in range(0, spec.duration_ns, 10 * MS) for edge in (start_ns, start_ns + MS)]
    parts = np.diff(np.interp([*edges, spec.duration_ns], times, sent))
    return parts[::2], parts[1::2]


def test_bursts_and_quiet_parts_cross_a_fast_link_as_planned() -> None:
    """A burst's flows have half of it to cross, so twice its rate suffices; quiet parts' 14 times the load."""
    for scale in (1, 100):
        burst, quiet = crossed_bytes(replace(BURST, scale=scale), 14.001 * BURST.load_bps)
        assert burst == pytest.approx(75_000, rel=1e-9)
        assert quiet == pytest.approx(175_000, rel=1e-9)


def test_most_of_them_cross_as_planned_at_a_fifth_of_the_links_rate() -> None:
    burst, quiet = crossed_bytes(BURST, 5 * BURST.load_bps)
    assert np.mean(np.abs(burst / 75_000 - 1)) < 0.05
    assert np.mean(np.abs(quiet / 175_000 - 1)) < 0.05


def test_bursts_start_in_their_first_half_and_quiet_parts_end_early() -> None:
    within = np.array([flow.start_ns % (10 * MS) for flow in web_plan(BURST).flows()])
    assert within[within < MS].max() < MS / 2
    assert within.max() < 9.5 * MS
    # And are even there
    assert stats.kstest(within[within < MS], stats.uniform(0, MS / 2).cdf).pvalue > 0.01
    assert stats.kstest(within[within >= MS], stats.uniform(MS, 8.5 * MS).cdf).pvalue > 0.01


def test_height_length_and_period_are_the_plans_own() -> None:
    spec = replace(BURST, burst_height=1.5, burst_length_ns=5 * MS, burst_period_ns=20 * MS)
    bursts = sum(flow.size_bytes for flow in web_plan(spec).flows() if flow.start_ns % (20 * MS) < 5 * MS)
    assert bursts == 50_000_000 * 1.5 * 5 / 20


def test_a_last_period_that_does_not_fit_is_smaller_and_of_the_same_shape() -> None:
    flows = [flow for flow in web_plan(replace(BURST, duration_ns=15 * MS)).flows() if flow.start_ns >= 10 * MS]
    burst = [flow for flow in flows if flow.start_ns < 10.5 * MS]
    assert sum(flow.size_bytes for flow in burst) == 37_500
    assert len(burst) == 2
    assert sum(flow.size_bytes for flow in flows) == 125_000


def parts_of(spec: PlanSpec) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that start in each burst and in each quiet part."""
    parts = np.zeros((-(-spec.duration_ns // spec.burst_period_ns), 2), np.int64)
    for flow in web_plan(spec).flows():
        period, within = divmod(flow.start_ns, spec.burst_period_ns)
        parts[period, int(within >= spec.burst_length_ns)] += flow.size_bytes
    return parts[:, 0], parts[:, 1]


def test_quiet_parts_with_one_budget_together_vary_as_their_sizes_do() -> None:
    spec = replace(BURST, duration_ns=20_000 * MS, quiet_budget="together")
    burst, quiet = parts_of(spec)
    assert set(burst) == {75_000}
    assert quiet.sum() == 2000 * 175_000
    # ten flows in each: the spread of their sum is that of one size over the root of ten
    one = np.array([flow.size_bytes for flow in web_plan(replace(CONSISTENT, duration_ns=60_000 * MS)).flows()])
    expected = one.std() / one.mean() / np.sqrt(10)
    assert quiet.std() / quiet.mean() == pytest.approx(expected, rel=0.1)
    assert abs(np.corrcoef(quiet[:-1], quiet[1:])[0, 1]) < 0.05


def test_a_shortened_last_period_has_its_own_budget_when_quiet_parts_share_theirs() -> None:
    burst, quiet = parts_of(replace(BURST, duration_ns=2_005 * MS, quiet_budget="together"))
    assert burst[-1] + quiet[-1] == 125_000
    assert quiet[:-1].sum() == 200 * 175_000


def test_more_destinations_leave_starts_and_sizes_as_they_are() -> None:
    one = list(web_plan(BURST).flows())
    two = list(web_plan(replace(BURST, destinations=("a:1", "b:2"))).flows())
    assert [(flow.start_ns, flow.size_bytes) for flow in one] == [(flow.start_ns, flow.size_bytes) for flow in two]
    to_a = sum(flow.destination == "a:1" for flow in two)
    assert to_a == pytest.approx(len(two) / 2, rel=0.1)


def test_sources_leave_starts_sizes_and_destinations_as_they_are() -> None:
    one = list(web_plan(BURST).flows())
    two = list(web_plan(replace(BURST, sources=("s", "t"))).flows())
    assert one == [flow._replace(source="") for flow in two]
    assert sum(flow.source == "s" for flow in two) == pytest.approx(len(two) / 2, rel=0.1)


def test_a_plan_can_be_walked_twice_and_another_seed_is_another_plan() -> None:
    plan = web_plan(BURST)
    assert list(plan.flows()) == list(plan.flows())
    assert list(web_plan(replace(BURST, seed=2)).flows()) != list(plan.flows())


def test_starts_are_sorted() -> None:
    for spec in (CONSISTENT, BURST):
        assert all(low.start_ns <= high.start_ns for low, high in pairwise(web_plan(spec).flows()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_bps": 0}, "load"),
        ({"load_bps": -1}, "load"),
        ({"load_bps": float("nan")}, "load"),
        ({"load_bps": 1}, "ask for more load"),
        ({"duration_ns": 0}, "duration"),
        ({"scale": 0}, "scale"),
        ({"seed": -1}, "seed"),
        ({"destinations": ()}, "--to"),
        ({"destinations": ("host",)}, "HOST:PORT"),
        ({"destinations": ("host:0",)}, "port 0"),
        ({"destinations": ("a:1", "a:1")}, "twice"),
        ({"burst_length_ns": 10 * MS}, "shorter"),
        ({"burst_height": 10.0}, "--burst-height"),
        ({"burst_height": -1.0}, "--burst-height"),
        ({"burst_height": float("nan")}, "--burst-height"),
        ({"burst_height": 1e-9}, "ask for"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        web_plan(replace(BURST, **change))  # type: ignore[arg-type]
