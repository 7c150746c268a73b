"""Training over RoCEv2 in a capture: a ring that writes by RDMA, and its volume per iteration."""

from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.pcap import read_captures
from ringtap.analysis.structure.capture_streams import read_structure
from tests.unit.capture_makers import A4, B4, C4, classic, frames, roce

pytestmark = [pytest.mark.computes, pytest.mark.together]

RING = ((A4, B4), (B4, C4), (C4, A4))
FIRST, MIDDLE, LAST = 0x06, 0x07, 0x08  # RDMA WRITE of a reliable connection
RETH_BYTES, SEGMENT_BYTES = 16, 1024
ITERATIONS, BUCKETS, SEGMENTS = 12, 4, 16
VOLUME_BYTES = BUCKETS * SEGMENTS * SEGMENT_BYTES  # per worker and iteration
PERIOD_NS, BUCKET_NS, GAP_NS = 150_000_000, 12_000_000, 200_000


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three workers that compute, then write each bucket to their neighbour."""
    random, packets = np.random.default_rng(5), []
    for pair, (source, destination) in enumerate(RING):
        number = 0
        for iteration in range(ITERATIONS):
            for bucket in range(BUCKETS):
                begin_ns = iteration * PERIOD_NS + bucket * BUCKET_NS + round(random.uniform(0, 300_000))
                for segment in range(SEGMENTS):
                    opcode = FIRST if not segment else LAST if segment == SEGMENTS - 1 else MIDDLE
                    extended = bytes(RETH_BYTES) if opcode == FIRST else b""
                    made = roce(source, destination, opcode, 100 + pair, number, SEGMENT_BYTES, extended)
                    packets.append((begin_ns + segment * GAP_NS, made))
                    number += 1
    path = tmp_path_factory.mktemp("roce") / "ring.pcap"
    path.write_bytes(classic(frames(sorted(packets, key=lambda one: one[0]))))
    return path


def test_the_volume_of_an_iteration_is_that_of_the_writes(capture: Path) -> None:
    found = read_structure(capture)
    assert found.period.mean_s == pytest.approx(PERIOD_NS / 1e9, rel=0.02)
    assert found.shape.name == "ring"
    assert found.volume.worker_bytes == pytest.approx(VOLUME_BYTES, rel=0.01)
    assert {stream.protocol for stream in found.streams.streams} == {"roce"}


def test_the_flows_are_the_queue_pairs_payload(capture: Path) -> None:
    traffic = read_captures(capture)
    pairs = traffic.queue_pairs()
    assert sorted(pairs["queue_pair"]) == [100, 101, 102]
    assert set(pairs["payload"]) == {ITERATIONS * VOLUME_BYTES}
    assert set(pairs["psn_gaps"]) == {0}
