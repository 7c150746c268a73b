"""What is odd in a capture is counted, and nothing of the rest is lost."""

import struct

import numpy as np
import pytest
from scapy.layers.inet import IP, TCP, UDP, fragment
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop, IPv6ExtHdrRouting
from scapy.packet import Raw

from ringtap.analysis.pcap import kernel_room
from ringtap.analysis.pcap.scan import Scan, Scanned
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    Packet,
    arp,
    classic,
    ethernet,
    frames,
    modern,
    spaced,
    udp,
    usual,
)


def scan(data: bytes, **options) -> Scanned:
    made = Scan(**options)
    made.feed(memoryview(data))
    return made.finish()


def of(*packets: bytes, wrap=ethernet) -> Scanned:
    return scan(classic(frames(spaced(packets), wrap)))


def odd(scanned: Scanned) -> dict[str, int]:
    return {name: number for name, number in scanned.counts.items() if number and name not in ("packets", "bytes")}


def test_fragments_belong_to_their_first():
    whole = IP(src=A4, dst=B4, id=7) / UDP(sport=1000, dport=2000) / Raw(bytes(4000))
    parts = [bytes(one) for one in fragment(whole, 1480)]
    scanned = of(*parts, udp(B4, A4, (2000, 1000), 10))
    (row,) = scanned.conversations
    assert row["packets"].tolist() == [3, 1]
    assert row["payload"].tolist() == [4000, 10]
    assert odd(scanned) == {"fragments": 3}


def test_later_fragments_alone_are_a_conversation_of_the_protocol():
    whole = IP(src=A4, dst=B4, id=7) / UDP(sport=1000, dport=2000) / Raw(bytes(4000))
    scanned = of(*[bytes(one) for one in fragment(whole, 1480)][1:])
    (row,) = scanned.conversations
    assert (int(row["protocol"]), int(row["a_port"]), int(row["b_port"])) == (17, 0, 0)
    assert odd(scanned) == {"fragments": 2, "fragments_without_first": 2}


def test_ipv6_extension_headers_and_fragments():
    extended = IPv6(src=A6, dst=B6) / IPv6ExtHdrHopByHop() / IPv6ExtHdrRouting() / IPv6ExtHdrDestOpt()
    parts = [
        IPv6(src=A6, dst=B6, nh=44)
        / IPv6ExtHdrFragment(nh=17, id=9, offset=0, m=1)
        / Raw(bytes(UDP(sport=1, dport=2, len=24, chksum=1)) + bytes(8)),
        IPv6(src=A6, dst=B6, nh=44) / IPv6ExtHdrFragment(nh=17, id=9, offset=2, m=0) / Raw(bytes(8)),
        # an atomic fragment is whole
        IPv6(src=A6, dst=B6, nh=44) / IPv6ExtHdrFragment(nh=17, id=9) / UDP(sport=1, dport=2) / Raw(bytes(5)),
    ]
    scanned = of(bytes(extended / UDP(sport=1, dport=2) / Raw(bytes(100))), *map(bytes, parts))
    (row,) = scanned.conversations
    assert (int(row["a_port"]), int(row["b_port"]), int(row["protocol"])) == (1, 2, 17)
    assert row["payload"].tolist() == [100 + 8 + 8 + 5, 0]
    assert odd(scanned) == {"fragments": 2}


def test_ipv4_options():
    packet = IP(src=A4, dst=B4, options=[b"\x94\x04\0\0"]) / TCP(sport=5, dport=6) / Raw(bytes(77))
    (row,) = of(bytes(packet)).conversations
    assert (int(row["a_port"]), row["payload"].tolist()) == (5, [77, 0])


def test_a_length_of_zero_is_that_of_the_frame():
    offload = bytearray(bytes(IP(src=A4, dst=B4) / TCP(sport=5, dport=6) / Raw(bytes(900))))
    offload[2:4] = b"\0\0"
    jumbo = bytearray(bytes(IPv6(src=A6, dst=B6) / TCP(sport=5, dport=6) / Raw(bytes(800))))
    jumbo[4:6] = b"\0\0"
    scanned = of(bytes(offload), bytes(jumbo))
    assert sorted(scanned.conversations["payload"][:, 0].tolist()) == [800, 900]
    assert odd(scanned) == {"zero_length_ip": 2}


@pytest.mark.parametrize("size", range(14 + 20 + 20))
def test_a_snap_length_of_any_size(size):
    packets = [
        one.cut(size) for one in frames(spaced([bytes(IP(src=A4, dst=B4) / TCP(sport=5, dport=6) / Raw(bytes(500)))]))
    ]
    scanned = scan(classic(packets))
    assert odd(scanned) == {"cut_by_snap": 1}
    assert scanned.counts["bytes"] == 554
    known = size >= 14 + 20
    assert len(scanned.conversations) == known
    if known:
        (row,) = scanned.conversations
        assert row["bytes"].tolist() == [554, 0]
        assert int(row["a_port"]) == (5 if size >= 14 + 20 + 4 else 0)
        assert int(row["payload"][0]) == (500 if size >= 14 + 20 + 13 else 0)


def test_the_payload_is_that_of_the_wire_where_the_capture_is_cut():
    full, cut = scan(classic(frames(usual()))), scan(classic([one.cut(96) for one in frames(usual())]))
    assert np.array_equal(full.conversations, cut.conversations)
    assert odd(cut) == {}


def test_frames_that_are_no_ip_and_headers_that_lie():
    short = bytearray(bytes(IP(src=A4, dst=B4) / UDP(sport=5, dport=6) / Raw(bytes(50))))
    short[0] = 0x43
    beyond = bytearray(bytes(IP(src=A4, dst=B4) / UDP(sport=5, dport=6) / Raw(bytes(50))))
    beyond[2:4] = (9000).to_bytes(2, "big")
    small = bytes(IP(src=A4, dst=B4) / TCP(sport=5, dport=6, dataofs=2) / Raw(bytes(50)))
    packets = [*frames(spaced([bytes(short), bytes(beyond), small])), Packet(1, arp(), 60)]
    scanned = scan(classic(packets))
    assert odd(scanned) == {"malformed": 3, "not_ip": 1, "times_out_of_range": 1}
    assert sorted(scanned.conversations["payload"][:, 0].tolist()) == [0, 50]


def test_time_that_goes_back():
    packets = frames(spaced([udp(A4, B4, (1, 2), 100) for _ in range(6)], 1_000_000))
    order = [3, 4, 0, 1, 5, 2]
    scanned, sorted_ = scan(classic([packets[one] for one in order])), scan(classic(packets))
    assert odd(scanned) == {"time_backwards": 3}
    assert np.array_equal(scanned.conversations, sorted_.conversations)
    assert (scanned.start_ns, scanned.first_ns, scanned.last_ns) == (
        sorted_.start_ns,
        sorted_.first_ns,
        sorted_.last_ns,
    )
    assert np.array_equal(np.sort(scanned.cells), sorted_.cells)


def test_a_time_of_another_age_is_counted_at_the_latest_before():
    packets = frames(spaced([udp(A4, B4, (1, 2), 100) for _ in range(3)]))
    packets[1] = Packet(5, packets[1].data, packets[1].length)
    scanned = scan(classic(packets))
    assert odd(scanned) == {"times_out_of_range": 1}
    (row,) = scanned.conversations
    assert row["packets"].tolist() == [3, 0]
    assert int(row["first_ns"]) == packets[0].time_ns


@pytest.mark.parametrize("form", [classic, modern])
def test_a_capture_that_ends_in_a_packet(form):
    data = form(frames(usual()))
    scanned = scan(data[:-5])
    whole = scan(data)
    assert scanned.counts["packets"] == whole.counts["packets"] - 1
    assert 0 < scanned.counts["torn_bytes"] < 2000


@pytest.mark.parametrize("form", [classic, modern])
@pytest.mark.parametrize("block", [1, 97, 10**6])
def test_after_damage_the_next_sound_record_is_found(form, block):
    packets = frames(usual()) * 3
    data = bytearray(form(packets))
    place = data.index(packets[20].data) - 8  # the lengths before the 21st packet
    data[place : place + 8] = b"\xff" * 8
    made = Scan()
    for at in range(0, len(data), block):
        made.feed(memoryview(data)[at : at + block])
    scanned = made.finish()
    lost = len(packets) - scanned.counts["packets"]
    assert (scanned.counts["corrupt_records"] == 1) == (form is classic)
    assert lost == 1
    if form is classic:
        assert scanned.counts["corrupt_bytes"] == 16 + len(packets[20].data)


def test_damage_to_a_block_of_pcapng():
    packets = frames(usual()) * 3
    data = bytearray(modern(packets))
    place = data.index(packets[20].data) - 24  # the block's length
    data[place : place + 4] = b"\xff\xff\xff\x7f"
    scanned = scan(bytes(data))
    assert scanned.counts["corrupt_records"] == 1
    assert scanned.counts["packets"] == len(packets) - 1


def test_noise_after_the_header_ends():
    noise = np.random.default_rng(1).bytes(300_000)
    scanned = scan(classic([]) + noise)
    assert scanned.counts["corrupt_bytes"] + scanned.counts["torn_bytes"] > 100_000


def test_more_conversations_than_are_told_apart(monkeypatch):
    monkeypatch.setattr(kernel_room, "MOST_CONVERSATIONS", 5)
    packets = [udp(A4, B4, (1000 + number % 9, 2000), 10) for number in range(27)]
    scanned = of(*packets)
    rows = scanned.conversations
    assert len(rows) == 6
    assert rows["packets"][:, 0].tolist() == [3] * 5 + [12]
    assert int(rows["family"][5]) == 0
    assert odd(scanned) == {"packets_over_limit": 12}
    # what is said of one connection is not said of the row that many share
    segments = [
        bytes(IP(src=A4, dst=B4) / TCP(sport=1000 + number % 9, dport=6, seq=number * 500, flags="A") / Raw(bytes(100)))
        for number in (*range(27), *range(9))
    ]
    shared = of(*segments).conversations[5]
    assert (shared["packets"].tolist(), shared["segments"].tolist()) == ([16, 0], [16, 0])
    assert shared["retransmitted_bytes"].tolist() == shared["out_of_order_bytes"].tolist() == [0, 0]


def test_a_table_that_grows_finds_what_it_held():
    """Rows beyond what the first table has room for; both directions, IPv4 and IPv6."""
    packets = []
    for ends, place in (((A4, B4), 20), ((A6, B6), 40)):
        for way, size in ((ends, 1), (ends[::-1], 2)):
            made = bytearray(udp(*way, (0, 0), size))
            for number in range(2600):
                ports = (number, 60_000) if size == 1 else (60_000, number)
                struct.pack_into(">HH", made, place, *ports)
                packets.append(bytes(made))
    scanned = of(*packets)
    assert len(scanned.conversations) == 5200
    assert np.all(scanned.conversations["packets"] == 1)
    assert np.all(scanned.conversations["payload"] == [1, 2])


def test_cells_that_do_not_fit_go_to_a_file(monkeypatch):
    data = classic(frames(usual()))
    whole = scan(data, bin_ns=1000)
    monkeypatch.setattr(kernel_room, "_CELLS_IN_MEMORY", 0)
    spilled = scan(data, bin_ns=1000)
    assert isinstance(spilled.cells, np.memmap)
    assert np.array_equal(np.asarray(spilled.cells), whole.cells)
    assert np.array_equal(spilled.conversations, whole.conversations)


def test_single_packets():
    scanned = scan(classic(frames(usual())), packets=True)
    assert len(scanned.packets) == len(usual())
    assert np.all(np.diff(scanned.packets["time_ns"]) >= 0)
    sums = np.bincount(scanned.packets["flow"], scanned.packets["payload"], minlength=2 * len(scanned.conversations))
    assert np.array_equal(sums, scanned.conversations["payload"].reshape(-1))


def test_a_full_cell_is_followed_by_another():
    """65,536 packets of one flow in one bin are more than a cell's counter holds."""
    one = frames(spaced([udp(A4, C4, (1, 2), 1)]))[0]
    record = struct.pack("<IIII", 1, 0, len(one.data), one.length) + one.data
    scanned = scan(classic([]) + record * 66_000)
    assert scanned.cells["packets"].astype(int).sum() == 66_000
    assert len(scanned.cells) == 2
