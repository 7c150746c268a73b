"""The random draws that plans need, and sums that come out to the byte.

Every draw is an inverse transform of ``random.Random.random()``, the one method whose sequence Python promises to
keep for a seed, so a seed gives the same plan on every Python version. What needs the sum of many draws walks the same
draws twice instead of keeping them, so a plan of any length takes no memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Literal

Draw = Callable[[], float]
# Weights are draws in 1/256, so that small sizes keep their shape in integer arithmetic
_WEIGHT = 256
# Up to so many draws are kept; below that, remembering the generator's state would cost more than the draws
_KEPT = 512
_PURPOSES = ("gaps", "sizes", "destinations", "sources")


def stream(seed: int, purpose: Literal["gaps", "sizes", "destinations", "sources"]) -> random.Random:
    """A generator for each purpose, so that more destinations leave sizes and starts as they are."""
    return random.Random(len(_PURPOSES) * seed + _PURPOSES.index(purpose))


def exponential(rng: random.Random) -> float:
    """Draw from the exponential distribution with mean 1."""
    return -math.log1p(-rng.random())


def exponentials(rng: random.Random) -> Draw:
    """What draws from the exponential distribution with mean 1."""
    uniform, log1p = rng.random, math.log1p
    return lambda: -log1p(-uniform())


def normal_share(rng: random.Random, mean: float, deviation: float) -> float:
    """Draw from a normal distribution restricted to the open interval (0, 1), by Box-Muller and drawing again."""
    while True:
        radius = math.sqrt(2.0 * exponential(rng))
        share = mean + deviation * radius * math.cos(2.0 * math.pi * rng.random())
        if 0.0 < share < 1.0:
            return share


def again(rng: random.Random, draw: Draw, count: int) -> Callable[[], Iterator[float]]:
    """The next ``count`` draws, from the first one whenever the result is called.

    Nothing else may draw from ``rng`` until they have been walked for the last time.
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
    """Starts of a Poisson process given its number of arrivals: exponential gaps, fitted to a stretch of time.

    One gap more than flows is drawn, and all are divided by their sum: the n starts are then distributed as those of
    a Poisson process that had n arrivals in the stretch.

    Args:
        rng: where the draws come from.
        start_ns: begin of the stretch.
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
    """Sizes in proportion to draws, at least 1 byte each, with exactly the sum asked for.

    Args:
        rng: where ``draw`` draws from.
        draw: gives a size of 0 or more.
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
