"""Walks a block of a capture from record to record: the entry points of the compiled kernels.

Each entry point takes the address of the state and two numbers, and returns a number.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.decode import decode
from ringtap.analysis.pcap.kernels.flow import add, count, get, put
from ringtap.analysis.pcap.kernels.join_parts import bins_between, join_cells, join_rows, join_sums
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load8,
    load32,
    load64,
    store8,
    store32,
    store64,
    swapped32,
)
from ringtap.analysis.pcap.kernels.pcapng_blocks import block_stops, fits, is_block, packet_of_block
from ringtap.analysis.pcap.kernels.rate_bins import add_cells, close_all, in_bin
from ringtap.analysis.pcap.kernels.tcp import replay
from ringtap.analysis.pcap.scan_dtypes import CELL, PACKET, PICK, offsets

_CELLS_ROOM, _PACKETS_ROOM, _PICK = ks.ROOM * CELL.itemsize, ks.ROOM * PACKET.itemsize, PICK.itemsize
_NUMBER, _INTERFACE, _KEPT, _LENGTH, _FLOW = offsets(PICK, "number", "interface", "kept", "length", "flow")


@inlined
def _is_full(state: int, most: int) -> bool:
    """True if a buffer may not hold what the next packet adds, of which at most ``most`` bytes were captured."""
    if get(state, ks.CELLS_AT) + _CELLS_ROOM > get(state, ks.CELLS_END):
        return True
    if get(state, ks.PICKS_AT) != 0:
        if get(state, ks.PICKS_AT) + _PICK > get(state, ks.PICKS_END):
            return True
        return get(state, ks.BODIES_AT) + min(most, ks.MAX_BLOCK_BYTES) + 4 > get(state, ks.BODIES_END)
    return get(state, ks.PACKETS_AT) != 0 and get(state, ks.PACKETS_AT) + _PACKETS_ROOM > get(state, ks.PACKETS_END)


@kernel
def _is_picked(state: int, at: int, kept: int, length: int, time_ns: int, interface: int) -> bool:
    """Copy a packet, if its time is within those that are picked."""
    if time_ns < get(state, ks.PICK_FROM_NS) or time_ns >= get(state, ks.PICK_TO_NS):
        return False
    row, body = get(state, ks.PICKS_AT), get(state, ks.BODIES_AT)
    put(state, ks.PICKED, row)
    put(state, ks.PICKS_AT, row + _PICK)
    put(state, ks.BODIES_AT, body + ((kept + 3) & -4))
    store64(row, time_ns)
    store32(row + _NUMBER, get(state, ks.N_PACKETS))
    store32(row + _INTERFACE, get(state, ks.PICK_INTERFACES) + interface)
    store32(row + _KEPT, kept)
    store32(row + _LENGTH, length)
    for offset in range(_FLOW, _PICK, 4):
        store32(row + offset, 0)
    whole = kept & -8
    for offset in range(0, whole, 8):
        store64(body + offset, load64(at + offset))
    if kept & 3:
        store32(body + (kept & -4), 0)
    for offset in range(whole, kept):
        store8(body + offset, load8(at + offset))
    return True


@inlined
def _packet(state: int, at: int, kept: int, length: int, time_ns: int, interface: int, link: int) -> None:
    add(state + 8 * ks.N_PACKETS, 1)
    add(state + 8 * ks.N_BYTES, length)
    if time_ns < get(state, ks.BIN_START_NS) or time_ns >= get(state, ks.BIN_END_NS):
        time_ns = in_bin(state, time_ns)
    if not get(state, ks.PICKS_AT) or _is_picked(state, at, kept, length, time_ns, interface):
        decode(state, at, kept, length, time_ns, link)
    if time_ns < get(state, ks.LAST_NS):
        if time_ns >= 0:
            count(state, ks.N_BACKWARDS)
            if get(state, ks.LAST_NS) - time_ns > ks.SET_BACK_NS:
                count(state, ks.N_SET_BACK)
            put(state, ks.FIRST_NS, min(time_ns, get(state, ks.FIRST_NS)))
    else:
        put(state, ks.LAST_NS, time_ns)


def walk(state: int, block: int, size: int) -> int:
    """Count the packets of a part of a pcap file.

    Args:
        state: address of the state.
        block: address of the part, which begins with a record.
        size: number of its bytes.

    Returns:
        Bytes consumed; STOPPED in the state is the reason for the stop.
    """
    swapped, most_kept = get(state, ks.SWAPPED), get(state, ks.MAX_KEPT)
    link, tick_ns = load64(get(state, ks.INTERFACES) + ks.I_LINK), load64(get(state, ks.INTERFACES) + ks.I_BY)
    at, stopped, needed = 0, ks.MORE, 16
    while at + 16 <= size:
        record = block + at
        if swapped:
            seconds, ticks = swapped32(record), swapped32(record + 4)
            kept, length = swapped32(record + 8), swapped32(record + 12)
        else:
            seconds, ticks = load32(record), load32(record + 4)
            kept, length = load32(record + 8), load32(record + 12)
        if not fits(kept, length, most_kept):
            stopped = ks.CORRUPT
            break
        if at + 16 + kept > size:
            needed = 16 + kept
            break
        if _is_full(state, kept):
            stopped = ks.FULL
            break
        _packet(state, record + 16, kept, length, seconds * 1_000_000_000 + ticks * tick_ns, 0, link)
        at += 16 + kept
    put(state, ks.STOPPED, stopped)
    put(state, ks.NEEDED, needed)
    return at


def total(state: int, begin: int, end: int) -> int:
    """Add the cells between two addresses to their conversations."""
    add_cells(state, begin, end)
    return 0


@inlined
def _total(state: int, block: int) -> int:
    return swapped32(block + 4) if get(state, ks.SWAPPED) else load32(block + 4)


def walk_blocks(state: int, block: int, size: int) -> int:
    """Count the packets of a part of a pcapng file, which begins with a block; otherwise as `walk`."""
    at, stopped = 0, ks.MORE
    put(state, ks.NEEDED, 12)
    while at + 12 <= size:
        total = _total(state, block + at)
        if _is_full(state, total):
            stopped = ks.FULL
            break
        stopped = block_stops(state, block + at, size - at)
        if stopped != ks.MORE:
            break
        if at + total > size:
            put(state, ks.NEEDED, total)
            break
        kept, length, time_ns, data, number = packet_of_block(state, block + at, total)
        if data:
            link = load64(get(state, ks.INTERFACES) + number * ks.INTERFACE_BYTES + ks.I_LINK)
            _packet(state, data, kept, length, time_ns, number, link)
        at += total
        put(state, ks.NEEDED, 12)
    put(state, ks.STOPPED, stopped)
    return at


@inlined
def _kept(state: int, record: int) -> int:
    return swapped32(record + 8) if get(state, ks.SWAPPED) else load32(record + 8)


@kernel
def _is_record(state: int, record: int) -> bool:
    if get(state, ks.SWAPPED):
        seconds, ticks, length = swapped32(record), swapped32(record + 4), swapped32(record + 12)
    else:
        seconds, ticks, length = load32(record), load32(record + 4), load32(record + 12)
    kept, tick_ns = _kept(state, record), load64(get(state, ks.INTERFACES) + ks.I_BY)
    if length == 0 or not fits(kept, length, get(state, ks.MAX_KEPT)):
        return False
    if ticks * tick_ns >= 1_000_000_000:
        return False
    latest = get(state, ks.LAST_NS)
    return latest < 0 or abs(seconds - latest // 1_000_000_000) < 86_400


def resume(state: int, block: int, size: int) -> int:
    """Look for the next valid record of a pcap file after damage.

    A record is valid if three headers follow one another, each where the previous one ends, within a day of the latest
    packet. At the end of the stream fewer suffice, if the last one ends with the stream.

    Returns:
        Bytes to skip. STOPPED is MORE if a record begins there, else FULL: NEEDED bytes from there on decide.
    """
    at = 0
    while at + 16 <= size:
        place = at
        for _ in range(3):
            if place + 16 > size or not _is_record(state, block + place):
                break
            place += 16 + _kept(state, block + place)
        else:
            put(state, ks.STOPPED, ks.MORE)
            return at
        if place == size and place > at and get(state, ks.IS_END):
            put(state, ks.STOPPED, ks.MORE)
            return at
        if place > at and place + 16 > size and not get(state, ks.IS_END):
            put(state, ks.STOPPED, ks.FULL)
            put(state, ks.NEEDED, place + 16 - at)
            return at
        at += 1
    put(state, ks.STOPPED, ks.FULL)
    put(state, ks.NEEDED, 16)
    return at


def resume_blocks(state: int, block: int, size: int) -> int:
    """Look for the next valid block of a pcapng file: two complete blocks in a row, with their length at both ends."""
    at = 0
    while at + 12 <= size:
        found = is_block(state, block + at, size - at)
        if found == 1:
            put(state, ks.STOPPED, ks.MORE)
            return at
        if found == 0 and not get(state, ks.IS_END):
            put(state, ks.STOPPED, ks.FULL)
            return at
        at += 1
    put(state, ks.STOPPED, ks.FULL)
    put(state, ks.NEEDED, 12)
    return at


def finish(state: int, first: int, _unused: int) -> int:
    """Close the open cells of the flows from ``first`` on; return the flow to continue with."""
    return close_all(state, first)


def join(state: int, part: int, flows: int) -> int:
    """Add the results of the scan of a file's next part, whose segments were written down and whose cells are closed.

    Args:
        state: address of the state.
        part: address of the state of that scan.
        flows: address of one word per conversation of it, which hold the flows here of those joined before.
    """
    shift = bins_between(state, part)
    join_rows(state, part, flows)
    join_cells(state, get(part, ks.CELLS_BEGIN), get(part, ks.CELLS_AT), flows, shift)
    replay(state, get(part, ks.SEGMENTS_BEGIN), get(part, ks.SEGMENTS_AT), flows)
    join_sums(state, part, shift)
    return 0
