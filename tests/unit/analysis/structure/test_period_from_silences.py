"""Iterations out of payload: under jitter, stalls, buckets and cross traffic, and none where there are none."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.structure.detect_training_streams import sort_out
from ringtap.analysis.structure.payload_time_series import PayloadStream
from ringtap.analysis.structure.period_from_silences import find_periodicity, silences_of
from ringtap.analysis.structure.structure import Structure, bursts_of, find_structure, iterations_of, peak_to_mean
from ringtap.core.errors import MeasurementError
from tests.unit.structure_makers import START_NS, Job, Made, limited, make, ring, to_stream, together, web_search

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

JOB = Job(ring(3, 160_000))


def check(found: Structure, made: Made) -> None:
    """Every boundary lies at the begin of one iteration's communication, in order, none left out."""
    boundaries_s = (found.boundaries_ns - START_NS) / 1e9
    truth_s = np.array(made.starts_s)
    number = np.abs(boundaries_s[:, None] - truth_s).argmin(axis=1)
    assert (np.diff(number) == 1).all()
    assert len(number) >= len(truth_s) - 1
    # a bin of 1 ms, and 0.2 ms of jitter of the senders
    assert (np.abs(boundaries_s - truth_s[number]) < 0.003).mean() > 0.9
    period_s = (truth_s[number[-1]] - truth_s[number[0]]) / (len(number) - 1)
    assert found.period.mean_s == pytest.approx(period_s, rel=0.005)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    hosts=st.integers(3, 5),
    each=st.sampled_from([20_000, 160_000, 1_000_000]),
    buckets=st.integers(1, 12),
    compute_s=st.sampled_from([0.03, 0.06, 0.1, 0.3]),
    jitter=st.sampled_from([0.0, 0.02, 0.1]),
    stalls=st.sampled_from([0.0, 0.0, 0.02]),
    forward=st.sampled_from([0.25, 1 / 3, 0.5]),
    cross=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_the_period_survives_what_jobs_do(
    hosts: int,
    each: int,
    buckets: int,
    compute_s: float,
    jitter: float,
    stalls: float,
    forward: float,
    cross: int,
    seed: int,
) -> None:
    job = Job(ring(hosts, each), 20, buckets, compute_s, jitter=jitter, stalls=stalls, forward=forward)
    made = make(job, seed)
    seconds = made.starts_s[-1]
    others = {
        0: [],
        1: web_search("10.9.0.1", "10.0.0.1", 40e6, seconds, seed),
        2: [limited("10.9.0.1", "10.0.0.1", 60e6, seconds)],
    }
    found = find_structure(together(*made.streams, *others[cross]))
    check(found, made)
    assert found.shape.name == "ring"
    assert list(found.shape.hosts) == [f"10.0.0.{number + 1}" for number in range(hosts)]
    assert found.volume.worker_bytes == pytest.approx(each + buckets * job.header_bytes, rel=1e-3)


def test_twelve_equal_buckets_are_one_iteration() -> None:
    """Their own rhythm is twelve times as fast, and the silence between iterations only a third longer."""
    job = Job(ring(3, 120_000), buckets=12, compute_s=0.24, forward=0.03, jitter=0.0)
    made = make(job)
    found = find_structure(together(*made.streams))
    check(found, made)


def test_two_bursts_of_unequal_size_are_one_iteration() -> None:
    made = make(JOB)
    stream = made.streams[0]
    rhythm = find_periodicity(stream.bins, stream.payload)
    assert rhythm is not None
    assert rhythm.volume == pytest.approx(160_000 + 4 * 48, rel=1e-3)


def test_a_slow_phase_does_not_break_the_rhythm() -> None:
    """The second half takes twice as long, as under cross traffic: bytes do not change with it."""
    quick = make(JOB)
    slow = make(dataclasses.replace(JOB, compute_s=0.2), lead_s=quick.starts_s[-1] + 0.1)
    streams = [
        dataclasses.replace(one, bins=np.append(one.bins, other.bins), payload=np.append(one.payload, other.payload))
        for one, other in zip(quick.streams, slow.streams, strict=True)
    ]
    found = find_structure(together(*streams))
    check(found, Made(streams, [*quick.starts_s, *slow.starts_s]))


@pytest.mark.parametrize("seed", range(6))
def test_random_exchanges_are_no_training(seed: int) -> None:
    streams = [
        stream
        for number, (a, b) in enumerate([("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")])
        for stream in web_search(a, b, 20e6, 5.0, seed=10 * seed + number)
    ]
    with pytest.raises(MeasurementError, match="no training was found"):
        find_structure(together(*streams))


def test_a_limited_sender_is_no_training_and_is_called_by_its_name() -> None:
    with pytest.raises(MeasurementError, match=r"repeats every .* but it goes one way only"):
        find_structure(together(limited("10.0.0.1", "10.0.0.2", 40e6, 5.0)))


def test_a_larger_limited_sender_does_not_hide_the_job() -> None:
    made = make(JOB)
    cross = limited("10.9.0.1", "10.0.0.1", 200e6, made.starts_s[-1])
    assert cross.total > 10 * sum(stream.total for stream in made.streams) / 3
    found = find_structure(together(*made.streams, cross))
    check(found, made)
    assert dict(zip(found.streams.streams, found.sorted.kinds, strict=True))[cross][0] == "cross"


def test_too_few_iterations_are_said_to_be_too_few() -> None:
    made = make(dataclasses.replace(JOB, iterations=3, buckets=1))
    found = sort_out(together(*made.streams))
    assert found.training is None
    assert "no volume recurs" in found.why


def test_the_buckets_of_two_iterations_are_taken_for_iterations_with_doubt() -> None:
    made = make(dataclasses.replace(JOB, iterations=2, buckets=6))
    found = find_structure(together(*made.streams))
    assert found.period.verdict == "doubtful"
    assert any("several bursts may be one iteration" in reason for reason in found.period.reasons)


def test_a_few_iterations_are_found_with_reserve() -> None:
    made = make(dataclasses.replace(JOB, iterations=7, buckets=1))
    found = find_structure(together(*made.streams))
    check(found, made)
    assert found.period.verdict == "likely"
    assert "whole iterations" in found.period.reasons[0]


def test_a_stream_without_a_rhythm_of_its_own_joins_by_its_bytes() -> None:
    """Under load one flow may never fall silent for long; its bytes an iteration are the same all the same."""
    made = make(dataclasses.replace(JOB, jitter=0.0))
    stream = made.streams[0]
    trickle = np.setdiff1d(np.arange(stream.bins[0], stream.bins[-1], 3), stream.bins)
    bins = np.sort(np.append(stream.bins, trickle))
    payload = np.where(np.isin(bins, trickle), 60, 0)
    payload[np.isin(bins, stream.bins)] = stream.payload
    noisy = dataclasses.replace(stream, bins=bins, payload=payload)
    found = find_structure(together(noisy, *made.streams[1:]))
    assert {member.stream for member in found.training.major} == {noisy, *made.streams[1:]}


def test_silences_are_counted_in_bytes() -> None:
    silences = silences_of(np.array([5, 6, 10, 11, 30]), np.array([100, 100, 100, 100, 100]))
    assert silences.position.tolist() == [0, 200, 400]
    assert silences.length.tolist() == [18, 3, 18]
    assert silences.end.tolist() == [5, 10, 30]


def test_communication_silence_and_bursts_of_a_known_iteration() -> None:
    # an iteration of 10 bins: sent in bins 0, 1, 5
    one = np.array([100, 300, 0, 0, 0, 200, 0, 0, 0, 0], np.int64)
    payload, starts = np.tile(one, 4), np.arange(0, 40, 10)
    table = iterations_of(payload, starts, np.ones(4, bool), START_NS, 1_000_000)
    assert table["iteration_s"].tolist() == pytest.approx([0.01] * 3)
    assert table["communication_s"].tolist() == pytest.approx([0.006] * 3)
    assert table["silence_s"].tolist() == pytest.approx([0.004] * 3)
    assert table["bytes"].tolist() == [600] * 3
    bursts = bursts_of(payload, starts, 1_000_000)
    assert bursts["length_s"].tolist() == pytest.approx([0.002, 0.001] * 3)
    assert bursts["bytes"].tolist() == [400, 200] * 3
    assert bursts["begin_s"].tolist() == pytest.approx([0.0, 0.005] * 3)
    peaks = peak_to_mean({"a": payload}, starts, 1_000_000).set_index("scale_s")["peak_to_mean"]
    # 300 B in a bin against 60 on average; any ten bins hold 600
    assert peaks.loc[0.001] == pytest.approx(5.0)
    assert peaks.loc[0.01] == pytest.approx(1.0)
    assert 0.1 not in peaks.index


def _evaluated(steps: int, exchanges: int, rounds: int = 12) -> tuple[list[PayloadStream], float]:
    """A job of two hosts that pauses after some steps, and exchanges small messages in the pause."""
    hosts = ("10.0.0.1", "10.0.0.2")
    sent: dict[tuple[str, str], list[tuple[float, float, int]]] = {(hosts[0], hosts[1]): [], (hosts[1], hosts[0]): []}
    now = 0.5
    for _ in range(rounds):
        for _ in range(steps):
            for parts in sent.values():
                parts.append((now, 0.026, 800_000))
            now += 0.108
        for _ in range(exchanges):
            for parts in sent.values():
                parts.append((now, 0.0005, 900))
            now += 0.04
        now += 0.2 if not exchanges else 0
    return [to_stream(*pair, parts) for pair, parts in sent.items()], 0.108


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_steps_before_an_evaluation_are_the_iterations(steps: int) -> None:
    streams, step_s = _evaluated(steps, 5)
    found = find_structure(together(*streams))
    assert found.period.median_s == pytest.approx(step_s, abs=0.001)
    assert found.volume.worker_bytes == pytest.approx(800_000, rel=0.01)
    assert found.period.verdict != "sure"
    assert f"every {steps} iterations a longer pause follows" in "; ".join(found.period.reasons)


def test_equal_parts_may_be_iterations_themselves_and_the_text_says_so() -> None:
    streams, _ = _evaluated(5, 0)
    found = find_structure(together(*streams))
    assert found.period.verdict == "likely"
    assert found.period.reasons == (
        "each has 5 equal parts with a silence before each, which may be the iterations, with a pause after every 5",
    )


def test_micro_batches_of_a_pipeline_are_no_iterations() -> None:
    """Each stage asks for the next activations by a small message, also while it sends none."""
    sent: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    names = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    pairs = list(itertools.pairwise(names))
    forward, backward = pairs, [(b, a) for a, b in reversed(pairs)]
    for pair in [*forward, *backward]:
        sent[pair] = []
    for iteration in range(30):
        for half, links in enumerate((forward, backward)):
            for batch in range(4):
                for stage, (source, destination) in enumerate(links):
                    now = 0.5 + iteration * 0.2 + half * 0.09 + batch * 0.02 + stage * 0.01
                    sent[source, destination].append((now, 0.004, 100_000))
                    sent[destination, source].append((now - 0.001, 0.0005, 60))
    found = find_structure(together(*(to_stream(*pair, sorted(parts)) for pair, parts in sent.items())))
    assert found.shape.name == "pipeline"
    assert found.period.mean_s == pytest.approx(0.2, abs=0.001)
    assert found.training.pause_after == 0


def test_a_pause_in_which_a_host_sends_much_is_no_evaluation() -> None:
    streams, step_s = _evaluated(5, 5)
    random = np.random.default_rng(5)
    round_s = 5 * step_s + 5 * 0.04
    back = [
        (0.5 + number * round_s + 5 * step_s + part * 0.04, 0.01, int(random.uniform(0.5, 1.5) * 800_000))
        for number in range(12)
        for part in range(5)
    ]
    found = find_structure(together(*streams, to_stream("10.0.0.2", "10.0.0.1", back, "4002 > 4003")))
    assert found.period.mean_s == pytest.approx(round_s, abs=0.002)
