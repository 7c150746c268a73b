"""A capture that threads scan in parts gives the same tables as one that is scanned at once, wherever it is cut."""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.pcap import parallel_scan
from ringtap.analysis.pcap.byte_sources import CaptureStream
from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_captures import feed
from ringtap.core.errors import UsageError
from tests.unit.analysis.pcap.test_scan_beside_tshark import KINDS
from tests.unit.capture_makers import MS, START_NS, Packet, classic, modern

pytestmark = [pytest.mark.computes, pytest.mark.long]

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
PLAIN = {name: data for name, make in KINDS.items() if (data := make())[:2] not in (b"\x1f\x8b", b"\x28\xb5")}


def scan(path: Path, part_bytes: int | None = None, block_bytes: int = 150) -> tuple[Scanned | str, list[bool]]:
    """Scan a file at once, or in parts; return its tables, and for each part whether it could be joined."""
    stream, whole, joined = CaptureStream(path), Scan(), []
    join = Scan.join

    def noted(self: Scan, part: Scan) -> bool:
        joined.append(join(self, part))
        return joined[-1]

    try:
        if part_bytes is None:
            return feed(stream, whole), []
        sizes = {"_PART_BYTES": part_bytes, "BLOCK_BYTES": block_bytes, "_SEARCHED_BYTES": (300, 5000)}
        with mock.patch.multiple(parallel_scan, **sizes), mock.patch.object(Scan, "join", noted):
            at = parallel_scan.feed_parts(stream, whole, 2, threading.Event())
        for block in stream.rest(at):
            whole.feed(block)
        return whole.finish(), joined
    except UsageError as error:
        return str(error).removeprefix(f"{path} "), joined
    finally:
        stream.close()


def check(one: Scanned | str, other: Scanned | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    assert one.counts == other.counts
    for name in one.conversations.dtype.names or ():
        assert np.array_equal(one.conversations[name], other.conversations[name]), name
    assert np.array_equal(one.queue_pairs, other.queue_pairs)
    for name in ("start_ns", "first_ns", "last_ns", "interfaces"):
        assert getattr(one, name) == getattr(other, name), name
    assert sums(one) == sums(other)


def sums(found: Scanned) -> dict[tuple[int, int], list[int]]:
    """Amounts by flow and bin, which may have several cells."""
    made: dict[tuple[int, int], list[int]] = {}
    for number, flow, *amounts in np.asarray(found.cells).tolist():
        made[number, flow] = [a + b for a, b in zip(made.get((number, flow), [0] * 5), amounts, strict=True)]
    return made


def segment(number: int, side: int, flags: int, seq: int, ack: int, size: int, window: int, mss: int) -> bytes:
    """An Ethernet frame with TCP in IPv4, of which the payload's bytes are missing."""
    options = struct.pack(">BBH", 2, 4, mss) if mss else b""
    ports = (40_000 + number, 5001)[:: -1 if side else 1]
    addresses = (0x0A000001, 0x0A000002 + number % 2)[:: -1 if side else 1]
    ip = struct.pack(">BBHHHBBHII", 0x45, 0, 40 + len(options) + size, 1, 0x4000, 64, 6, 0, *addresses)
    tcp = struct.pack(">HHIIBBHHH", *ports, seq, ack, (20 + len(options)) << 2, flags, window, 0, 0)
    return bytes(12) + b"\x08\x00" + ip + tcp + options


STEP = st.tuples(
    st.integers(0, 2),  # conversation
    st.integers(0, 1),  # side
    # data in order comes most, so that there are runs
    st.sampled_from(["data"] * 6 + ["ack"] * 2 + ["again", "ahead", "back", "open", "answer", "end", "reset", "alive"]),
    st.sampled_from([1448, 1448, 1448, 1, 700, 1460, 5000]),
    st.sampled_from([1000, 1000, 50_000, 2 * MS, 0, -500]),  # time since the packet before
    st.sampled_from([500] * 9 + [0]),  # window
)


def packets(steps: Sequence[tuple[int, int, str, int, int, int]]) -> list[Packet]:
    """Make packets of TCP connections that go on from one another, as far as the steps say so."""
    sent = {(number, side): 2**32 - 4000 + 7000 * number for number in range(3) for side in range(2)}
    made, time_ns = [], START_NS
    for number, side, kind, drawn_bytes, gap_ns, window in steps:
        size = drawn_bytes
        seq, ack, flags, mss = sent[number, side], sent[number, 1 - side], ACK, 0
        if kind in ("again", "back"):
            seq -= size if kind == "again" else 3000
        elif kind == "ahead":
            seq += 2000
        elif kind in ("ack", "alive"):
            size, seq = (0, seq) if kind == "ack" else (1, seq - 1)
        elif kind in ("open", "answer"):
            size, flags, mss = 0, SYN | (ACK if kind == "answer" else 0), 1460 if side else 900
        elif kind in ("end", "reset"):
            size, flags = 0, ACK | (FIN if kind == "end" else RST)
        elif size == 1:
            flags |= PSH
        time_ns += gap_ns
        data = segment(number, side, flags, seq % 2**32, ack % 2**32, size, window, mss)
        made.append(Packet(time_ns, data, len(data) + size))
        if kind in ("data", "ahead", "open", "answer", "end"):
            sent[number, side] = seq + size + (flags & (SYN | FIN) > 0)
    return made


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_cuts_change_nothing(data: st.DataObject) -> None:
    made = packets(data.draw(st.lists(STEP, min_size=2, max_size=70)))
    written = bytearray(data.draw(st.sampled_from([classic, modern]))(made))
    for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2]))):  # damage
        written[data.draw(st.integers(4, len(written) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.pcap"
        path.write_bytes(written)
        found, _ = scan(path, data.draw(st.integers(80, 3000)), data.draw(st.integers(30, 1000)))
        check(scan(path)[0], found)


@pytest.mark.parametrize("name", PLAIN)
def test_captures_of_all_kinds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pcap"
    path.write_bytes(PLAIN[name])
    whole, _ = scan(path)
    for part_bytes in (257, 1999):
        check(whole, scan(path, part_bytes)[0])


def test_parts_of_a_usual_capture_are_joined(tmp_path: Path) -> None:
    """Tests of equality alone would hold if every part were scanned again."""
    path = tmp_path / "c.pcap"
    steps = [(place % 3, place // 40 % 2, "data" if place % 4 else "ack", 1448, 1000, 500) for place in range(2000)]
    path.write_bytes(classic(packets(steps), nano=True))
    whole, _ = scan(path)
    found, joined = scan(path, 10_000)
    check(whole, found)
    assert len(joined) == -(-(path.stat().st_size - 150) // 10_000)
    assert all(joined)
