"""What TCP says beside its bytes."""

import random

import numpy as np
import pytest

from ringtap.analysis.pcap.kernels.scan_state import MAX_HOLES
from ringtap.analysis.pcap.scan import Scan
from tests.unit.capture_makers import A4, A6, B4, B6, MS, US, Talk, classic, frames

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


def row(*talks: Talk):
    packets = sorted((one for talk in talks for one in talk.packets), key=lambda one: one[0])
    made = Scan()
    made.feed(memoryview(classic(frames(packets), nano=True)))
    (found,) = made.finish().conversations
    return found


def talk(**options) -> Talk:
    return Talk(A4, B4, (40001, 5001)).open(**options)


def test_in_order_nothing_is_said():
    found = row(talk().data(0, *[1448] * 20).close())
    for name in ("retransmitted_bytes", "out_of_order_bytes", "zero_windows", "resets"):
        assert found[name].tolist() == [0, 0], name
    assert found["segments"].tolist() == [20, 0]
    # each of 20 segments is acknowledged after 100 µs; the handshake is no data
    assert found["rtt_count"].tolist() == [20, 0]
    assert found["rtt_min_ns"].tolist() == [100 * US, -1]
    assert found["rtt_sum_ns"].tolist() == [20 * 100 * US, 0]
    assert found["handshake_ns"] == 400 * US


def test_duplicate_acknowledgements_make_no_retransmission_of_what_comes_within_the_round_trip():
    """A sender learns of a gap a round trip after it was left at the soonest; tshark decides otherwise."""
    made = talk(rtt_ns=100 * MS)
    begin, answer = made.next
    made.send(0, 1000).put(0, begin + 2000, 1000).wait(MS)
    for _ in range(4):
        made.put(1, answer).wait(MS)
    found = row(made.wait(5 * MS).put(0, begin + 1000, 1000))
    assert found["retransmitted_bytes"].tolist() == [0, 0]
    assert found["out_of_order_bytes"].tolist() == [1000, 0]


def test_bytes_seen_twice_are_retransmitted_and_not_timed():
    made = talk()
    begin = made.next[0]
    made.send(0, 1000).send(0, 1000).wait(MS).put(0, begin, 1000).wait(MS).put(1, made.next[1])
    found = row(made)
    assert found["retransmitted_bytes"].tolist() == [1000, 0]
    assert found["out_of_order_bytes"].tolist() == [0, 0]
    assert found["rtt_count"].tolist() == [0, 0]


def test_a_partly_new_segment_is_retransmitted_in_part():
    made = talk()
    begin = made.next[0]
    made.send(0, 1000).put(0, begin + 400, 1000)
    found = row(made)
    assert found["retransmitted_bytes"].tolist() == found["repeated_bytes"].tolist() == [600, 0]


@pytest.mark.parametrize(("after_ns", "name"), [(300 * US, "out_of_order_bytes"), (30 * MS, "retransmitted_bytes")])
def test_a_hole_filled_soon_is_out_of_order_and_later_a_retransmission(after_ns, name):
    made = talk()  # its handshake took 400 µs
    begin = made.next[0]
    made.put(0, begin + 1000, 1000).put(0, begin + 2000, 500).wait(after_ns).put(0, begin, 1000)
    found = row(made)
    assert {one: found[one].tolist() for one in ("out_of_order_bytes", "retransmitted_bytes")} == {
        "out_of_order_bytes": [0, 0],
        "retransmitted_bytes": [0, 0],
    } | {name: [1000, 0]}
    assert found["repeated_bytes"].tolist() == [0, 0], "each byte was captured once"


@pytest.mark.parametrize("seed", range(8))
def test_payload_less_repeated_bytes_is_each_byte_once(seed):
    """Segments in any order, some of them lost before the capture point and some captured twice."""
    chance = random.Random(seed)
    made = talk()
    begin, seen, end = made.next[0], set[int](), 0
    for _ in range(80):
        first = max(end + chance.choice([0, 0, 0, 700, -chance.randrange(1, 5000)]), 0)
        segment = range(first, first + chance.randrange(1, 1449))
        both = seen.union(segment)
        if sum(one - 1 not in both for one in both - {0}) > MAX_HOLES:  # the oldest hole would be forgotten
            continue
        made.wait(chance.choice([US, 30 * MS])).put(0, begin + first, len(segment))
        seen = both
        end = max(end, segment.stop)
    packets = frames(made.packets)
    scan = Scan(packets=True)
    scan.feed(memoryview(classic(packets, nano=True)))
    found = scan.finish()
    (conversation,) = found.conversations
    assert conversation["payload"][0] - conversation["repeated_bytes"][0] == len(seen)
    assert found.packets["repeated_bytes"].sum() == conversation["repeated_bytes"].sum() > 0
    assert (found.packets["repeated_bytes"] <= found.packets["payload"]).all()


def test_a_hole_filled_from_its_middle_and_twice():
    made = talk()
    begin = made.next[0]
    made.put(0, begin + 3000, 1000)
    for at in (1000, 0, 2000, 1000):  # middle, front, back, and the middle again
        made.wait(10 * US).put(0, begin + at, 1000)
    found = row(made)
    assert found["out_of_order_bytes"].tolist() == [3000, 0]
    assert found["retransmitted_bytes"].tolist() == [1000, 0]


def test_many_holes_forget_the_oldest():
    made = talk()
    begin = made.next[0]
    for number in range(6):  # five holes of 1000 between six segments; four are kept
        made.put(0, begin + 2000 * number, 1000)
    for number in range(5):
        made.wait(US).put(0, begin + 2000 * number + 1000, 1000)
    found = row(made)
    assert found["out_of_order_bytes"].tolist() == [4000, 0]
    assert found["retransmitted_bytes"].tolist() == [1000, 0]


def test_sequence_numbers_wrap():
    made = talk()  # the client's begin 4,096 before the wrap
    made.data(0, *[1448] * 8)
    begin = made.next[0]
    made.put(0, begin - 1448, 1448)
    found = row(made)
    assert found["retransmitted_bytes"].tolist() == [1448, 0]
    assert found["payload"].tolist() == [9 * 1448, 0]


def test_keep_alives_are_no_retransmissions():
    made = talk().data(0, 100)
    begin = made.next[0]
    made.put(0, begin - 1, 1).put(0, begin - 1, 0)
    found = row(made)
    assert found["retransmitted_bytes"].tolist() == [0, 0]
    assert found["repeated_bytes"].tolist() == [1, 0]


def test_zero_windows_and_resets():
    made = talk().data(0, 100)
    made.put(1, made.next[1], window=0).put(1, made.next[1], window=0).put(0, made.next[0], flags="RA", window=0)
    found = row(made)
    assert found["zero_windows"].tolist() == [0, 2]
    assert found["resets"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("mss", "timestamps", "size", "segments"),
    [(1460, True, 14480, 10), (1460, True, 14481, 11), (1460, False, 14600, 10), (8960, True, 17896, 2)],
)
def test_wire_segments_are_by_the_handshake(mss, timestamps, size, segments):
    assert row(talk(mss=mss, timestamps=timestamps).data(0, size))["segments"].tolist() == [segments, 0]


@pytest.mark.parametrize(("ends", "size"), [((A4, B4), 1448), ((A6, B6), 1428)])
def test_wire_segments_without_a_handshake(ends, size):
    made = Talk(*ends, (40001, 5001))
    options = [("NOP", None), ("NOP", None), ("Timestamp", (1, 1))]
    made.send(0, size * 3, options=options)
    assert row(made)["segments"].tolist() == [3, 0]


def test_a_handshake_sent_twice_is_not_timed():
    made = Talk(A4, B4, (40001, 5001))
    made.put(0, made.next[0], 0, "S").wait(MS).open()
    assert row(made)["handshake_ns"] == -1


def syn_ack(made: Talk, acknowledged: int) -> Talk:
    """A SYN/ACK of the server that acknowledges this number."""
    right, made.next[0] = made.next[0], acknowledged
    made.put(1, made.next[1], flags="SA")
    made.next[0] = right
    made.next[1] += 1
    return made


def test_a_syn_ack_of_another_connection_ends_no_handshake():
    made = Talk(A4, B4, (40001, 5001)).send(0, 0, "S").wait(60 * MS)
    syn_ack(made, made.next[0] + 77_000).wait(MS).put(0, made.next[0])
    assert row(made)["handshake_ns"] == -1


def test_a_syn_ack_of_another_connection_keeps_none_from_the_right_one():
    made = Talk(A4, B4, (40001, 5001)).send(0, 0, "S")
    syn_ack(made, made.next[0] - 5_000).wait(MS)
    made.next[1] += 30_000
    syn_ack(made, made.next[0]).wait(MS).put(0, made.next[0])
    assert row(made)["handshake_ns"] == 2 * MS + 10 * US


def test_an_acknowledgement_of_an_earlier_connection_ends_no_handshake():
    made = Talk(A4, B4, (40001, 5001)).send(0, 0, "S").wait(MS)
    syn_ack(made, made.next[0])
    new, made.next[1] = made.next[1], made.next[1] - 90_000
    made.wait(MS).put(0, made.next[0])
    made.next[1] = new
    made.wait(3 * MS).put(0, made.next[0])
    assert row(made)["handshake_ns"] == 5 * MS + 10 * US


def test_no_round_trip_spans_a_clock_that_was_set():
    made = Talk(A4, B4, (40001, 5001)).send(0, 0, "S").wait(3600_000 * MS)
    made.send(1, 0, "SA").send(0).send(0, 1000).wait(3600_000 * MS).send(1)
    found = row(made)
    assert found["handshake_ns"] == -1
    assert found["rtt_count"].tolist() == [0, 0]


def gap(made: Talk, revealed_by: str) -> Talk:
    """1,000 bytes that are not in the capture, and the packet that tells of them."""
    made.next[0] += 1000
    return made.put(0, made.next[0]) if revealed_by == "sender" else made.put(1, made.next[1])


@pytest.mark.parametrize("revealed_by", ["sender", "receiver"])
@pytest.mark.parametrize(("after_ns", "name"), [(300 * US, "out_of_order_bytes"), (30 * MS, "retransmitted_bytes")])
def test_bytes_of_a_gap_that_a_packet_without_payload_revealed(revealed_by, after_ns, name):
    made = talk().data(0, 500)
    begin = made.next[0]
    found = row(gap(made, revealed_by).wait(after_ns).put(0, begin, 586))
    both = ("out_of_order_bytes", "retransmitted_bytes")
    assert {one: found[one].tolist() for one in both} == {one: [0, 0] for one in both} | {name: [586, 0]}


def test_data_behind_a_gap_that_was_revealed_is_new():
    made = talk().data(0, 500)
    found = row(gap(made, "receiver").send(0, 700).put(0, made.next[0]))
    assert found["out_of_order_bytes"].tolist() == found["retransmitted_bytes"].tolist() == [0, 0]


def test_ports_used_again_begin_anew():
    first, second = talk().data(0, 1000, 1000).close(), Talk(A4, B4, (40001, 5001)).wait(50 * MS)
    second.next = [5_000, 9_000]
    found = row(first, second.open().data(0, 1000))
    assert found["retransmitted_bytes"].tolist() == [0, 0]
    assert found["payload"].tolist() == [3000, 0]
    assert found["handshake_ns"] == 400 * US  # of the first


def test_another_connection_without_its_handshake_is_no_retransmission():
    made = talk().data(0, 1000)
    made.next[0] += 2**31 - 5000
    found = row(made.data(0, 1000))
    assert found["retransmitted_bytes"].tolist() == [0, 0]


def test_the_answering_side_is_a_where_the_capture_begins_with_it():
    made = talk().data(0, 1000).data(1, 500)
    made.packets = made.packets[4:]
    found = row(made)
    assert int(found["a_port"]) == 5001
    assert found["payload"].tolist() == [500, 0]
    assert np.all(found["retransmitted_bytes"] == 0)
