"""Entry points of the compiled kernels, which walk a block from record to record.

Each takes the address of the state and two numbers, and returns a number.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels.blocks import block_stops, is_block, packet_of_block
from ringtap.analysis.pcap.kernels.cells import add_cells, close_all, in_bin
from ringtap.analysis.pcap.kernels.decode import decode
from ringtap.analysis.pcap.kernels.flow import add, count, get, put
from ringtap.analysis.pcap.kernels.memory import inlined, kernel, load32, load64, swapped32
from ringtap.analysis.pcap.kernels.state import (
    BIN_END_NS,
    BIN_START_NS,
    CELLS_AT,
    CELLS_END,
    CORRUPT,
    FIRST_NS,
    FULL,
    I_BY,
    I_LINK,
    INTERFACES,
    IS_END,
    LAST_NS,
    MAX_FRAME_BYTES,
    MAX_KEPT,
    MORE,
    N_BACKWARDS,
    N_BYTES,
    N_PACKETS,
    NEEDED,
    PACKETS_AT,
    PACKETS_END,
    ROOM,
    STOPPED,
    SWAPPED,
)
from ringtap.analysis.pcap.scan_dtypes import CELL, PACKET

_CELLS_ROOM, _PACKETS_ROOM = ROOM * CELL.itemsize, ROOM * PACKET.itemsize


@inlined
def _is_full(state: int) -> bool:
    if get(state, CELLS_AT) + _CELLS_ROOM > get(state, CELLS_END):
        return True
    return get(state, PACKETS_AT) != 0 and get(state, PACKETS_AT) + _PACKETS_ROOM > get(state, PACKETS_END)


@inlined
def _packet(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> None:
    add(state + 8 * N_PACKETS, 1)
    add(state + 8 * N_BYTES, length)
    if time_ns < get(state, BIN_START_NS) or time_ns >= get(state, BIN_END_NS):
        time_ns = in_bin(state, time_ns)
    decode(state, at, kept, length, time_ns, link)
    if time_ns < get(state, LAST_NS):
        if time_ns >= 0:
            count(state, N_BACKWARDS)
            put(state, FIRST_NS, min(time_ns, get(state, FIRST_NS)))
    else:
        put(state, LAST_NS, time_ns)


def walk(state: int, block: int, size: int) -> int:
    """Count the packets of a part of a pcap file.

    Args:
        state: address of the state.
        block: address of the part, which begins with a record.
        size: number of its bytes.

    Returns:
        Bytes consumed; STOPPED in the state is the reason for the stop.
    """
    swapped, most_kept = get(state, SWAPPED), get(state, MAX_KEPT)
    link, tick_ns = load64(get(state, INTERFACES) + I_LINK), load64(get(state, INTERFACES) + I_BY)
    at, stopped, needed = 0, MORE, 16
    while at + 16 <= size:
        record = block + at
        if swapped:
            seconds, ticks = swapped32(record), swapped32(record + 4)
            kept, length = swapped32(record + 8), swapped32(record + 12)
        else:
            seconds, ticks = load32(record), load32(record + 4)
            kept, length = load32(record + 8), load32(record + 12)
        if kept > most_kept or length > MAX_FRAME_BYTES:
            stopped = CORRUPT
            break
        if at + 16 + kept > size:
            needed = 16 + kept
            break
        if _is_full(state):
            stopped = FULL
            break
        _packet(state, record + 16, kept, length, seconds * 1_000_000_000 + ticks * tick_ns, link)
        at += 16 + kept
    put(state, STOPPED, stopped)
    put(state, NEEDED, needed)
    return at


def total(state: int, begin: int, end: int) -> int:
    """Add the cells between two addresses to their conversations."""
    add_cells(state, begin, end)
    return 0


@inlined
def _total(state: int, block: int) -> int:
    return swapped32(block + 4) if get(state, SWAPPED) else load32(block + 4)


def walk_blocks(state: int, block: int, size: int) -> int:
    """Count the packets of a part of a pcapng file, which begins with a block; otherwise as `walk`."""
    at, stopped = 0, MORE
    put(state, NEEDED, 12)
    while at + 12 <= size:
        if _is_full(state):
            stopped = FULL
            break
        stopped = block_stops(state, block + at, size - at)
        if stopped != MORE:
            break
        total = _total(state, block + at)
        if at + total > size:
            put(state, NEEDED, total)
            break
        kept, length, time_ns, data, link = packet_of_block(state, block + at, total)
        if data:
            _packet(state, data, kept, length, time_ns, link)
        at += total
        put(state, NEEDED, 12)
    put(state, STOPPED, stopped)
    return at


@inlined
def _kept(state: int, record: int) -> int:
    return swapped32(record + 8) if get(state, SWAPPED) else load32(record + 8)


@kernel
def _is_record(state: int, record: int) -> bool:
    if get(state, SWAPPED):
        seconds, ticks, length = swapped32(record), swapped32(record + 4), swapped32(record + 12)
    else:
        seconds, ticks, length = load32(record), load32(record + 4), load32(record + 12)
    kept, tick_ns = _kept(state, record), load64(get(state, INTERFACES) + I_BY)
    if kept > length or kept > get(state, MAX_KEPT) or length > MAX_FRAME_BYTES or length == 0:
        return False
    if ticks * tick_ns >= 1_000_000_000:
        return False
    latest = get(state, LAST_NS)
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
            put(state, STOPPED, MORE)
            return at
        if place == size and place > at and get(state, IS_END):
            put(state, STOPPED, MORE)
            return at
        if place > at and place + 16 > size and not get(state, IS_END):
            put(state, STOPPED, FULL)
            put(state, NEEDED, place + 16 - at)
            return at
        at += 1
    put(state, STOPPED, FULL)
    put(state, NEEDED, 16)
    return at


def resume_blocks(state: int, block: int, size: int) -> int:
    """Look for the next valid block of a pcapng file: two complete blocks in a row, with their length at both ends."""
    at = 0
    while at + 12 <= size:
        found = is_block(state, block + at, size - at)
        if found == 1:
            put(state, STOPPED, MORE)
            return at
        if found == 0 and not get(state, IS_END):
            put(state, STOPPED, FULL)
            return at
        at += 1
    put(state, STOPPED, FULL)
    put(state, NEEDED, 12)
    return at


def finish(state: int, first: int, _unused: int) -> int:
    """Close the open cells of the flows from ``first`` on; return the flow to continue with."""
    return close_all(state, first)


ENTRIES = (walk, walk_blocks, resume, resume_blocks, finish, total)
