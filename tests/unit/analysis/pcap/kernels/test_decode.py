"""The fast path of TCP in Ethernet has the results of the path that all other packets take."""

import random
import struct

import numpy as np
import pytest

from ringtap.analysis.pcap.scan import Scan, Scanned
from tests.unit.capture_makers import START_NS, US, Packet, classic

pytestmark = [pytest.mark.computes, pytest.mark.together]

_HOSTS = [bytes((10, 1, 0, number)) for number in range(1, 4)]


def _packet(chance: random.Random, number: int, sent: dict[tuple[bytes, ...], int]) -> Packet:
    """A segment of one of few connections: mostly sound, some with any header, in some VLAN, sent again or cut."""
    ends = chance.choice(_HOSTS), chance.choice(_HOSTS), bytes((0, chance.choice((1, 2)), 0, 3))
    size, offset, flags = chance.choice((0, 0, 1, 700, 1448)), 5, chance.choice((16, 16, 16, 24, 2, 18, 17, 4, 20))
    if chance.random() < 0.1:
        offset, flags = chance.randrange(16), chance.randrange(256)
    sequence = sent.get(ends, 7) - chance.choice((0, 0, 0, size, 500, -300))
    sent[ends] = sequence + size
    total = 40 + size if chance.random() < 0.9 else chance.randrange(20, 1600)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, total, number, 0x4000, 64, 6, 0) + ends[0] + ends[1]
    tcp = ends[2] + struct.pack("!IIBBHHH", sequence % 2**32, 9, offset << 4, flags, chance.choice((0, 500, 500)), 0, 0)
    tags = chance.choice((b"", b"", b"\x81\x00\x00\x07", b"\x88\xa8\x00\x08"))
    frame = bytes(12) + tags + b"\x08\x00" + ip + tcp + bytes(24)
    length = len(frame) - 24 + size if chance.random() < 0.95 else chance.randrange(len(frame), 1600)
    kept = len(frame) if chance.random() < 0.9 else chance.randrange(30, len(frame))
    return Packet(START_NS + number * 50 * US, frame[: min(kept, length)], length)


def _scanned(data: bytes, without_copies: bool) -> Scanned:
    scan = Scan(packets=True, without_copies=without_copies)
    scan.feed(memoryview(data))
    return scan.finish()


@pytest.mark.parametrize("seed", range(20))
def test_both_paths_have_the_same_results(seed: int) -> None:
    chance, sent = random.Random(seed), dict[tuple[bytes, ...], int]()
    data = classic([_packet(chance, number, sent) for number in range(1, 500)], nano=True)
    # a scan that looks for copies, of which there are none here, has no fast path
    fast, slow = _scanned(data, False), _scanned(data, True)
    assert fast.counts == slow.counts
    assert min(fast.counts[name] for name in ("malformed", "network_changes", "cut_by_snap")) > 0
    assert fast.conversations["resets"].sum() > 0
    for name in ("conversations", "packets", "cells"):
        assert np.array_equal(np.asarray(getattr(fast, name)), np.asarray(getattr(slow, name))), name
