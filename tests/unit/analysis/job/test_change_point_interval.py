"""The interval of iterations in which a cause began or ended holds the truth in 95 % of simulated jobs."""

import numpy as np
import pytest

from ringtap.analysis.job.change_point_interval import Iterations, begin_of, end_of
from ringtap.analysis.job.iteration_budget import SLOW_RANK, SLOWER_NETWORK, NetworkEvidence, RankTimes, split

pytestmark = [pytest.mark.computes, pytest.mark.together]
COUNT, RANKS = 130, 3


def related(random, shape, correlation):
    """Noise of one standard deviation whose successive values depend on each other."""
    noise = random.normal(size=shape)
    for row in range(1, shape[0]):
        noise[row] = correlation * noise[row - 1] + np.sqrt(1 - correlation**2) * noise[row]
    return noise


@pytest.mark.parametrize(
    ("name", "correlation", "step_s", "most"),
    [
        *((SLOW_RANK, 0.0, 0.03, 3), (SLOW_RANK, 0.0, 0.0075, 16), (SLOW_RANK, 0.3, 0.0075, 24)),
        # what nothing explains is found from three standard deviations on
        *((SLOWER_NETWORK, 0.0, 0.03, 3), (SLOWER_NETWORK, 0.0, 0.015, 3), (SLOWER_NETWORK, 0.3, 0.015, 4)),
    ],
)
def test_it_holds_the_truth_and_is_short_where_the_step_is_clear(name, correlation, step_s, most):
    """An iteration takes 150 ms, with noise of 4 ms; ``most`` is the bound of the median length of intervals."""
    random, hits, lengths = np.random.default_rng(5), [], []
    for _ in range(100):
        begin, end = int(random.integers(15, 50)), int(random.integers(65, 110))
        work_s = 0.1 + 0.004 * related(random, (COUNT, RANKS), correlation)
        network_s = 0.05 + 0.004 * related(random, (COUNT, 1), correlation)
        (work_s[:, 1] if name == SLOW_RANK else network_s[:, 0])[begin:end] += step_s
        iteration_s = np.repeat(work_s.max(axis=1, keepdims=True) + network_s, RANKS, axis=1)
        none = np.zeros_like(work_s)
        exposed_s, mean_s = iteration_s - work_s, float(iteration_s[:, 0].mean())
        times = RankTimes(np.arange(RANKS), iteration_s, exposed_s, work_s, none, none, mean_s)
        for share in split(times, NetworkEvidence()).shares:
            if share.name == name and share.rank in (1, None):
                for found, truth in ((begin_of, begin), (end_of, end - 1)):
                    between = found(share.affected, share.values)
                    if between:
                        hits.append(between.first <= truth <= between.last)
                        lengths.append(between.last - between.first + 1)
    assert len(hits) > 120
    # of 200, 95 % plus chance (three standard deviations)
    assert np.mean(hits) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(hits))
    assert np.median(lengths) <= most


@pytest.mark.parametrize("share", [0.05, 0.2, 0.8])
def test_what_comes_now_and_then_may_have_begun_before_it_was_seen(share):
    random, hits = np.random.default_rng(6), []
    for _ in range(400):
        affected = random.random(400) < share
        affected[:150] = affected[300:] = False
        for found, truth in ((begin_of, 150), (end_of, 299)):
            between = found(affected, None)
            if between:
                hits.append(between.first <= truth <= between.last)
    assert len(hits) > 700
    assert np.mean(hits) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(hits))


def test_a_clear_step_is_known_to_the_iteration_and_the_one_before():
    affected = np.zeros(60, bool)
    affected[20:40] = True
    assert begin_of(affected, None) == Iterations(19, 20)
    assert end_of(affected, None) == Iterations(39, 40)
    assert begin_of(affected, affected * 0.1) == Iterations(19, 20)
    assert end_of(affected, affected * 0.1) == Iterations(39, 40)


def test_what_is_there_from_the_first_iteration_or_came_twice_has_no_interval():
    affected = np.zeros(60, bool)
    affected[:30] = True
    assert begin_of(affected, None) is None
    assert end_of(affected, None) == Iterations(29, 30)
    assert end_of(~affected, affected * -0.1) is None
    affected[:] = False
    affected[[20, 50]] = True
    assert begin_of(affected, None) is None is end_of(affected, None)
