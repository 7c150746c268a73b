"""What is odd in a capture is counted, and nothing of the rest is lost."""

import struct

import numpy as np
import pytest
from scapy.layers.inet import IP, TCP, UDP, fragment
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    fragment6,
)
from scapy.packet import Raw

from ringtap.analysis.pcap import export_scan_tables, read_captures
from ringtap.analysis.pcap import scan as scan_module
from ringtap.analysis.pcap.capture_text import _SENTENCES, _note, damage, describe
from ringtap.analysis.pcap.captured_traffic import Traffic
from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_dtypes import ARP, NOT_IP, is_ip
from tests.unit.capture_makers import (
    A4,
    A6,
    B4,
    B6,
    C4,
    START_NS,
    Blocks,
    Packet,
    Talk,
    arp,
    classic,
    ethernet,
    frames,
    modern,
    spaced,
    udp,
    usual,
    vlan,
    vxlan,
)

pytestmark = [pytest.mark.computes, pytest.mark.together]


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
        assert int(row["a_port"]) == (5 if size >= 14 + 20 + 2 else 0)
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
    assert odd(scanned) == {"malformed": 3, "not_ip": 1, "time_backwards": 1, "time_jumps": 1, "set_back": 1}
    assert sorted(scanned.conversations["payload"][:, 0].tolist()) == [0, 0, 50]


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


DAY_NS = 86_400_000_000_000


def of_times(*times_ns: int, **options) -> Scanned:
    one = frames(spaced([udp(A4, B4, (1, 2), 100)]))[0]
    return scan(classic([Packet(time_ns, one.data, one.length) for time_ns in times_ns], nano=True), **options)


@pytest.mark.parametrize("early", [0, 5, 12 * DAY_NS])
def test_a_clock_that_was_set_after_the_first_packet_keeps_all_times(early):
    """A device that captures before it knows the time: the first packet is of 1970."""
    times = [early, START_NS, START_NS + 1_000_000, START_NS + 3_000_000]
    scanned = of_times(*times)
    assert odd(scanned) == {"time_jumps": 1}
    (row,) = scanned.conversations
    assert (int(row["first_ns"]), int(row["last_ns"])) == (times[0], times[-1])
    assert (scanned.start_ns + scanned.cells["bin"] * scanned.bin_ns).tolist() == [
        time_ns // scanned.bin_ns * scanned.bin_ns for time_ns in times
    ]


def test_round_trips_after_a_clock_was_set_are_those_without():
    made = Talk(A4, B4, (40001, 5001)).open().data(0, 1448, 100).packets
    packets = frames(made)
    early = Packet(7, frames(spaced([udp(A4, B4, (1, 2), 100)]))[0].data, 142)
    alone, after = scan(classic(packets)), scan(classic([early, *packets]))
    for name in ("handshake_ns", "rtt_count", "rtt_sum_ns", "rtt_min_ns", "first_ns", "last_ns"):
        assert np.array_equal(after.conversations[name][1], alone.conversations[name][0]), name
    assert int(alone.conversations["handshake_ns"][0]) > 0


def test_a_time_of_another_age_in_the_middle_is_told():
    scanned = of_times(START_NS, 5, START_NS + 1_000_000)
    assert odd(scanned) == {"time_backwards": 1, "time_jumps": 2, "set_back": 1}
    assert (scanned.first_ns, scanned.last_ns) == (5, START_NS + 1_000_000)


def test_narrow_bins_of_a_long_capture_are_all_told_apart():
    """More than 2^31 bins: 36 minutes of microseconds."""
    times = [START_NS + minutes * 60_000_000_000 for minutes in (0, 35, 40, 80, 600)]
    scanned = of_times(*times, bin_ns=1_000)
    assert (scanned.start_ns + scanned.cells["bin"] * 1_000).tolist() == times
    assert odd(scanned) == {}


@pytest.mark.parametrize("first", ["simple", "impossible"])
def test_packets_without_a_time_count_at_the_next_where_none_came_before(first):
    packets = frames(spaced([udp(A4, B4, (1, 2), size) for size in (100, 200, 300)], 1_000_000))
    made = Blocks().interface().interface(offset_s=-(2**32) + 1)
    if first == "simple":
        made.simple_packet(packets[0])
    else:
        made.interfaces[1] = made.interfaces[0]  # whose offset is not taken into account
        made.packet(packets[0], 1)
    scanned = scan(made.packet(packets[1]).packet(packets[2]).bytes(), packets=True)
    assert odd(scanned) == {"without_time" if first == "simple" else "times_out_of_range": 1}
    (row,) = scanned.conversations
    assert row["packets"].tolist() == [3, 0]
    assert int(row["first_ns"]) == scanned.first_ns == packets[1].time_ns
    assert scanned.packets["time_ns"].tolist() == [packets[one].time_ns for one in (1, 1, 2)]
    assert scanned.cells["bin"].tolist() == [0, 0, 1]


def test_packets_without_a_time_are_not_timed():
    made = Talk(A4, B4, (40001, 5001)).open().data(0, 1448).packets
    blocks = Blocks().interface().packet(frames(spaced([udp(A4, B4, (1, 2), 9)]))[0])
    for one in frames(made):
        blocks.simple_packet(one)
    scanned = scan(blocks.bytes())
    (row,) = scanned.conversations[scanned.conversations["protocol"] == 6]
    assert (int(row["handshake_ns"]), row["rtt_count"].tolist()) == (-1, [0, 0])
    assert int(row["first_ns"]) == START_NS


@pytest.mark.parametrize("after_s", [29, 31, 59, 61])
@pytest.mark.parametrize("family", [4, 6])
def test_fragments_find_their_ports_for_a_minute(after_s, family):
    """RFC 8200, 4.5: reassembly takes 60 seconds."""
    if family == 4:
        whole = IP(src=A4, dst=B4, id=7) / UDP(sport=1000, dport=2000) / Raw(bytes(2000))
        parts = [bytes(one) for one in fragment(whole, 1480)]
    else:
        whole = IPv6(src=A6, dst=B6) / IPv6ExtHdrFragment(id=7) / UDP(sport=1000, dport=2000) / Raw(bytes(2000))
        parts = [bytes(one) for one in fragment6(whole, 1280)]
    scanned = scan(classic(frames([(0, parts[0]), (after_s * 10**9, parts[1])])))
    known = after_s <= 60
    assert len(scanned.conversations) == (1 if known else 2)
    assert scanned.counts["fragments_without_first"] == (0 if known else 1)


def test_several_networks_in_one_conversation_are_told():
    packets = [udp(A4, B4, (1, 2), 100), bytes(IP(src=A4, dst=B4) / TCP(sport=5, dport=6, flags="A"))]
    kept = [
        Packet(START_NS + place, wrap(packet), 200)
        for place, (packet, wrap) in enumerate(
            (packet, wrap) for packet in packets for wrap in (ethernet, vlan(0x8100), vlan(0x8100), ethernet)
        )
    ]
    scanned = scan(classic(kept))
    assert len(scanned.conversations) == 2
    assert odd(scanned) == {"network_changes": 2 + 2}
    there, back = (bytes(12) + b"\x08\x00" + udp(*ends, 9) for ends in ((A4, C4, (1, 2)), (C4, A4, (2, 1))))
    other = vxlan(there).replace(b"\x08\0\0\0\0\0\x2a\0", b"\x08\0\0\0\0\0\x2b\0")
    assert odd(of(vxlan(there), vxlan(back), vxlan(there))) == {}
    assert odd(of(vxlan(there), other)) == {"network_changes": 1}


def test_ip_in_pppoe():
    """RFC 2516: a session's PPP frames; those of the discovery and of PPP itself are no IP."""
    ip = [udp(A4, B4, (1, 2), 100), udp(A6, B6, (1, 2), 100)]

    def session(protocol: int, inside: bytes) -> bytes:
        size = (len(inside) + 2).to_bytes(2, "big")
        return bytes(12) + b"\x88\x64\x11\x00\x00\x07" + size + protocol.to_bytes(2, "big") + inside

    kept = [session(0x21, ip[0]), session(0x57, ip[1]), session(0xC021, bytes(8)), session(0x21, ip[0])[:21]]
    scanned = scan(classic([Packet(START_NS + place, one, len(one)) for place, one in enumerate(kept)]))
    assert odd(scanned) == {"not_ip": 2}
    rows = scanned.conversations[is_ip(scanned.conversations["kind"])]
    assert rows["payload"].tolist() == [[100, 0], [100, 0]]


def test_frames_that_are_no_ip_have_rows_of_their_own():
    lldp = Packet(START_NS, bytes(12) + b"\x88\xcc" + bytes(46), 60)
    scanned = scan(classic([Packet(START_NS, arp(), 60), lldp, lldp]))
    assert odd(scanned) == {"not_ip": 3}
    rows = scanned.conversations
    assert rows["kind"].tolist() == [ARP, NOT_IP]
    assert rows["bytes"].tolist() == [[60, 0], [120, 0]]
    traffic = Traffic(scanned)
    other = arp().replace(b"\x08\x00\x06\x04", b"\x86\xdd\x06\x10", 1)  # of IPv6
    assert [len(Traffic(scan(classic([Packet(START_NS, other, 60)]))).select("arp").rows)] == [1]
    assert len(traffic.rows) == 0
    assert [len(traffic.select(words).rows) for words in ("not tcp", "arp", f"host {B4}")] == [2, 1, 1]
    assert export_scan_tables.addresses(rows["a"], rows["family"]) == [A4, ""]


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


def _blocks(packets: list[Packet]) -> bytes:
    made = Blocks().interface(snap=4 << 20)
    for one in packets:
        made.packet(one)
    return made.bytes()


@pytest.mark.parametrize("form", [lambda packets: classic(packets, snap=4 << 20), _blocks])
@pytest.mark.parametrize(("more_bytes", "length"), [(2 << 20, (2 << 20) + 142), (8, 142)])
def test_a_record_is_as_sound_after_damage_as_before(form, more_bytes, length):
    """Of 2 MiB, or with more captured bytes than its length, as libpcap reads it."""
    made = frames(spaced([udp(A4, B4, (1, 2), 100, id=number) for number in range(6)]))
    packets = [Packet(one.time_ns, one.data + bytes(more_bytes), length) for one in made]
    data = form(packets)
    assert scan(data).counts["packets"] == len(packets)
    at = data.index(packets[1].data)
    before = 8 if form is not _blocks else 24
    damaged = data[: at - before] + b"\xff\xff\xff\x7f" + data[at - before + 4 :]
    scanned = scan(damaged)
    assert (scanned.counts["packets"], scanned.counts["corrupt_records"]) == (len(packets) - 1, 1)


def test_noise_after_the_header_ends():
    noise = np.random.default_rng(1).bytes(300_000)
    scanned = scan(classic([]) + noise)
    assert scanned.counts["corrupt_bytes"] + scanned.counts["torn_bytes"] > 100_000


def test_more_conversations_than_are_told_apart(monkeypatch):
    monkeypatch.setattr(scan_module, "MAX_CONVERSATIONS", 5)
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
    monkeypatch.setattr(scan_module, "_CELLS_IN_MEMORY", 0)
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


def test_a_clock_that_is_set_back_by_an_hour_is_told_and_no_rate_spans_it(tmp_path):
    second = 1_000_000_000
    scanned = of_times(START_NS, START_NS + second, START_NS - 3600 * second, START_NS - 3599 * second)
    assert odd(scanned) == {"time_backwards": 2, "set_back": 2}
    path = tmp_path / "set.pcap"
    one = frames(spaced([udp(A4, B4, (1, 2), 100)]))[0]
    times_ns = [START_NS + after_s * second for after_s in (0, 1, -3600, -3599)]
    path.write_bytes(classic([Packet(time_ns, one.data, one.length) for time_ns in times_ns], nano=True))
    lines = describe(read_captures([path]), None, False)
    assert "bit/s" not in "\n".join(lines)
    assert any("2 packets are more than a minute earlier" in line for line in lines)
    # processors that capture together write packets within seconds: this is no set clock
    assert odd(of_times(START_NS, START_NS - 30 * second)) == {"time_backwards": 1}


def _drops(order: str, interface: int, dropped: int, by_system: int = 0) -> bytes:
    """The body of a block of statistics."""
    blocks = Blocks(order)
    options = blocks.option(5, struct.pack(f"{order}Q", dropped)) + blocks.option(
        7, struct.pack(f"{order}Q", by_system)
    )
    return struct.pack(f"{order}III", interface, 0, 0) + options + blocks.option(0, b"")


@pytest.mark.parametrize("order", ["<", ">"])
def test_drops_that_the_capture_counts_itself(order):
    packets = frames(usual())[:4]
    blocks = Blocks(order).interface().interface()
    for number, packet in enumerate(packets):
        blocks.packet(packet, number % 2).block(5, _drops(order, number % 2, 10 * number))  # since the start
    assert odd(scan(blocks.bytes())) == {"dropped": 20 + 30}
    assert odd(scan(Blocks(order).interface().block(5, _drops(order, 0, 5, 7)).packet(packets[0]).bytes())) == {
        "dropped": 12
    }
    blocks = Blocks(order).interface()
    for packet in packets:
        blocks.packet(packet, 0, blocks.option(4, struct.pack(f"{order}Q", 3)) + blocks.option(0, b""))
    assert odd(scan(blocks.bytes())) == {"dropped": 12}
    for line in damage(scan(blocks.bytes()).counts):
        assert line == "12 packets were dropped, as the capture itself counts: they are missing here"


def test_thousands_of_interfaces_and_one_that_is_not_described():
    packets = frames(usual())[:3]
    blocks = Blocks()
    for _ in range(3000):
        blocks.interface()
    for packet, number in zip(packets, (0, 1500, 2999), strict=True):
        blocks.packet(packet, number)
    made = scan(blocks.bytes())
    assert (made.counts["packets"], odd(made)) == (3, {})
    missing = Blocks().interface().packet(packets[0])
    missing.interfaces += missing.interfaces  # which the file does not have
    made = scan(missing.packet(packets[1], 1).bytes())
    assert (made.counts["packets"], odd(made)) == (1, {"without_interface": 1})


def test_one_fragment_is_said_of_in_the_singular():
    assert _note(1, *_SENTENCES["fragments"]) == "1 IP fragment counts for the conversation of the first one"
    assert _note(2, *_SENTENCES["fragments"]) == "2 IP fragments count for the conversation of the first one"
