"""Samplers over random seeds and shapes: sums, means and quantiles against the exact ones; CDF files read back."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringtap.trafficgen.plans.sampling import shares_of
from ringtap.trafficgen.plans.size_distributions import (
    WORKLOADS,
    SizeDistribution,
    empirical_points,
    parse_sizes,
    read_cdf,
    write_cdf,
)
from tests.unit.size_quantiles import quantile_bytes

pytestmark = [pytest.mark.computes, pytest.mark.long]

SAMPLE = 20_000
# Five standard errors: chance exceeds them once in 1.7 million, and only fixed examples are tried
ERRORS = 5
draws = st.integers(0, 2**53 - 1).map(lambda number: number / 2**53)  # as of random()
texts = st.one_of(
    st.sampled_from(sorted(WORKLOADS)),
    st.integers(1, 10**9).map(lambda size: f"fixed:{size}"),
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda pair: f"uniform:{pair[0]}:{sum(pair)}"),
    st.tuples(st.integers(100, 10**7), st.floats(0.1, 1.0)).map(lambda pair: f"lognormal:{pair[0]}:{pair[1]}"),
    # A variance, and a fourth moment for its error, only above 4
    st.tuples(st.integers(100, 10**7), st.floats(4.5, 20)).map(lambda pair: f"pareto:{pair[0]}:{pair[1]}"),
)


@given(text=texts, seed=st.integers(0, 2**64))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_means_are_the_exact_ones(text: str, seed: int) -> None:
    sizes = parse_sizes(text)
    draw = sizes.sampler(random.Random(seed))
    sample = np.array([draw() for _ in range(SAMPLE)])
    assert abs(sample.mean() - sizes.mean_bytes) <= ERRORS * sample.std() / math.sqrt(SAMPLE) + 1e-9 * sizes.mean_bytes


@given(text=texts, seed=st.integers(0, 2**64), share=st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_quantiles_are_the_exact_ones(text: str, seed: int, share: float) -> None:
    """As many draws lie below the exact quantile as its share says, within a binomial's error."""
    sizes = parse_sizes(text)
    draw, quantile = sizes.sampler(random.Random(seed)), quantile_bytes(sizes, share)
    below = sum(draw() <= quantile * (1 + 1e-12) for _ in range(SAMPLE))
    assert text.startswith("fixed:") or abs(below / SAMPLE - share) < ERRORS * math.sqrt(share * (1 - share) / SAMPLE)


@given(text=texts, low=draws, high=draws, factor=st.floats(0.001, 1000))
@settings(max_examples=100, deadline=None)
def test_quantiles_rise_and_scale(text: str, low: float, high: float, factor: float) -> None:
    sizes = parse_sizes(text)
    low, high = sorted((low, high))
    assert quantile_bytes(sizes, low) <= quantile_bytes(sizes, high) * (1 + 1e-12)
    scaled = quantile_bytes(sizes.scaled(factor), low)
    assert math.isclose(scaled, quantile_bytes(sizes, low) * factor, rel_tol=1e-9, abs_tol=1e-6)


@given(text=texts, seed=st.integers(0, 2**64), count=st.integers(1, 1500), more=st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_sizes_add_up_to_the_byte(text: str, seed: int, count: int, more: int) -> None:
    rng = random.Random(seed)
    sizes = list(shares_of(rng, parse_sizes(text).sampler(rng), count, count + more))
    assert (len(sizes), sum(sizes)) == (count, count + more)
    assert min(sizes) >= 1
    # Whatever came first, the next draw is the one after these
    other = random.Random(seed)
    draw = parse_sizes(text).sampler(other)
    for _ in range(count):
        draw()
    assert rng.random() == other.random()


@st.composite
def cdfs(draw: st.DrawFn) -> list[tuple[float, float]]:
    shares = sorted(draw(st.sets(st.integers(1, 999), max_size=10)))
    sizes = sorted(draw(st.lists(st.integers(1, 10**12), min_size=len(shares) + 1, max_size=len(shares) + 1)))
    return [(float(size), share / 1000) for size, share in zip(sizes, [*shares, 1000], strict=True)]


@given(points=cdfs(), percent=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cdf_files_read_back(points: list[tuple[float, float]], percent: bool, tmp_path: Path) -> None:
    path = tmp_path / "cdf.txt"
    write_cdf(SizeDistribution("x", points).points, path, force=True)
    assert read_cdf(path).points == SizeDistribution("x", points).points
    if percent:
        path.write_text("".join(f"{size:.0f}  {round(share * 1000)}e-1\n" for size, share in points))
        assert read_cdf(path).points == SizeDistribution("x", points).points


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=3000))
@settings(max_examples=60, deadline=None)
def test_the_cdf_of_flows_is_theirs(sizes: list[int]) -> None:
    cdf = SizeDistribution("x", empirical_points(sizes))
    ordered, steps = sorted(sizes), min(1000, len(sizes))
    for step in range(1, steps + 1):
        share = step / steps
        assert math.isclose(quantile_bytes(cdf, share), ordered[len(ordered) * step // steps - 1], rel_tol=1e-12)
