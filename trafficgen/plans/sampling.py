"""Draws random samples for plans, and sizes whose sum is exact to the byte.

Every sample is an inverse transform of ``random.Random.random()``, the one method whose sequence Python promises to
keep for a seed, so a seed gives the same plan on every Python version. Functions that need the sum of many samples
generate them twice instead of keeping them, so memory does not grow with the plan's length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Literal

Draw = Callable[[], float]
# Weights are samples in units of 1/256, so that small sizes keep their proportions in integer arithmetic
_WEIGHT = 256
# Up to this many samples are kept, because saving the generator's state would cost more
_KEPT = 512
_PURPOSES = ("gaps", "sizes", "destinations", "sources")


def stream(seed: int, purpose: Literal["gaps", "sizes", "destinations", "sources"]) -> random.Random:
    """Return the generator of one purpose; each has its own, so that adding a destination keeps sizes and starts."""
    return random.Random(len(_PURPOSES) * seed + _PURPOSES.index(purpose))


def exponential(rng: random.Random) -> float:
    """Draw from the exponential distribution with mean 1."""
    return -math.log1p(-rng.random())


def exponentials(rng: random.Random) -> Draw:
    """Return a function that draws from the exponential distribution with mean 1."""
    uniform, log1p = rng.random, math.log1p
    return lambda: -log1p(-uniform())


def normal_share(rng: random.Random, mean: float, deviation: float) -> float:
    """Draw from a normal distribution restricted to the open interval (0, 1), by Box-Muller and rejection."""
    while True:
        radius = math.sqrt(2.0 * exponential(rng))
        share = mean + deviation * radius * math.cos(2.0 * math.pi * rng.random())
        if 0.0 < share < 1.0:
            return share


def again(rng: random.Random, draw: Draw, count: int) -> Callable[[], Iterator[float]]:
    """Return a function that iterates over the next ``count`` samples, from the first one on every call.

    Nothing else may draw from ``rng`` until the last iteration has ended.
    """
    if count <= _KEPT:
        kept = [draw() for _ in range(count)]
        return lambda: iter(kept)
    state = rng.getstate()

    def walk() -> Iterator[float]:
        rng.setstate(state)
        return (draw() for _ in range(count))

    return walk


def arrivals(rng: random.Random, start_ns: int, length_ns: int, count: int) -> Iterator[int]:
    """Yield the starts of a Poisson process given its number of arrivals: exponential gaps, scaled to an interval.

    It draws one more gap than there are starts and divides all by their sum. The n starts are then distributed like
    those of a Poisson process with n arrivals in the interval.

    Args:
        rng: the random generator.
        start_ns: start of the interval.
        length_ns: its length.
        count: number of starts.
    """
    draw = exponentials(rng)
    closing = draw()
    gaps = again(rng, draw, count)
    # fsum: the built-in sum rounds differently from Python 3.12 on
    total = math.fsum(gaps()) + closing
    passed, last_ns = 0.0, length_ns - 1
    for gap in gaps():
        passed += gap
        yield start_ns + min(last_ns, int(length_ns * (passed / total)))


def shares_of(rng: random.Random, draw: Draw, count: int, size_bytes: int) -> Iterator[int]:
    """Yield sizes in proportion to samples, at least 1 byte each, with exactly the requested sum.

    Args:
        rng: generator that ``draw`` uses.
        draw: returns a size of 0 or more.
        count: number of sizes.
        size_bytes: their sum, at least ``count``.
    """
    drawn = again(rng, draw, count)
    total = sum(1 + int(size * _WEIGHT) for size in drawn())
    spare, passed, before = size_bytes - count, 0, 0
    for size in drawn():
        passed += 1 + int(size * _WEIGHT)
        upto = spare * passed // total
        yield 1 + upto - before
        before = upto
