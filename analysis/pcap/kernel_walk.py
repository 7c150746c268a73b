"""Kernels that go from record to record of a block: the entry points that are compiled."""

from __future__ import annotations

from ringtap.analysis.pcap.kernel_decode import decode
from ringtap.analysis.pcap.kernel_flow import add, close_all, count, get, put, set_time
from ringtap.analysis.pcap.kernel_memory import load32, swapped32
from ringtap.analysis.pcap.kernel_state import (
    BIN_END_NS,
    BIN_START_NS,
    CELL_MARGIN,
    CELLS_AT,
    CELLS_END,
    CELLS_FULL,
    CORRUPT,
    FIRST_NS,
    LAST_NS,
    LINK,
    MORE,
    MOST_FRAME_BYTES,
    MOST_KEPT,
    N_BACKWARDS,
    N_BYTES,
    N_PACKETS,
    NEEDED,
    STOPPED,
    SWAPPED,
    TICK_NS,
)


def walk(state: int, block: int, size: int) -> int:
    """Count the packets of a block.

    Args:
        state: address of the state.
        block: address of the block, which begins with a record.
        size: its bytes.

    Returns:
        Bytes used up; the state says why it stopped there.
    """
    swapped, link, tick_ns = get(state, SWAPPED), get(state, LINK), get(state, TICK_NS)
    most_kept = get(state, MOST_KEPT)
    at, stopped, needed = 0, MORE, 16
    while at + 16 <= size:
        record = block + at
        if swapped:
            seconds, ticks = swapped32(record), swapped32(record + 4)
            kept, length = swapped32(record + 8), swapped32(record + 12)
        else:
            seconds, ticks = load32(record), load32(record + 4)
            kept, length = load32(record + 8), load32(record + 12)
        if kept > most_kept or length > MOST_FRAME_BYTES:
            stopped = CORRUPT
            break
        if at + 16 + kept > size:
            needed = 16 + kept
            break
        if get(state, CELLS_AT) + CELL_MARGIN > get(state, CELLS_END):
            stopped = CELLS_FULL
            break
        time_ns = seconds * 1_000_000_000 + ticks * tick_ns
        if time_ns < get(state, BIN_START_NS) or time_ns >= get(state, BIN_END_NS):
            set_time(state, time_ns)
        count(state, N_PACKETS)
        add(state + 8 * N_BYTES, length)
        decode(state, record + 16, kept, length, time_ns, link)
        if time_ns < get(state, LAST_NS):
            count(state, N_BACKWARDS)
            put(state, FIRST_NS, min(time_ns, get(state, FIRST_NS)))
        else:
            put(state, LAST_NS, time_ns)
        at += 16 + kept
    put(state, STOPPED, stopped)
    put(state, NEEDED, needed)
    return at


def finish(state: int, first: int, _unused: int) -> int:
    """Close the open cells of the flows from one on; returns the flow to go on with."""
    return close_all(state, first)


ENTRIES = (walk, finish)
