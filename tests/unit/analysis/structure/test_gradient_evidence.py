"""Periodic traffic is called training only with the evidence of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringtap.analysis.structure.gradient_evidence import is_for_many
from ringtap.analysis.structure.payload_time_series import PayloadStream
from ringtap.analysis.structure.structure import find_structure, volume_of
from ringtap.analysis.structure.topology import shape_of
from ringtap.core.errors import MeasurementError
from tests.unit.structure_makers import Job, make, ring, to_stream, together

pytestmark = [pytest.mark.computes, pytest.mark.together]

PAIR = {("10.0.0.1", "10.0.0.2"): 800_000, ("10.0.0.2", "10.0.0.1"): 800_000}


def repeated(source: str, destination: str, size: int, every_s: float, count: int, after_s: float = 0) -> PayloadStream:
    """Send a message of one size again and again."""
    parts = [(after_s + number * every_s, size * 8 / 250e6, size) for number in range(count)]
    return to_stream(source, destination, parts, "502 > 1024" if source < destination else "1024 > 502")


def test_hellos_to_a_multicast_group_are_no_training() -> None:
    hellos = replace(repeated("10.0.0.1", "224.0.0.5", 20_000, 3, 30), answered=False)
    with pytest.raises(MeasurementError, match=r"it goes to 224\.0\.0\.5, the address of many hosts"):
        find_structure(together(hellos))


@pytest.mark.parametrize("host", ["224.0.0.252", "255.255.255.255", "ff02::1"])
def test_addresses_of_many_hosts(host: str) -> None:
    assert is_for_many(host)
    assert not is_for_many("10.0.0.1")
    assert not is_for_many("S0")


@pytest.mark.parametrize("answer", [12, 1400, 7000])
def test_a_poll_is_no_training(answer: int) -> None:
    asks = repeated("10.0.0.1", "10.0.0.2", 12, 1, 40)
    answers = repeated("10.0.0.2", "10.0.0.1", answer, 1, 40, 0.003)
    with pytest.raises(MeasurementError, match="as polls and heartbeats do"):
        find_structure(together(asks, answers))


def test_many_small_packets_are_no_training() -> None:
    streams = [replace(stream, data_packets=stream.total // 100) for stream in make(Job(PAIR)).streams]
    with pytest.raises(MeasurementError, match=r"its packets have 100 B of payload on average"):
        find_structure(together(*streams))


def test_heartbeats_of_more_hosts_do_not_outrank_the_job() -> None:
    job = make(Job(dict.fromkeys(PAIR, 40000)))
    names = ["10.0.0.5", "10.0.0.6", "10.0.0.7"]
    beats = [
        repeated(source, destination, 200, 0.1, 45)
        for source in names
        for destination in names
        if source != destination
    ]
    found = find_structure(together(*job.streams, *beats))
    assert set(found.shape.hosts) == {"10.0.0.1", "10.0.0.2"}
    assert found.period.mean_s == pytest.approx(job.period_s, rel=0.02)
    assert not found.sorted.rivals
    assert any("small messages" in why for _, why in found.sorted.kinds)


def test_payload_decides_between_two_jobs() -> None:
    large = make(Job(PAIR))
    small = make(Job({(f"10.1{a[2:]}", f"10.1{b[2:]}"): size for (a, b), size in ring(3, 100_000).items()}), seed=3)
    found = find_structure(together(*large.streams, *small.streams))
    assert set(found.shape.hosts) == {"10.0.0.1", "10.0.0.2"}
    assert len(found.sorted.rivals) == 1


def test_unequal_directions_are_doubtful() -> None:
    job = make(Job({("10.0.0.1", "10.0.0.2"): 800_000, ("10.0.0.2", "10.0.0.1"): 300_000}))
    found = find_structure(together(*job.streams))
    assert found.period.verdict == "doubtful"
    assert "no host gets as many bytes as it sends" in found.period.reasons[-1]


def test_a_single_direction_is_doubtful() -> None:
    job = make(Job({("10.0.0.1", "10.0.0.2"): 800_000}))
    found = find_structure(together(*(replace(stream, answered=False) for stream in job.streams)))
    assert found.period.verdict == "doubtful"
    assert "only one direction was captured" in found.period.reasons[-1]


def test_ranks_of_one_host_are_told_apart_by_ports() -> None:
    there, back = make(Job(PAIR, buckets=1)).streams
    mine = [
        replace(there, source="127.0.0.1", destination="127.0.0.1", ports="4000 > 4001"),
        replace(back, source="127.0.0.1", destination="127.0.0.1", ports="4001 > 4000"),
    ]
    assert find_structure(together(*mine)).period.verdict == "sure"
    alone = find_structure(together(mine[0]))
    assert alone.period.verdict == "doubtful"


def test_control_streams_of_the_first_rank_are_no_peers() -> None:
    """Rank 0 has a small message with every other rank in each iteration, beside its two neighbours in the ring."""
    job = make(Job(ring(5, 400_000)))
    own = [stream for stream in job.streams if "10.0.0.1" in (stream.source, stream.destination)]
    control = []
    for number in (3, 4):
        other = f"10.0.0.{number}"
        for source, destination in (("10.0.0.1", other), (other, "10.0.0.1")):
            parts = [(start, 0.001, 600) for start in job.starts_s]
            control.append(to_stream(source, destination, parts, "29500 > 41000"))
    found = find_structure(together(*own, *control))
    assert (found.shape.name, found.shape.hosts) == ("member of a ring", ("10.0.0.5", "10.0.0.1", "10.0.0.2"))


def test_parameters_of_what_looks_the_same() -> None:
    """FSDP moves as many bytes as two all-reduces over gloo, and one and a half over NCCL."""
    parameters = 200_000
    for sent, truth in ((2.0, "sharded"), (1.5, "sharded"), (2 * 3 / 4, "several")):
        size = round(sent * parameters * 4)
        found = volume_of(shape_of(dict.fromkeys(PAIR, size)), size)
        assert found.sharded_least is not None
        assert found.sharded_most is not None
        assert found.several_least is not None
        if truth == "sharded":
            assert found.sharded_least <= parameters <= found.sharded_most
        else:
            assert found.several_least <= parameters <= found.parameters_most  # type: ignore[operator]
