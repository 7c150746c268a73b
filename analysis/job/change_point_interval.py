"""Finds the iterations between which a cause began, and ended, with 95 % confidence.

Where a value shows the cause, such as how late a rank is, the interval has all iterations whose likelihood as the
change point is not much below the best one's (Hansen, Econometrica 68, 2000). Where a cause comes now and then, such as
stalls, it may have begun before it was first seen: the interval has so many iterations without it as chance explains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # the live view has no pandas
    from ringtap.analysis.job.iteration_budget import Mask
    from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers

_CHANCE = 0.05
# twice the difference of the logarithms of two likelihoods is above this with a probability of 5 % if both are right
_LIKELIHOOD_RATIO = 7.35
# a cause that is in fewer iterations says nothing about those in which it was not seen
_MIN_SEEN = 3
# successive iterations depend on each other; more than this is not noise but a change
_MAX_CORRELATION = 0.8


class Iterations(NamedTuple):
    """The first and the last of some iterations."""

    first: int
    last: int


def begin_of(affected: Mask, values: Numbers | None) -> Iterations | None:
    """Return the iterations of which one is the first with a cause.

    Args:
        affected: the iterations in which the cause was found.
        values: of each iteration, what is larger with the cause; None: only ``affected`` tells it.

    Returns:
        None: the cause is there from the first iteration on, or came too rarely to tell.
    """
    where = np.flatnonzero(affected)
    if len(where) < _MIN_SEEN or where[0] == 0:
        return None
    first = int(where[0])
    if values is None:
        return Iterations(max(first - _unseen(where) - 1, 0), first)
    after = first + int(affected[first:].argmin()) if not affected[first:].all() else len(affected)
    score = _scores(values, affected)[:after]
    # the logarithm of the likelihood that the cause begins at an iteration, but for a constant
    likelihood = score[::-1].cumsum()[::-1]
    near = np.flatnonzero(likelihood >= likelihood.max() - _LIKELIHOOD_RATIO / 2)
    # a cause that begins in mid-iteration may show little in it
    return Iterations(max(min(int(near[0]), first) - 1, 0), max(int(near[-1]), first))


def end_of(affected: Mask, values: Numbers | None) -> Iterations | None:
    """Return the iterations of which one is the last with a cause; arguments and result are as of `begin_of`."""
    found = begin_of(affected[::-1], None if values is None else values[::-1])
    return found and Iterations(len(affected) - 1 - found.last, len(affected) - 1 - found.first)


def deviation(rest: Numbers) -> float:
    """Return the standard deviation of noise around 0, from the median, which a few other values do not change."""
    return 1.4826 * float(np.median(np.abs(rest)))


def independent_share(rest: Numbers) -> float:
    """Return how many independent values say as much as these do, which follow each other, as a share of them.

    Args:
        rest: what the values differ from the mean that they should have.
    """
    most = 3 * deviation(rest)
    spread = np.clip(rest, -most, most)
    squares = float((spread**2).mean())
    related = float((spread[1:] * spread[:-1]).mean()) / squares if squares > 0 else 0.0
    correlation = min(max(related, 0.0), _MAX_CORRELATION)
    return (1 - correlation) / (1 + correlation)


def _unseen(where: Integers) -> int:
    """Return for how many iterations chance explains that a cause that was there was not seen.

    How often it comes is known from as many gaps only: the chance of a longer gap than g in a Poisson process of which
    n gaps took t in all is (1 + g / t) to the power of -n.
    """
    gaps, length = len(where) - 1, int(where[-1] - where[0])
    return 0 if gaps == length else math.ceil(length * (_CHANCE ** (-1 / gaps) - 1))


def _scores(values: Numbers, affected: Mask) -> Numbers:
    """Return for each iteration by how much the cause makes its value more likely, as a logarithm."""
    with_s, without_s = float(np.median(values[affected])), float(np.median(values[~affected]))
    step = with_s - without_s
    rest = values - np.where(affected, with_s, without_s)
    variance = max(deviation(rest[rows]) for rows in (affected, ~affected)) ** 2
    if step <= 0 or variance == 0:
        return np.where(affected, _LIKELIHOOD_RATIO, -_LIKELIHOOD_RATIO)
    variance /= independent_share(rest)
    scores: Numbers = np.clip(values - (with_s + without_s) / 2, -step, step) * step / variance
    return scores
