"""Follows TCP connections: retransmissions, order, round trips, windows, resets, and segments on the wire.

Sequence numbers are compared modulo 2^32 (RFC 9293, 3.4). Bytes that were seen before are repeated, and retransmitted.
Bytes that fill a hole are out of order if they come within the handshake's round trip (3 ms if none was seen) of the
packet that left the hole; otherwise they are retransmissions of bytes lost before the capture point. A hole is left by
a packet further ahead, with or without payload, and by an acknowledgement of bytes that were not captured. Round trips
are timed for one segment at a time, and not across a retransmission (Karn and Partridge, SIGCOMM 1987).

tshark, by contrast, classifies whole segments. A segment below the highest byte sent is out of order if it comes within
that time of the highest segment, otherwise it is a retransmission. It is always a retransmission if it was acknowledged
before or ends at the highest byte.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, get, put, row_of, work_of
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load8,
    load32,
    load64,
    store32,
    store64,
    swapped16,
    swapped32,
)
from ringtap.analysis.pcap.scan_dtypes import CONVERSATION, PACKET, offsets

_RETRANSMITTED, _REPEATED, _OUT_OF_ORDER, _ZERO_WINDOWS, _RESETS, _RTT_COUNT, _RTT_SUM, _RTT_MIN, _HANDSHAKE = offsets(
    CONVERSATION,
    "retransmitted_bytes",
    "repeated_bytes",
    "out_of_order_bytes",
    "zero_windows",
    "resets",
    "rtt_count",
    "rtt_sum_ns",
    "rtt_min_ns",
    "handshake_ns",
)
_PACKET_REPEATED = offsets(PACKET, "repeated_bytes")[0] - PACKET.itemsize  # from the end of the row on
_FIN, _SYN, _RST, _PSH, _ACK = 1, 2, 4, 8, 16
_MAX_JUMP = 2**30  # a window is smaller: this is another connection between the same ports
_MAX_SYN_BYTES = 2**16  # of data with a SYN (RFC 7413)


@inlined
def _signed(value: int) -> int:
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@inlined
def _set_hole(hole: int, begin: int, end: int, time_ns: int) -> None:
    store64(hole + ks.HOLE_FROM, begin)
    store64(hole + ks.HOLE_TO, end)
    store64(hole + ks.HOLE_NS, time_ns)


@inlined
def _holes_of(state: int, flow: int) -> int:
    return get(state, ks.HOLES) + flow * (ks.HOLE_BYTES * ks.MAX_HOLES)


@kernel
def _add_hole(state: int, flow: int, work: int, begin: int, end: int, time_ns: int) -> None:
    """Store a hole; the oldest is dropped if there are too many."""
    holes, number = _holes_of(state, flow), load64(work + ks.D_HOLES)
    if number == ks.MAX_HOLES:
        number -= 1
        for moved in range(number):
            after = holes + (moved + 1) * ks.HOLE_BYTES
            _set_hole(after - ks.HOLE_BYTES, load64(after), load64(after + ks.HOLE_TO), load64(after + ks.HOLE_NS))
    _set_hole(holes + number * ks.HOLE_BYTES, begin, end, time_ns)
    store64(work + ks.D_HOLES, number + 1)


@kernel
def _fill(state: int, flow: int, work: int, sequence: int, payload: int, time_ns: int) -> tuple[int, int]:
    """Remove the bytes of a segment from the holes; return how many there were, and how many are out of order."""
    holes, number = _holes_of(state, flow), load64(work + ks.D_HOLES)
    limit = load64(row_of(state, flow) + _HANDSHAKE)
    if limit <= 0:
        limit = ks.MAX_OUT_OF_ORDER_NS
    filled = in_time = 0
    index = 0
    while index < number:
        hole = holes + index * ks.HOLE_BYTES
        left, since = load64(hole), load64(hole + ks.HOLE_NS)
        begin, end = _signed(left - sequence), _signed(load64(hole + ks.HOLE_TO) - sequence)
        first, last = max(begin, 0), min(end, payload)
        if first >= last:
            index += 1
            continue
        filled += last - first
        if time_ns < 0 or since < 0 or time_ns - since <= limit:
            in_time += last - first
        if first > begin and last < end:  # in the middle: the part after it becomes a hole of its own
            _set_hole(hole, left, (sequence + first) & 0xFFFFFFFF, since)
            if number < ks.MAX_HOLES:
                tail = holes + number * ks.HOLE_BYTES
                _set_hole(tail, (sequence + last) & 0xFFFFFFFF, (sequence + end) & 0xFFFFFFFF, since)
                number += 1
            index += 1
        elif first > begin:
            _set_hole(hole, left, (sequence + first) & 0xFFFFFFFF, since)
            index += 1
        elif last < end:
            _set_hole(hole, (sequence + last) & 0xFFFFFFFF, (sequence + end) & 0xFFFFFFFF, since)
            index += 1
        else:
            number -= 1
            final = holes + number * ks.HOLE_BYTES
            _set_hole(hole, load64(final), load64(final + ks.HOLE_TO), load64(final + ks.HOLE_NS))
    store64(work + ks.D_HOLES, number)
    return filled, in_time


@inlined
def _repeated(state: int, flow: int, size: int) -> None:
    """Count bytes of the packet that was just written, and that an earlier one held, too."""
    add(row_of(state, flow) + (flow & 1) * 8 + _REPEATED, size)
    if get(state, ks.PACKETS_AT):
        store32(get(state, ks.PACKETS_AT) + _PACKET_REPEATED, size)


@kernel
def _not_in_order(state: int, flow: int, work: int, sequence: int, payload: int, end: int, time_ns: int) -> None:
    following = load64(work + ks.D_NEXT)
    ahead = _signed(sequence - following)
    if abs(ahead) >= _MAX_JUMP:
        store64(work + ks.D_HOLES, 0)
        store64(work + ks.D_TIMED, -1)
        store64(work + ks.D_NEXT, end)
        return
    if ahead > 0:
        _add_hole(state, flow, work, following, sequence, time_ns)
        store64(work + ks.D_NEXT, end)
        return
    if payload <= 1 and ahead == -1:  # keep-alive
        _repeated(state, flow, payload)
        return
    new = max(_signed(end - following), 0)
    if payload > new:
        filled, in_time = _fill(state, flow, work, sequence, payload, time_ns)
        row, old = row_of(state, flow) + (flow & 1) * 8, payload - min(new, payload)
        add(row + _RETRANSMITTED, old - in_time)
        add(row + _OUT_OF_ORDER, in_time)
        _repeated(state, flow, old - filled)
        store64(work + ks.D_TIMED, -1)
    if new:
        store64(work + ks.D_NEXT, end)


@kernel
def _pass_over(state: int, flow: int, work: int, until: int, time_ns: int) -> None:
    """Add a hole for bytes sent but not captured: an acknowledgement or a packet without payload lies beyond them."""
    following = load64(work + ks.D_NEXT)
    ahead = _signed(until - following)
    if 0 < ahead < _MAX_JUMP:
        _add_hole(state, flow, work, following, until, time_ns)
        store64(work + ks.D_NEXT, until)


@inlined
def _sequence(state: int, flow: int, work: int, sequence: int, payload: int, extra: int, time_ns: int) -> None:
    """Advance over new bytes; distinguish holes, retransmissions and out-of-order bytes."""
    following, end = load64(work + ks.D_NEXT), (sequence + payload + extra) & 0xFFFFFFFF
    if sequence == following:
        store64(work + ks.D_NEXT, end)
        if payload and load64(work + ks.D_TIMED) < 0:
            store64(work + ks.D_TIMED, end)
            store64(work + ks.D_TIMED_NS, time_ns)
    elif following < 0:
        store64(work + ks.D_NEXT, end)
    else:
        _not_in_order(state, flow, work, sequence, payload, end, time_ns)


@kernel
def _segment_size(state: int, header: int, kept: int) -> int:
    """Return the MSS option of a SYN (RFC 9293, 3.2); 0 if there is none, or it was cut off."""
    at, end = 20, min((load8(header + 12) >> 4) * 4, kept)
    while at < end:
        kind = load8(header + at)
        if kind == 0:
            return 0
        if kind == 1:
            at += 1
            continue
        if at + 2 > end:
            return 0
        size = load8(header + at + 1)
        if size < 2:
            count(state, ks.N_MALFORMED)
            return 0
        if kind == 2 and size == 4 and at + 4 <= end:
            return swapped16(header + at + 2)
        at += size
    return 0


@kernel
def _begin_anew(side: int) -> None:
    """Reset the sequence state of a side, which is from an earlier connection."""
    store64(side + ks.D_NEXT, -1)
    store64(side + ks.D_TIMED, -1)
    store64(side + ks.D_HOLES, 0)


@kernel
def _opening_or_reset(
    state: int, flow: int, work: int, flags: int, sequence: int, acknowledged: int, size: int, time_ns: int
) -> None:
    if flags & _RST:
        add(row_of(state, flow) + _RESETS + (flow & 1) * 8, 1)
        return
    other = work ^ 128
    if load64(work + ks.D_SYN) == sequence:
        # retransmitted: it is not known which copy was answered
        store64(work + ks.D_SYN_NS, 0)
        store64(other + ks.D_SYN_NS, 0)
        return
    # a new connection, even between the ports of an old one
    since = max(time_ns, 1) if time_ns >= 0 else 0
    if not flags & _ACK:
        store64(other + ks.D_SYN, -1)
        for side in (work, other):
            _begin_anew(side)
            store64(side + ks.D_SYN_NS, 0)
            store64(side + ks.D_SEGMENT_BYTES, 0)
    else:
        _begin_anew(work)
        opening = load64(other + ks.D_SYN)
        if opening < 0 or not 0 <= _signed(acknowledged - opening - 1) <= _MAX_SYN_BYTES:
            _begin_anew(other)  # the SYN that it answers was not captured
            since = 0
    store64(work + ks.D_SYN, sequence)
    store64(work + ks.D_SYN_NS, since)
    for side in (work, other):
        agreed = load64(side + ks.D_SEGMENT_BYTES)
        if size and (agreed == 0 or size < agreed):
            store64(side + ks.D_SEGMENT_BYTES, size)


@kernel
def _round_trip(state: int, flow: int, work: int, time_ns: int) -> None:
    """Record the round trip of a flow's timed segment, which was just acknowledged."""
    store64(work + ks.D_TIMED, -1)
    since = load64(work + ks.D_TIMED_NS)
    took = time_ns - since
    if since < 0 or took < 0 or took > ks.MAX_RTT_NS:
        return
    row = row_of(state, flow) + (flow & 1) * 8
    add(row + _RTT_COUNT, 1)
    add(row + _RTT_SUM, took)
    least = load64(row + _RTT_MIN)
    if least < 0 or took < least:
        store64(row + _RTT_MIN, took)


@kernel
def _handshake(state: int, flow: int, work: int, other: int, acknowledged: int, time_ns: int) -> None:
    """Record the round trip of the handshake: the opener acknowledges the answer to its SYN."""
    row, since = row_of(state, flow), load64(work + ks.D_SYN_NS)
    if since > load64(other + ks.D_SYN_NS):
        return  # this is the answering side
    if not 0 <= _signed(acknowledged - load64(other + ks.D_SYN) - 1) < _MAX_JUMP:
        return  # the acknowledgement is of an earlier connection
    if load64(row + _HANDSHAKE) < 0 and 0 <= time_ns - since <= ks.MAX_RTT_NS:
        store64(row + _HANDSHAKE, time_ns - since)
    store64(work + ks.D_SYN_NS, 0)
    store64(other + ks.D_SYN_NS, 0)


@inlined
def _room(work: int, header_bytes: int, family: int) -> int:
    """Return the largest payload of one segment on the wire."""
    size = load64(work + ks.D_SEGMENT_BYTES)
    return (size if size else (1460 if family == 4 else 1440)) - (header_bytes - 20)


@inlined
def _follow(
    state: int,
    flow: int,
    work: int,
    flags: int,
    sequence: int,
    acknowledged: int,
    payload: int,
    header_bytes: int,
    family: int,
    closed: int,
    size: int,
    time_ns: int,
) -> None:
    if flags & (_SYN | _RST):
        _opening_or_reset(state, flow, work, flags, sequence, acknowledged, size, time_ns)
        if flags & _RST:
            add(work + ks.D_SEGMENTS, 1 if payload else 0)
            return
    other = work ^ 128
    if flags & _ACK:
        timed = load64(other + ks.D_TIMED)
        if timed >= 0 and _signed(acknowledged - timed) >= 0:
            _round_trip(state, flow ^ 1, other, time_ns)
        following = load64(other + ks.D_NEXT)
        if following >= 0 and _signed(acknowledged - following) > 0:
            _pass_over(state, flow ^ 1, other, acknowledged, time_ns)
        if load64(work + ks.D_SYN_NS) and load64(other + ks.D_SYN_NS) and not flags & _SYN:
            _handshake(state, flow, work, other, acknowledged, time_ns)
    if closed and not flags & (_SYN | _FIN):
        add(row_of(state, flow) + _ZERO_WINDOWS + (flow & 1) * 8, 1)
    if payload:
        room = _room(work, header_bytes, family)
        add(work + ks.D_SEGMENTS, 1 if payload <= room or room <= 0 else (payload + room - 1) // room)
    elif not flags & (_SYN | _FIN):
        following = load64(work + ks.D_NEXT)
        if following < 0:
            store64(work + ks.D_NEXT, sequence)
        elif sequence != following:
            _pass_over(state, flow, work, sequence, time_ns)
        return
    _sequence(state, flow, work, sequence, payload, 1 if flags & (_SYN | _FIN) else 0, time_ns)


@inlined
def _write_segment(
    state: int,
    flow: int,
    work: int,
    flags: int,
    sequence: int,
    acknowledged: int,
    payload: int,
    header_bytes: int,
    family: int,
    closed: int,
    size: int,
    time_ns: int,
) -> None:
    """Write a segment that `replay` follows, or add it to the run of an earlier one."""
    end = (sequence + payload) & 0xFFFFFFFF
    key = acknowledged | (flags & ~_PSH) << 32 | header_bytes << 40 | closed << 48
    # one branch, because the processor could not predict several
    is_next = (sequence == load64(work + ks.D_RUN_END)) & (key == load64(work + ks.D_RUN_KEY))
    if is_next & (payload > 0) & (payload <= load64(work + ks.D_RUN_LIMIT)):
        at, before, head = get(state, ks.RUNS_AT) - ks.RUN_BYTES, load64(work + ks.D_RUN_LAST), load64(work + ks.D_RUN)
        put(state, ks.RUNS_AT, at)
        store64(work + ks.D_RUN_LAST, at + ks.R_NEXT)
        store32(before, abs(at + ks.R_NEXT - before))
        store64(at + ks.R_NS, time_ns)
        store64(at + ks.R_PAYLOAD, payload)
        store32(head + ks.S_MORE, load32(head + ks.S_MORE) + 1)
        store32(head + ks.S_END, end)
    else:
        at, is_usual = get(state, ks.SEGMENTS_AT), (flags & ~_PSH == _ACK) & (closed == 0)
        put(state, ks.SEGMENTS_AT, at + ks.SEGMENT_BYTES)
        store64(work + ks.D_RUN_LAST, at + ks.S_NEXT)
        store64(work + ks.D_RUN, at)
        store64(work + ks.D_RUN_KEY, key)
        store64(work + ks.D_RUN_LIMIT, payload * is_usual)
        store64(at + ks.S_FLOW, flow | payload << 32)
        store64(at + ks.S_SEQUENCE, sequence | acknowledged << 32)
        store64(at + ks.S_NS, time_ns)
        store64(at + ks.S_NEXT, size)
        store64(at + ks.S_END, end | flags << 32 | header_bytes << 40 | family << 48 | closed << 56)
    store64(work + ks.D_RUN_END, end)
    store64((work ^ 128) + ks.D_RUN_LIMIT, 0)


@kernel
def _follow_run(state: int, flow: int, work: int, head: int) -> None:
    """Follow the segments of a run one by one."""
    acknowledged, header_bytes, family = (
        load32(head + ks.S_ACKNOWLEDGED),
        load8(head + ks.S_HEADER),
        load8(head + ks.S_FAMILY),
    )
    sequence, at = load32(head + ks.S_SEQUENCE) + load32(head + ks.S_PAYLOAD), head + ks.S_NEXT
    at += load32(at)
    for _ in range(load32(head + ks.S_MORE)):
        payload, time_ns = load32(at + ks.R_PAYLOAD - ks.R_NEXT), load64(at + ks.R_NS - ks.R_NEXT)
        sequence &= 0xFFFFFFFF
        _follow(state, flow, work, _ACK, sequence, acknowledged, payload, header_bytes, family, 0, 0, time_ns)
        sequence += payload
        at -= load32(at)


@kernel
def replay(state: int, begin: int, end: int, flows: int) -> None:
    """Follow the segments that another scan wrote, in their order.

    Args:
        state: address of the state.
        begin: address of the first segment.
        end: address after the last one.
        flows: address of the flow, here, of each conversation's first direction there.
    """
    for at in range(begin, end, ks.SEGMENT_BYTES):
        number, more = load32(at + ks.S_FLOW), load32(at + ks.S_MORE)
        flow = load64(flows + (number >> 1) * 8) ^ (number & 1)
        work = work_of(state, flow)
        flags, closed, size, time_ns = (
            load8(at + ks.S_FLAGS),
            load8(at + ks.S_CLOSED),
            load32(at + ks.S_NEXT),
            load64(at + ks.S_NS),
        )
        sequence, acknowledged, payload = (
            load32(at + ks.S_SEQUENCE),
            load32(at + ks.S_ACKNOWLEDGED),
            load32(at + ks.S_PAYLOAD),
        )
        header_bytes, family = load8(at + ks.S_HEADER), load8(at + ks.S_FAMILY)
        _follow(state, flow, work, flags, sequence, acknowledged, payload, header_bytes, family, closed, size, time_ns)
        following, room = load64(work + ks.D_NEXT), _room(work, header_bytes, family)
        is_next = following == (sequence + payload) & 0xFFFFFFFF
        # then each segment of the run would only advance the sequence number
        is_plain = is_next & (load64(work + ks.D_TIMED) >= 0) & ((payload <= room) | (room <= 0))
        store64(work + ks.D_NEXT, load32(at + ks.S_END) if is_plain else following)
        add(work + ks.D_SEGMENTS, more if is_plain else 0)
        if more and not is_plain:
            _follow_run(state, flow, work, at)


@inlined
def tcp(state: int, flow: int, work: int, header: int, kept: int, payload: int, family: int, time_ns: int) -> None:
    """Follow one segment of a flow, or write it down to be followed later.

    Args:
        state: address of the state.
        flow: number of the flow.
        work: address of the flow's work area.
        header: address of the TCP header, of which at least 20 bytes were captured.
        kept: captured bytes from the header on.
        payload: bytes after the header.
        family: 4 or 6.
        time_ns: time of capture.
    """
    if flow >= 2 * get(state, ks.MAX_ROWS):  # in the shared row, single connections cannot be followed
        add(work + ks.D_SEGMENTS, 1 if payload else 0)
        return
    flags, header_bytes = load8(header + 13), (load8(header + 12) >> 4) * 4
    sequence, acknowledged = swapped32(header + 4), swapped32(header + 8)
    closed = 1 if swapped16(header + 14) == 0 else 0
    size = _segment_size(state, header, kept) if flags & (_SYN | _RST) == _SYN else 0
    if get(state, ks.SEGMENTS_AT):
        _write_segment(
            state, flow, work, flags, sequence, acknowledged, payload, header_bytes, family, closed, size, time_ns
        )
    else:
        _follow(state, flow, work, flags, sequence, acknowledged, payload, header_bytes, family, closed, size, time_ns)
