from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ringtap.analysis.job import iteration_budget
from ringtap.analysis.job.diagnosis import Evidence, NetworkRecords, diagnosis_of
from ringtap.analysis.job.iteration_budget import (
    BUFFERS,
    CAUSES,
    LOSS,
    NETWORK_STALL,
    OTHER_TRAFFIC,
    SLOW_LINK,
    SLOW_RANK,
    SLOWER_NETWORK,
    SLOWER_WHOLE,
    STALL,
    UNEVEN,
    WHOLE,
    WHOLE_STALL,
    NetworkEvidence,
    RankTimes,
    split,
)
from ringtap.analysis.job.verdict import verdict

pytestmark = [pytest.mark.computes, pytest.mark.together]
COMPUTE_S, NETWORK_S, OPTIMIZER_S, ELSEWHERE_S, OVERLAP_S = 0.1, 0.05, 0.005, 0.004, 0.02
NOISE_S = 0.001


class Job:
    """A synchronous job whose ranks differ by noise; what is added to it is what an iteration then takes longer."""

    def __init__(self, iterations=120, ranks=4, seed=1, noise_s=NOISE_S):
        self.random = np.random.default_rng(seed)
        shape = iterations, ranks
        self.compute = COMPUTE_S + noise_s * self.random.standard_normal(shape)
        self.elsewhere = ELSEWHERE_S + 0.1 * noise_s * self.random.random(shape)
        self.network = NETWORK_S + noise_s * self.random.random(iterations)

    def times(self, rank_numbers=None):
        work = self.compute + self.elsewhere
        exposed = work.max(axis=1)[:, None] - work + self.network[:, None]
        shape = self.compute.shape
        seconds = np.repeat((work.max(axis=1) + self.network + OPTIMIZER_S)[:, None], shape[1], axis=1)
        optimizer, overlap = np.full(shape, OPTIMIZER_S), np.full(shape, OVERLAP_S)
        ranks = np.arange(shape[1]) if rank_numbers is None else np.array(rank_numbers)
        return RankTimes(ranks, seconds, exposed, self.compute, optimizer, overlap, float(seconds.mean()))


def causes(budget):
    return [share for share in budget.shares if share.name in CAUSES]


def seconds_of(budget, name):
    return sum(share.seconds for share in budget.shares if share.name == name)


def cost_s(changed, usual):
    return float(changed.times().iteration_s.mean() - usual.times().iteration_s.mean())


def whole(job):
    """Only the length of the job's iterations is known."""
    return RankTimes.whole(job.times().iteration_s[:, 0])


@pytest.mark.parametrize("seed", range(20))
def test_iterations_of_a_healthy_job_of_which_only_the_length_is_known_have_no_cause(seed):
    budget = split(whole(Job(seed=seed, noise_s=0.02)), NetworkEvidence())
    assert [share.name for share in budget.shares] == [WHOLE]


def test_other_traffic_and_loss_are_found_by_the_length_of_iterations_alone():
    usual, slower = Job(), Job()
    slower.network[30:50] += 0.03
    other, training = np.zeros(120), np.full(120, 1e6)
    other[30:50] = 5e5
    for name, evidence in (
        (OTHER_TRAFFIC, NetworkEvidence(training, other)),
        (LOSS, NetworkEvidence(lost_segments=other / 1e5)),
    ):
        budget = split(whole(slower), evidence)
        (share,) = causes(budget)
        assert (share.name, share.seconds) == (name, pytest.approx(cost_s(slower, usual), rel=0.05))
        assert seconds_of(budget, WHOLE) == pytest.approx(float(usual.times().iteration_s.mean()), rel=0.01)


def test_stalls_and_slower_stretches_are_neither_a_ranks_nor_the_networks_without_their_times():
    slower = Job()
    slower.compute[60:] += 0.02
    assert [share.name for share in causes(split(whole(slower), NetworkEvidence()))] == [SLOWER_WHOLE]
    stalls = Job()
    stalls.network[::10] += 0.2
    assert [share.name for share in causes(split(whole(stalls), NetworkEvidence()))] == [WHOLE_STALL]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_healthy_job_has_no_cause_and_its_parts_are_what_they_are(ranks):
    budget = split(Job(ranks=ranks).times(), NetworkEvidence())
    assert causes(budget) == []
    assert budget.uncosted == ()
    assert seconds_of(budget, "compute") == pytest.approx(COMPUTE_S, abs=NOISE_S)
    assert seconds_of(budget, "optimizer") == pytest.approx(OPTIMIZER_S)
    assert seconds_of(budget, "elsewhere") == pytest.approx(ELSEWHERE_S, abs=NOISE_S)
    assert seconds_of(budget, "network") == pytest.approx(NETWORK_S, abs=2 * NOISE_S)
    # the last of several ranks is late by chance
    assert 0 <= seconds_of(budget, UNEVEN) < 4 * NOISE_S


@pytest.mark.parametrize("seed", range(40))
def test_a_healthy_job_with_much_noise_has_no_cause(seed):
    """The ranks differ by a tenth of an iteration, as with batches of different length."""
    ranks = 2 + seed % 5
    assert causes(split(Job(ranks=ranks, seed=seed, noise_s=0.015, iterations=300).times(), NetworkEvidence())) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("begin", [0, 50])
@pytest.mark.parametrize("late_s", [0.006, 0.02, 0.05])
def test_a_slow_rank_costs_what_an_iteration_takes_longer(ranks, begin, late_s):
    usual, job = Job(ranks=ranks), Job(ranks=ranks)
    job.compute[begin:110, 1] += late_s
    (found,) = causes(split(job.times(rank_numbers=[10 * number for number in range(ranks)]), NetworkEvidence()))
    assert (found.name, found.rank, found.within) == (SLOW_RANK, 10, "compute")
    assert found.seconds == pytest.approx(cost_s(job, usual), rel=0.15)
    where = np.flatnonzero(found.affected)
    assert abs(where[0] - begin) <= 3
    assert abs(where[-1] - 109) <= 3
    assert found.low_s < found.seconds < found.high_s


def test_two_slow_ranks_are_removed_together():
    usual, job = Job(), Job()
    job.elsewhere[:, [0, 2]] += 0.03
    found = causes(split(job.times(), NetworkEvidence()))
    assert {(share.name, share.rank, share.within) for share in found} == {
        (SLOW_RANK, 0, "elsewhere"),
        (SLOW_RANK, 2, "elsewhere"),
    }
    assert sum(share.seconds for share in found) == pytest.approx(cost_s(job, usual), rel=0.15)


@pytest.mark.parametrize("length", [2, 4, 8, 9, 10, 12, 15, 16, 17, 20, 30])
@pytest.mark.parametrize("late_s", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_stretch_of_any_length_is_paid_for_once(length, late_s, seed):
    """It may be called stalls or a slow rank."""
    usual, job = Job(seed=seed, ranks=3), Job(seed=seed, ranks=3)
    job.compute[40 : 40 + length, 1] += late_s
    found = causes(split(job.times(), NetworkEvidence()))
    assert {share.rank for share in found} <= {1}
    assert sum(share.seconds for share in found) <= 1.1 * cost_s(job, usual)
    if length >= 8:
        assert sum(share.seconds for share in found) >= 0.85 * cost_s(job, usual)


@pytest.mark.parametrize(("rank", "kind"), [(2, "elsewhere"), (2, "compute"), (None, "elsewhere"), (None, "compute")])
def test_stalls_of_a_rank_or_of_all_cost_what_they_take(rank, kind):
    usual, job = Job(), Job()
    getattr(job, kind)[7::20, slice(None) if rank is None else rank] += 0.4
    (found,) = causes(split(job.times(), NetworkEvidence()))
    assert (found.name, found.rank, found.within) == (STALL, rank, kind)
    assert np.flatnonzero(found.affected).tolist() == list(range(7, 120, 20))
    assert found.seconds == pytest.approx(cost_s(job, usual), rel=0.05)


def test_stalls_of_a_slow_rank_are_told_from_its_usual_work():
    """A rank that always loads data more slowly than the others stalls in its compute."""
    job = Job()
    job.elsewhere[:, 1] += 0.04
    job.compute[7::20, 1] += 0.03
    found = {share.name: (share.rank, share.within) for share in causes(split(job.times(), NetworkEvidence()))}
    assert found == {SLOW_RANK: (1, "elsewhere"), STALL: (1, "compute")}


def test_the_cost_of_a_stall_is_that_of_most_of_them():
    """A small stall among checkpoints, which is none, hides neither their number nor their length."""
    job = Job()
    job.elsewhere[10::20] += 0.3
    job.elsewhere[35] += 0.03
    times = job.times()
    start_s = times.iteration_s[:, 0].cumsum()
    records = NetworkRecords.missing("not recorded")
    node_of = dict.fromkeys(range(4), "n0")
    evidence = Evidence(times, len(start_s), start_s, records, node_of, lambda _: None, lambda *_: None)
    found = diagnosis_of(evidence)
    (cause,) = found["causes"]
    assert (cause["name"], cause["iterations"], cause["each_s"]) == (STALL, 6, pytest.approx(0.3, rel=0.01))
    assert (cause["here_s"], cause["usual_s"]) == pytest.approx((0.3 + ELSEWHERE_S, ELSEWHERE_S), rel=0.02)
    assert ", 300 ms (median) in 6 iterations from " in verdict(found)[0]


def test_other_traffic_costs_what_the_network_takes_longer_with_it_than_without():
    usual, job = Job(), Job()
    job.network[30:75] += 0.02
    training, other = np.full(120, 1e6), np.zeros(120)
    other[30:75] = 4e5
    found = split(job.times(), NetworkEvidence(training, other, np.zeros(120)))
    (cause,) = causes(found)
    assert cause.name == OTHER_TRAFFIC
    assert np.flatnonzero(cause.affected).tolist() == list(range(30, 75))
    assert cause.seconds == pytest.approx(cost_s(job, usual), rel=0.05)
    # traffic that changes nothing has no cost
    assert causes(split(usual.times(), NetworkEvidence(training, other, np.zeros(120)))) == []


def test_noise_is_not_called_stalls_where_the_cost_of_other_traffic_is_taken_out_of_many_iterations():
    names = []
    for seed in range(20):
        job = Job(seed=seed)
        job.network += 0.02 * job.random.standard_normal(120)
        job.network[30:75] += 0.03
        training, other = np.full(120, 1e6), np.zeros(120)
        other[30:75] = 4e5
        found = causes(split(job.times(), NetworkEvidence(training, other, np.zeros(120))))
        names.append([cause.name for cause in found])
    assert names.count([OTHER_TRAFFIC]) == 20


def test_loss_costs_what_the_network_takes_longer_with_it_than_without():
    usual, job = Job(), Job()
    lossy = job.random.random(120) < 0.3
    job.network[lossy] += 0.03
    evidence = NetworkEvidence(np.full(120, 1e6), np.zeros(120), np.where(lossy, 2.0, 0.0))
    (cause,) = causes(split(job.times(), evidence))
    assert cause.name == LOSS
    assert cause.seconds == pytest.approx(cost_s(job, usual), rel=0.05)


@pytest.mark.parametrize("name", [OTHER_TRAFFIC, LOSS])
def test_what_is_there_throughout_has_no_cost_that_is_known(name):
    training = np.full(120, 1e6)
    other, lost = (np.full(120, 5e5 if name == one else 0.0) for one in (OTHER_TRAFFIC, LOSS))
    budget = split(Job().times(), NetworkEvidence(training, other, lost))
    assert causes(budget) == []
    assert budget.uncosted == ((name, "0 of 120 iterations are without it"),)


def test_ranks_that_an_exchange_lets_go_late_are_not_slow():
    """A segment that is lost at the end of a ring holds two of three ranks; the third waits for them the next time."""
    usual, job = Job(ranks=3), Job(ranks=3)
    times = job.times()
    for number in (20, 50, 90):
        for values in (times.iteration_s, times.exposed_s):
            values[number, 1:] += 0.2
            values[number + 1, 0] += 0.2
    times = replace(times, mean_s=float(times.iteration_s.mean()))
    lost = np.zeros(120)
    lost[[20, 50, 90]] = 3
    found = causes(split(times, NetworkEvidence(np.full(120, 1e6), np.zeros(120), lost)))
    assert {share.name for share in found} <= {LOSS, NETWORK_STALL}
    assert found[0].name == LOSS
    cost = times.mean_s - usual.times().mean_s
    assert sum(share.seconds for share in found) == pytest.approx(cost, rel=0.05)


def test_stalls_of_the_network_without_evidence_have_no_other_cause():
    usual, job = Job(), Job()
    job.network[[20, 50, 90]] += 0.5
    (cause,) = causes(split(job.times(), NetworkEvidence(np.full(120, 1e6), np.zeros(120), np.zeros(120))))
    assert cause.name == NETWORK_STALL
    assert cause.seconds == pytest.approx(cost_s(job, usual), rel=0.05)


def test_stalls_of_the_network_with_lost_segments_are_loss():
    usual, job = Job(), Job()
    job.network[[20, 50, 90]] += 0.2
    again = np.full(120, 1.0)
    again[60:66] = 0.0  # too few iterations are without loss
    budget = split(job.times(), NetworkEvidence(np.full(120, 1e6), np.zeros(120), again))
    (cause,) = causes(budget)
    assert cause.name == LOSS
    assert np.flatnonzero(cause.affected).tolist() == [20, 50, 90]
    assert cause.seconds == pytest.approx(cost_s(job, usual), rel=0.05)
    # what it costs in the other iterations is not known
    assert budget.uncosted == (("loss", "6 of 120 iterations are without it"),)


def test_the_capacity_of_interfaces_divides_the_network():
    """The bytes need 60 ms at the rate of the interfaces, of which 20 ms pass during the backward pass."""
    budget = split(Job().times(), NetworkEvidence(line_s=0.06))
    assert causes(budget) == []
    assert seconds_of(budget, "bandwidth") == pytest.approx(0.04)
    assert seconds_of(budget, "network") == pytest.approx(NETWORK_S - 0.04, abs=NOISE_S)
    (slow,) = causes(split(Job().times(), NetworkEvidence(line_s=0.06, usual_line_s=0.045)))
    assert (slow.name, slow.is_computed) == (SLOW_LINK, True)
    assert slow.seconds == pytest.approx(0.015)


@pytest.mark.parametrize("slower", [1.2, 1.5, 2.5])
def test_a_slow_rank_does_not_cost_the_time_in_which_the_network_works(slower):
    """The exchange begins half way through the last rank's backward pass, and fills the network."""

    def job(factor):
        found = Job(ranks=3)
        found.compute[:, 1] *= factor
        overlap = found.compute / 2
        last = found.compute.argmax(axis=1)
        found.network = np.maximum(0.15 - overlap[np.arange(120), last], 0.01)
        return found, overlap

    (usual, _), (slow, overlap) = job(1), job(slower)
    times = replace(slow.times(), overlap_s=overlap)
    (found,) = causes(split(times, NetworkEvidence(line_s=0.15)))
    assert (found.name, found.rank, found.is_at_most) == (SLOW_RANK, 1, False)
    assert found.seconds == pytest.approx(cost_s(slow, usual), rel=0.1)
    # without the capacity, the delay is the most that it may cost
    (found,) = causes(split(times, NetworkEvidence()))
    assert found.is_at_most
    assert found.seconds > cost_s(slow, usual)


def test_full_buffers_have_their_share_of_what_the_bytes_do_not_need():
    (limited,) = causes(split(Job().times(), NetworkEvidence(line_s=0.04, limited_share=0.5)))
    assert limited.name == BUFFERS
    assert limited.seconds == pytest.approx((NETWORK_S + NOISE_S / 2 - 0.02) / 2, rel=0.02)


@pytest.mark.parametrize(("begin", "end"), [(0, 40), (40, 90), (70, 120)])
def test_a_network_that_is_slower_for_a_while_is_found_with_its_time(begin, end):
    usual, job = Job(), Job()
    job.network[begin:end] += 0.01
    (slower,) = causes(split(job.times(), NetworkEvidence()))
    assert slower.name == SLOWER_NETWORK
    assert np.flatnonzero(slower.affected).tolist() == list(range(begin, end))
    assert slower.seconds == pytest.approx(cost_s(job, usual), rel=0.05)


@pytest.mark.parametrize("line_s", [None, NETWORK_S + OVERLAP_S])
def test_a_network_is_not_slower_because_a_slow_rank_hides_less_of_the_exchange(line_s):
    """While rank 2 is slow, half of the exchange passes while the others wait for it."""
    changed = Job()
    changed.compute[40:90, 2] += 0.03
    changed.network[40:90] -= 0.015
    times = changed.times()
    times.overlap_s[40:90, 2] += 0.03
    assert [share.name for share in causes(split(times, NetworkEvidence(line_s=line_s)))] == [SLOW_RANK]
    # without a slow rank, the same difference is the network's
    changed.compute[40:90, 2] -= 0.03
    assert [share.name for share in causes(split(changed.times(), NetworkEvidence()))] == [SLOWER_NETWORK]


@pytest.mark.parametrize("count", [10, 12])
def test_a_rank_that_became_slow_is_named_after_ten_iterations(count):
    changed = Job(iterations=100)
    changed.compute[-count:, 1] += 0.02
    (share,) = causes(split(changed.times(), NetworkEvidence()))
    assert (share.name, share.rank, share.affected.sum()) == (SLOW_RANK, 1, count)
    since = share.since(100 - count)
    assert since.seconds == pytest.approx(0.02, rel=0.1)
    assert share.seconds == pytest.approx(since.seconds * count / 100)


def test_other_traffic_that_is_there_throughout_costs_what_it_leaves_of_the_capacity():
    training, other = np.full(120, 1e6), np.full(120, 5e5)
    evidence = NetworkEvidence(training, other, np.zeros(120), line_s=0.05, shared_line_s=0.065)
    budget = split(Job().times(), evidence)
    (cause,) = causes(budget)
    assert (cause.name, cause.is_computed) == (OTHER_TRAFFIC, True)
    assert cause.seconds == pytest.approx(0.015)
    assert budget.uncosted == ()


@given(values=arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(2, 7)), elements=st.integers(0, 4)))
def test_the_median_of_the_others_leaves_out_the_value_itself(values):
    found = iteration_budget._medians_of_others(values)
    for row, number in np.ndindex(values.shape):
        assert found[row, number] == np.median(np.delete(values[row], number))


seconds = st.floats(0, 10, allow_nan=False)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), count=st.integers(1, 60), ranks=st.integers(1, 5))
def test_the_parts_add_up_whatever_the_times_are(data, count, ranks):
    of_ranks = arrays(np.float64, (count, ranks), elements=seconds)
    exposed, compute, optimizer, overlap, more = (data.draw(of_ranks) for _ in range(5))
    total, mean_s = exposed + compute + optimizer + more, data.draw(st.floats(0.001, 50))
    bytes_of = arrays(np.float64, count, elements=st.floats(0, 1e7))
    lines = [*(data.draw(st.none() | st.floats(0, 20)) for _ in range(3)), data.draw(st.floats(0, 1))]
    evidence = NetworkEvidence(data.draw(bytes_of), data.draw(bytes_of), data.draw(bytes_of), *lines)
    budget = split(RankTimes(np.arange(ranks), total, exposed, compute, optimizer, overlap, mean_s), evidence)
    assert sum(share.seconds for share in budget.shares) == pytest.approx(mean_s, rel=1e-6, abs=1e-6)
    assert all(share.seconds >= -1e-12 for share in causes(budget))


def slower_wholes(series):
    return [share for share in split(RankTimes.whole(series), NetworkEvidence()).shares if share.name == SLOWER_WHOLE]


def test_iterations_that_wander_by_themselves_are_not_called_slower():
    """Each of 300 series follows itself with a correlation of 0.8; taken as independent, 204 had a slower stretch."""
    random = np.random.default_rng(3)
    found = 0
    for _ in range(300):
        noise = random.normal(size=130)
        for row in range(1, len(noise)):
            noise[row] = 0.8 * noise[row - 1] + 0.6 * noise[row]
        found += bool(slower_wholes(0.1 + 0.004 * noise))
    assert found <= 1  # one in a thousand by chance


@pytest.mark.parametrize(("sigmas", "is_found"), [(2.0, False), (4.0, True)])
def test_what_nothing_explains_exceeds_the_usual_spread(sigmas, is_found):
    series = 0.1 + 0.004 * np.random.default_rng(4).normal(size=130)
    series[40:80] += sigmas * 0.004
    assert bool(slower_wholes(series)) == is_found
