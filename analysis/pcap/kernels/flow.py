"""Finds the flow that a packet belongs to, in the flow table.

The table maps the 5-tuple as it stands in the packet to the flow, so that each direction is found directly. It uses
linear probing. Keys are hashed by products of halves to which secrets were added (NH: Black et al., UMAC, CRYPTO 1999),
so that no capture can be crafted whose flows all fall on one slot.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load8,
    load64,
    store8,
    store16,
    store32,
    store64,
    times,
)
from ringtap.analysis.pcap.scan_dtypes import CONVERSATION, offsets

_ROW = CONVERSATION.itemsize
_A, _B = offsets(CONVERSATION, "a", "b")
_A_PORT, _B_PORT = offsets(CONVERSATION, "a_port", "b_port")
_RTT_MIN, _HANDSHAKE, _FIRST_NS, _LAST_NS = offsets(CONVERSATION, "rtt_min_ns", "handshake_ns", "first_ns", "last_ns")
_MIX = -7046029254386353131  # odd, of high entropy
_LOW = 0xFFFFFFFF


@inlined
def get(state: int, word: int) -> int:
    """Return a word of the state."""
    return load64(state + 8 * word)


@inlined
def put(state: int, word: int, value: int) -> None:
    """Set a word of the state."""
    store64(state + 8 * word, value)


@inlined
def count(state: int, word: int) -> None:
    """Add one to a word of the state."""
    store64(state + 8 * word, load64(state + 8 * word) + 1)


@inlined
def add(address: int, value: int) -> None:
    """Add to a counter."""
    store64(address, load64(address) + value)


@inlined
def _secret(state: int, half: int, number: int) -> int:
    return ((half & _LOW) + get(state, ks.SECRETS + number)) & _LOW


@inlined
def _paired(state: int, one: int, two: int) -> int:
    """Return a hash of two words, with four secrets."""
    first = times(_secret(state, one, 0), _secret(state, one >> 32, 1))
    mixed = first ^ times(_secret(state, two, 2), _secret(state, two >> 32, 3))
    return times(mixed ^ ((mixed >> 32) & _LOW), _MIX)


@inlined
def spread(state: int, addresses: int, rest: int) -> int:
    """Return the hash of a key."""
    mixed = _paired(state, addresses, rest)
    return mixed ^ ((mixed >> 32) & _LOW)


@inlined
def key6(state: int, source: int, destination: int) -> int:
    """Return a hash for two IPv6 addresses in a key; a match compares the addresses themselves."""
    half = _paired(state, load64(source), load64(source + 8))
    return times(half, 3) ^ _paired(state, load64(destination), load64(destination + 8))


@inlined
def _ports_reversed(rest: int) -> int:
    return (rest & -4294967296) | ((rest & 0xFFFF) << 16) | ((rest >> 16) & 0xFFFF)


@inlined
def rest_of(ports: int, protocol: int, kind: int, layer: int, family: int) -> int:
    """Return the part of a key besides the addresses; ``ports`` are both ports, loaded as one number."""
    return ports | protocol << 32 | kind << 40 | layer << 48 | family << 56


@inlined
def same16(a: int, b: int) -> bool:
    """True if 16 bytes at two addresses are equal."""
    return load64(a) == load64(b) and load64(a + 8) == load64(b + 8)


@inlined
def row_of(state: int, flow: int) -> int:
    """Return the address of a flow's conversation."""
    return get(state, ks.CONVERSATIONS) + (flow >> 1) * _ROW


@inlined
def _find(state: int, addresses: int, rest: int, source: int, destination: int) -> int:
    """Return the address of the slot that holds a key, or of the free slot for it."""
    slots, mask = get(state, ks.SLOTS), get(state, ks.SLOT_MASK)
    index = spread(state, addresses, rest) & mask
    while True:
        slot = slots + (index << ks.SLOT_SHIFT)
        flow = load64(slot + ks.K_FLOW)
        if flow == 0:
            return slot
        if load64(slot) == addresses and load64(slot + ks.K_REST) == rest:
            if (rest >> 56) == 4:
                return slot
            row = row_of(state, flow - 1)
            reverse = (flow - 1) & 1
            a, b = row + _A, row + _B
            if reverse:
                a, b = b, a
            if same16(a, source) and same16(b, destination):
                return slot
        index = (index + 1) & mask


@inlined
def _write_slot(slot: int, addresses: int, rest: int, flow: int) -> None:
    store64(slot, addresses)
    store64(slot + ks.K_REST, rest)
    store64(slot + ks.K_FLOW, flow + 1)


@inlined
def key_of(state: int, row: int) -> tuple[int, int]:
    """Return both parts of the key of a conversation's first direction."""
    ports = load8(row + _A_PORT + 1) | load8(row + _A_PORT) << 8
    ports |= load8(row + _B_PORT + 1) << 16 | load8(row + _B_PORT) << 24
    rest = rest_of(ports, load8(row), load8(row + 1), load8(row + 2), load8(row + 3))
    if load8(row + 3) == 4:
        return (load64(row + _A) & 0xFFFFFFFF) | load64(row + _B) << 32, rest
    return key6(state, row + _A, row + _B), rest


@kernel
def _grow(state: int) -> None:
    """Quadruple the slots, and insert one direction of each conversation again."""
    slots, mask = get(state, ks.SLOTS), get(state, ks.SLOT_MASK)
    for index in range(mask + 1):
        store64(slots + (index << ks.SLOT_SHIFT) + ks.K_FLOW, 0)
    put(state, ks.SLOT_MASK, mask * 4 + 3)
    for number in range(get(state, ks.ROWS)):
        row = get(state, ks.CONVERSATIONS) + number * _ROW
        if load8(row + 3) == 0:
            continue
        addresses, rest = key_of(state, row)
        slot = _find(state, addresses, rest, row + _A, row + _B)
        _write_slot(slot, addresses, rest, number * 2)


@kernel
def _new_conversation(state: int, rest: int, source: int, destination: int, time_ns: int) -> int:
    """Add a row and return its first flow; beyond the limit return -1 minus the first flow of the shared row."""
    number = get(state, ks.ROWS)
    if number >= get(state, ks.MAX_ROWS):
        count(state, ks.N_OVER_LIMIT)
        if number > get(state, ks.MAX_ROWS):
            return -1 - 2 * get(state, ks.MAX_ROWS)
        rest = 255 << 32
    elif number * ks.SLOTS_A_ROW > get(state, ks.SLOT_MASK):
        _grow(state)
    put(state, ks.ROWS, number + 1)
    row = get(state, ks.CONVERSATIONS) + number * _ROW
    for part in range(4):
        store8(row + part, rest >> (32 + 8 * part))
    store16(row + _A_PORT, (rest & 0xFF) << 8 | (rest >> 8) & 0xFF)
    store16(row + _B_PORT, (rest >> 8) & 0xFF00 | (rest >> 24) & 0xFF)
    if (rest >> 56) == 4:
        store32(row + _A, load64(source))
        store32(row + _B, load64(destination))
    elif (rest >> 56) == 6:
        for part in range(0, 16, 8):
            store64(row + _A + part, load64(source + part))
            store64(row + _B + part, load64(destination + part))
    for offset in (_RTT_MIN, _RTT_MIN + 8, _HANDSHAKE):
        store64(row + offset, -1)
    if time_ns < 0:
        time_ns = get(state, ks.LAST_NS)
    store64(row + _FIRST_NS, time_ns)
    store64(row + _LAST_NS, time_ns)
    for direction in range(2):
        work = get(state, ks.DIRECTIONS) + (number * 2 + direction) * ks.DIRECTION_BYTES
        store64(work + ks.D_BIN, ks.NO_BIN)
        store64(work + ks.D_LAST_NS, ks.NO_BIN)
        for offset in (ks.D_NEXT, ks.D_TIMED, ks.D_SYN):
            store64(work + offset, -1)
    return number * 2 if rest >> 56 else -1 - number * 2


@kernel
def _new_flow(state: int, addresses: int, rest: int, source: int, destination: int, time_ns: int) -> int:
    """Return the flow of a key that has no slot: the reverse of a known flow, or one of a new conversation."""
    swapped4 = (addresses << 32) | ((addresses >> 32) & 0xFFFFFFFF)
    back = swapped4 if (rest >> 56) == 4 else key6(state, destination, source)
    reverse = load64(_find(state, back, _ports_reversed(rest), destination, source) + ks.K_FLOW)
    if reverse:
        flow = (reverse - 1) ^ 1
    else:
        flow = _new_conversation(state, rest, source, destination, time_ns)
        if flow < 0:
            return -1 - flow
    _write_slot(_find(state, addresses, rest, source, destination), addresses, rest, flow)
    return flow


@inlined
def flow_of(state: int, addresses: int, rest: int, source: int, destination: int, time_ns: int) -> int:
    """Return the flow of a packet; a new one if its key was not seen before."""
    flow = load64(_find(state, addresses, rest, source, destination) + ks.K_FLOW)
    if flow:
        return flow - 1
    return _new_flow(state, addresses, rest, source, destination, time_ns)


@inlined
def flow_of4(state: int, at: int, rest: int, time_ns: int) -> int:
    """Return the flow of a packet whose IPv4 addresses begin at ``at``."""
    return flow_of(state, load64(at), rest, at, at + 4, time_ns)


@inlined
def flow_of6(state: int, at: int, rest: int, time_ns: int) -> int:
    """Return the flow of a packet whose IPv6 addresses begin at ``at``."""
    return flow_of(state, key6(state, at, at + 16), rest, at, at + 16, time_ns)


@inlined
def work_of(state: int, flow: int) -> int:
    """Return the address of a flow's work area."""
    return get(state, ks.DIRECTIONS) + flow * ks.DIRECTION_BYTES
