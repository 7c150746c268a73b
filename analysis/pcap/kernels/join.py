"""Kernels that join the scan of a file's next part to the scan of all before it.

The part's TCP segments were written down and are followed here, from the state in which the parts before left each
connection. All other results are sums, earliest and latest times.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels.flow import add, count, flow_of, get, key_of, put, row_of, work_of
from ringtap.analysis.pcap.kernels.memory import inlined, kernel, load32, load64, store32, store64
from ringtap.analysis.pcap.kernels.state import (
    BASE_BIN,
    BIN,
    BIN_END_NS,
    BIN_START_NS,
    CELLS_AT,
    CONVERSATIONS,
    COUNTED,
    COUNTS,
    D_FIRST_TAG,
    D_LAST_NS,
    D_RUN_LIMIT,
    D_SEGMENTS,
    D_TAG,
    FIRST_NS,
    JOINED_ROWS,
    LAST_NS,
    MIN_BIN,
    N_NETWORKS,
    NO_BIN,
    ROWS,
)
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, offsets

_ROW, _CELL, _COUNTS = CONVERSATION.itemsize, CELL.itemsize, len(COUNTS)
_A, _B, _FIRST_NS = offsets(CONVERSATION, "a", "b", "first_ns")


@inlined
def _join_direction(state: int, work: int, other: int) -> None:
    """Add what a part found of a direction, and reset it for the next part."""
    add(work + D_SEGMENTS, load64(other + D_SEGMENTS))
    store64(work + D_LAST_NS, max(load64(work + D_LAST_NS), load64(other + D_LAST_NS)))
    tag = load64(other + D_TAG)
    if tag:
        before, first = load64(work + D_TAG), load64(other + D_FIRST_TAG)
        if before and first > 0 and first != before:
            count(state, N_NETWORKS)
        store64(work + D_TAG, tag)
    store64(other + D_SEGMENTS, 0)
    store64(other + D_LAST_NS, NO_BIN)
    store64(other + D_TAG, 0)
    store64(other + D_FIRST_TAG, -1)
    store64(other + D_RUN_LIMIT, 0)


@kernel
def join_rows(state: int, part: int, flows: int) -> None:
    """Add the part's conversations; write the flow here of each new one's first direction."""
    joined = get(part, JOINED_ROWS)
    for number in range(get(part, ROWS)):
        forth = work_of(part, number * 2)
        back = forth ^ 128
        if number >= joined:
            row = get(part, CONVERSATIONS) + number * _ROW
            addresses, rest = key_of(state, row)
            first_ns = load64(row + _FIRST_NS)
            flow = flow_of(state, addresses, rest, row + _A, row + _B, first_ns)
            store64(flows + 8 * number, flow)
            mine = row_of(state, flow) + _FIRST_NS
            store64(mine, min(load64(mine), first_ns))
        elif load64(forth + D_LAST_NS) == NO_BIN and load64(back + D_LAST_NS) == NO_BIN:
            continue  # it has no packets in this part
        work = work_of(state, load64(flows + 8 * number))
        _join_direction(state, work, forth)
        _join_direction(state, work ^ 128, back)
    put(part, JOINED_ROWS, get(part, ROWS))


@kernel
def join_cells(state: int, begin: int, end: int, flows: int, shift: int) -> None:
    """Copy the part's cells, for which there is room."""
    at = get(state, CELLS_AT)
    put(state, CELLS_AT, at + end - begin)
    for cell in range(begin, end, _CELL):
        flow = load32(cell + 8)
        store64(at, load64(cell) + shift)
        store32(at + 8, load64(flows + (flow >> 1) * 8) ^ (flow & 1))
        store64(at + 12, load64(cell + 12))
        store64(at + 20, load64(cell + 20))
        at += _CELL


@kernel
def join_sums(state: int, part: int, shift: int) -> None:
    """Add the counts, and go on from the part's times and bin."""
    for word in range(COUNTED, COUNTED + _COUNTS):
        put(state, word, get(state, word) + get(part, word))
    put(state, FIRST_NS, min(get(state, FIRST_NS), get(part, FIRST_NS)))
    put(state, LAST_NS, max(get(state, LAST_NS), get(part, LAST_NS)))
    put(state, MIN_BIN, min(get(state, MIN_BIN), get(part, MIN_BIN) + shift))
    put(state, BIN, get(part, BIN) + shift)
    put(state, BIN_START_NS, get(part, BIN_START_NS))
    put(state, BIN_END_NS, get(part, BIN_END_NS))


@kernel
def bins_between(state: int, part: int) -> int:
    """Return what is added to the part's bins."""
    return get(part, BASE_BIN) - get(state, BASE_BIN)
