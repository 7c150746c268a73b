"""Counts RoCEv2, InfiniBand's transport in UDP, by queue pair (InfiniBand specification, vol. 1, 9 and A17)."""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, get, key6, put, same16, spread
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    kernel,
    load8,
    load32,
    load64,
    store8,
    store32,
    store64,
    swapped32,
)
from ringtap.analysis.pcap.scan_dtypes import QUEUE_PAIR, offsets

_ROW = QUEUE_PAIR.itemsize
_QUEUE_PAIR, _SOURCE, _DESTINATION = offsets(QUEUE_PAIR, "queue_pair", "source", "destination")
_PACKETS, _BYTES, _PAYLOAD, _ACKNOWLEDGEMENTS, _NAKS, _CNPS, _GAPS, _REPEATS, _FIRST_NS, _LAST_NS = offsets(
    QUEUE_PAIR,
    "packets",
    "bytes",
    "payload",
    "acknowledgements",
    "naks",
    "cnps",
    "psn_gaps",
    "psn_repeats",
    "first_ns",
    "last_ns",
)
_BTH_BYTES, _CNP = 12, 0x81
_RELIABLE_DATAGRAM, _DATAGRAM, _CONGESTION, _EXTENDED = 2, 3, 4, 5
_READ_REQUEST, _READ_FIRST, _READ_ONLY, _ACKNOWLEDGE, _ATOMIC_ACKNOWLEDGE = 0x0C, 0x0D, 0x10, 0x11, 0x12
_PSN_MASK, _PSN_HALF = 0xFFFFFF, 0x800000


@kernel
def extended_bytes(opcode: int) -> int:
    """Return the length of an opcode's extended headers after the base header; -1 if there is no such opcode."""
    service, operation = opcode >> 5, opcode & 31
    if opcode == _CNP:
        return 16  # reserved
    if service > _EXTENDED or service == _CONGESTION or operation > 0x17 or operation == 0x15:
        return -1
    if service == _DATAGRAM:
        return 8 if operation == 4 else 12 if operation == 5 else -1  # DETH, and immediate data
    size = 0
    if operation in (0x03, 0x05, 0x09, 0x0B):
        size += 4  # immediate data
    if operation in (0x06, 0x0A, 0x0B, 0x0C):
        size += 16  # RETH
    if operation in (0x0D, 0x0F, 0x10, 0x11, 0x12):
        size += 4  # AETH
    if operation == 0x12:
        size += 8  # AtomicAckETH
    if operation in (0x13, 0x14):
        size += 28  # AtomicETH
    if operation in (0x16, 0x17):
        size += 4  # IETH
    response = _READ_FIRST <= operation <= _ATOMIC_ACKNOWLEDGE
    if service == _RELIABLE_DATAGRAM:
        size += 4 if response else 12  # RDETH, and DETH
    elif service == _EXTENDED and not response:
        size += 4  # XRCETH
    return size


@kernel
def _queue_pair(state: int, queue_pair: int, addresses: int, family: int, time_ns: int) -> int:
    """Return the row number of a queue pair, which is added if it is new; -1 if there are too many."""
    size = 4 if family == 4 else 16
    key = load64(addresses) if family == 4 else key6(state, addresses, addresses + 16)
    index = spread(state, key, queue_pair) & (ks.QUEUE_PAIR_SLOT_COUNT - 1)
    while True:
        slot = get(state, ks.QUEUE_PAIR_SLOTS) + 4 * index
        number = load32(slot) - 1
        row = get(state, ks.QUEUE_PAIRS) + number * _ROW
        if number < 0:
            break
        if load32(row + _QUEUE_PAIR) == queue_pair and load8(row) == family:
            if family == 4:
                if load32(row + _SOURCE) | load32(row + _DESTINATION) << 32 == key:
                    return number
            elif same16(row + _SOURCE, addresses) and same16(row + _DESTINATION, addresses + 16):
                return number
        index = (index + 1) & (ks.QUEUE_PAIR_SLOT_COUNT - 1)
    number = get(state, ks.QUEUE_PAIR_ROWS)
    if number == ks.MAX_QUEUE_PAIRS:
        return -1
    put(state, ks.QUEUE_PAIR_ROWS, number + 1)
    store32(slot, number + 1)
    row = get(state, ks.QUEUE_PAIRS) + number * _ROW
    store8(row, family)
    store32(row + _QUEUE_PAIR, queue_pair)
    for part in range(size):
        store8(row + _SOURCE + part, load8(addresses + part))
        store8(row + _DESTINATION + part, load8(addresses + size + part))
    store64(row + _FIRST_NS, time_ns)
    store64(row + _LAST_NS, time_ns)
    work = get(state, ks.QUEUE_PAIR_WORK) + number * ks.QUEUE_PAIR_WORK_BYTES
    store64(work + ks.Q_NEXT, -1)
    store64(work + ks.Q_RESPONSE, -1)
    return number


@kernel
def _order(row: int, work: int, operation: int, number: int) -> None:
    """Check packet sequence numbers: all requests are in sequence, read responses only within one response.

    A read uses as many numbers as its response has packets; the request does not say how many.
    """
    response = _READ_FIRST <= operation <= _READ_ONLY
    place = work + (ks.Q_RESPONSE if response else ks.Q_NEXT)
    expected = load64(place)
    begins = response and operation in (_READ_FIRST, _READ_ONLY)
    if expected >= 0 and not begins:
        ahead = (number - expected) & _PSN_MASK
        if ahead >= _PSN_HALF:
            add(row + _REPEATS, 1)
            return
        add(row + _GAPS, ahead)
    store64(place, -1 if operation == _READ_REQUEST else (number + 1) & _PSN_MASK)


@kernel
def roce(
    state: int, header: int, kept: int, length: int, payload: int, addresses: int, family: int, time_ns: int
) -> None:
    """Count a packet for its queue pair.

    Args:
        state: address of the state.
        header: address of the base header, which was captured completely.
        kept: captured bytes from there on.
        length: bytes of the frame.
        payload: bytes after the extended headers.
        addresses: address of the source address, which the destination address follows.
        family: 4 or 6.
        time_ns: time of capture.
    """
    if time_ns < 0:
        time_ns = get(state, ks.LAST_NS)
    number = _queue_pair(state, swapped32(header + 4) & 0xFFFFFF, addresses, family, time_ns)
    if number < 0:
        count(state, ks.N_QUEUE_PAIRS)
        return
    row = get(state, ks.QUEUE_PAIRS) + number * _ROW
    add(row + _PACKETS, 1)
    add(row + _BYTES, length)
    add(row + _PAYLOAD, payload)
    store64(row + _FIRST_NS, min(load64(row + _FIRST_NS), time_ns))
    store64(row + _LAST_NS, max(load64(row + _LAST_NS), time_ns))
    opcode = load8(header)
    service, operation = opcode >> 5, opcode & 31
    if opcode == _CNP:
        add(row + _CNPS, 1)
    elif operation in (_ACKNOWLEDGE, _ATOMIC_ACKNOWLEDGE):
        place = _BTH_BYTES + (4 if service == _RELIABLE_DATAGRAM else 0)  # an RDETH comes first
        refused = kept > place and (load8(header + place) >> 5 & 3) in (1, 3)
        add(row + (_NAKS if refused else _ACKNOWLEDGEMENTS), 1)
    elif service != _DATAGRAM:
        work = get(state, ks.QUEUE_PAIR_WORK) + number * ks.QUEUE_PAIR_WORK_BYTES
        _order(row, work, operation, swapped32(header + 8) & _PSN_MASK)
