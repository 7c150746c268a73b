"""Every file format and link type gives the same conversations, in blocks of any size."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.core.errors import UsageError
from tests.unit import capture_makers as make
from tests.unit.capture_makers import Blocks, classic, frames, modern, usual

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


def scan(data: bytes, block: int = 4096, **options) -> Scanned:
    made = Scan(**options)
    view = memoryview(data)
    for at in range(0, len(data), block):
        made.feed(view[at : at + block])
    return made.finish()


def table(scanned: Scanned) -> list:
    """What conversations say, without what depends on the link's header."""
    names = [name for name in scanned.conversations.dtype.names if name not in ("bytes", "data_bytes")]
    return [tuple(np.asarray(row[name]).tolist() for name in names) for row in scanned.conversations]


def agree(scanned: Scanned) -> None:
    """Cells add up to the conversations."""
    cells = scanned.cells
    for name in ("packets", "data_packets", "bytes", "data_bytes", "payload"):
        sums = np.bincount(cells["flow"], cells[name], minlength=2 * len(scanned.conversations))
        assert np.array_equal(sums, scanned.conversations[name].reshape(-1)), name


REFERENCE = table(scan(classic(frames(usual()))))


def test_the_reference_holds_what_was_made():
    scanned = scan(classic(frames(usual())))
    rows = scanned.conversations
    packets = frames(usual())
    assert scanned.counts["packets"] == len(packets) == int(rows["packets"].sum())
    assert scanned.counts["bytes"] == sum(one.length for one in packets) == int(rows["bytes"].sum())
    assert sorted(rows["protocol"].tolist()) == [1, 6, 6, 6, 17, 17, 58]
    first = rows[0]
    assert (bytes(first["a"])[:4], int(first["a_port"]), int(first["b_port"])) == (bytes((10, 1, 0, 1)), 40001, 5001)
    assert first["payload"].tolist() == [1448 + 1 + 700, 1448 + 20]
    assert first["data_packets"].tolist() == [3, 2]
    assert int(first["handshake_ns"]) == 400_000
    assert first["first_ns"] == make.START_NS == scanned.first_ns
    assert scanned.start_ns == make.START_NS // 1_000_000 * 1_000_000
    agree(scanned)


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize(
    "data",
    [
        classic(frames(usual()), order=">"),
        classic(frames(usual()), nano=True),
        classic(frames(usual()), order=">", nano=True),
        modern(frames(usual())),
        modern(frames(usual()), order=">"),
        modern(frames(usual()), resolution=9),
        modern(frames(usual()), resolution=10),
    ],
    ids=["pcap-big", "pcap-ns", "pcap-big-ns", "pcapng", "pcapng-big", "pcapng-ns", "pcapng-100ps"],
)
def test_file_formats(data, block):
    scanned = scan(data, block)
    assert table(scanned) == REFERENCE
    assert scanned.counts["torn_bytes"] == scanned.counts["corrupt_records"] == 0
    agree(scanned)


LINKS = {
    "vlan": (make.ETHERNET, make.vlan(0x8100)),
    "qinq": (make.ETHERNET, make.vlan(0x88A8, 0x8100)),
    "three tags": (make.ETHERNET, make.vlan(0x9100, 0x8100, 0x8100)),
    "cooked": (make.SLL, make.cooked),
    "cooked 2": (make.SLL2, make.cooked2),
    "null": (make.NULL, make.null("<")),
    "null of another host": (make.NULL, make.null(">", 30)),
    "null with ethertypes": (make.NULL, lambda ip: make.ethernet(ip)[13:11:-1] + bytes(2) + ip),
    "loop": (make.LOOP, make.null(">", 24)),
    "raw": (make.RAW, make.bare),
    "raw BSD": (make.RAW_BSD, make.bare),
    "raw other": (make.RAW_OTHER, make.bare),
    "IPoIB": (make.IPOIB, make.ipoib),
}


@pytest.mark.parametrize("name", LINKS)
def test_link_types(name):
    link, wrap = LINKS[name]
    scanned = scan(classic(frames(usual(), wrap), link))
    assert table(scanned) == REFERENCE
    assert scanned.counts["not_ip"] == 0
    assert scanned.interfaces == [{"name": "", "linktype": link, "snap_bytes": 262144}]


def test_a_power_of_two_resolution_keeps_times_to_its_tick():
    scanned = scan(modern(frames(usual()), resolution=0x80 | 33))
    exact = [row[-2] for row in REFERENCE]
    # a tick of 2^-33 s is under a nanosecond; made and read by division, each rounds down once
    assert np.abs(scanned.conversations["first_ns"] - np.array(exact)).max() <= 1
    coarse = scan(modern(frames(usual()), resolution=0x80 | 10)).conversations
    assert np.abs(coarse["first_ns"] - np.array(exact)).max() <= 1e9 / 1024


def test_interfaces_and_sections_of_their_own_kind():
    packets = frames(usual())
    cooked = frames(usual(), make.cooked)
    half = len(packets) // 2
    first = (
        Blocks("<").interface(make.ETHERNET, name="eth0").interface(make.SLL, resolution=9, offset_s=100, name="any")
    )
    first.unknown()
    for number in range(half):
        # without offset 100 s in its ticks, the interface's own offset puts it back
        first.packet(cooked[number], 1, first.option(1, b"a comment")) if number % 2 else first.old_packet(
            packets[number]
        )
    second = Blocks(">", section_bytes=10**6).unknown().interface(make.ETHERNET, resolution=3 + 3, name="eth1")
    for number in range(half, len(packets)):
        second.packet(packets[number])
    scanned = scan(first.bytes() + second.unknown().bytes(), 13)
    assert table(scanned) == REFERENCE
    assert [one["name"] for one in scanned.interfaces] == ["eth0", "any", "eth1"]
    assert scanned.counts["unknown_blocks"] == 3 * 4  # statistics are known
    agree(scanned)


def test_simple_packets_have_no_time_and_are_counted():
    packets = frames(usual())
    made = Blocks().interface(snap=90)
    for one in packets:
        made.simple_packet(one.cut(90))
    scanned = scan(made.bytes())
    assert scanned.counts["without_time"] == scanned.counts["packets"] == len(packets)
    assert int(scanned.conversations["payload"].sum()) == sum(sum(row[9]) for row in REFERENCE)


def test_a_long_block_of_no_interest_is_passed_over_without_being_kept():
    packets = frames(usual())
    made = Blocks().interface()
    made.packet(packets[0]).block(0x4000_0BAD, bytes(3_000_000)).packet(packets[1])
    data = made.bytes()
    one = Scan()
    for at in range(0, len(data), 10_000):
        one.feed(memoryview(data)[at : at + 10_000])
        assert len(one._torn) < 20_000
    assert one.finish().counts["packets"] == 2
    cut = scan(data[:2_000_000])
    assert cut.counts["torn_bytes"] > 1_900_000


@pytest.mark.parametrize("data", [b"", b"\xd4\xc3", b"MZ" + bytes(100), b"\x0a\x0d\x0d\x0a" + bytes(60), bytes(24)])
def test_no_capture(data):
    with pytest.raises(UsageError, match="is not a capture"):
        scan(data)


def test_an_unknown_link_type_is_counted():
    scanned = scan(classic(frames(usual()), link=147))
    assert scanned.counts["skipped_link_types"] == scanned.counts["packets"] == len(usual())
    assert len(scanned.conversations) == 0


WHOLE = {
    "pcap": classic(frames(usual())),
    "pcapng": Blocks(">").interface(resolution=9).unknown().bytes() + modern(frames(usual())),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(0, 20_000), max_size=12), st.booleans())
def test_any_split_gives_the_same(name, cuts, damage):
    data = bytearray(WHOLE[name])
    if damage:
        data[2000:2016] = b"\xff" * 16
    made = Scan()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(places):
        made.feed(memoryview(data)[begin:end])
    split, whole = made.finish(), scan(bytes(data), len(data))
    assert np.array_equal(split.conversations, whole.conversations)
    assert split.counts == whole.counts
    agree(split)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_damage_anywhere_is_counted_and_ends(name, data):
    damaged = bytearray(WHOLE[name])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(24, len(damaged) - 1))
        damaged[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
    scanned = scan(
        bytes(damaged[: data.draw(st.integers(24, len(damaged)))]), data.draw(st.sampled_from([7, 500, 10**6]))
    )
    agree(scanned)
    assert all(number >= 0 for number in scanned.counts.values())
