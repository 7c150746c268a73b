"""Joins the scan of a file's next part to the scan of all before it.

The part's TCP segments were written down and are followed here, from the state in which the parts before left each
connection. All other results are sums, earliest and latest times.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, flow_of, get, key_of, put, row_of, work_of
from ringtap.analysis.pcap.kernels.kernel_primitives import inlined, kernel, load32, load64, store32, store64
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, offsets

_ROW, _CELL, _COUNTS = CONVERSATION.itemsize, CELL.itemsize, len(ks.COUNTS)
_A, _B, _FIRST_NS = offsets(CONVERSATION, "a", "b", "first_ns")


@inlined
def _join_direction(state: int, work: int, other: int) -> None:
    """Add what a part found of a direction, and reset it for the next part."""
    add(work + ks.D_SEGMENTS, load64(other + ks.D_SEGMENTS))
    store64(work + ks.D_LAST_NS, max(load64(work + ks.D_LAST_NS), load64(other + ks.D_LAST_NS)))
    tag = load64(other + ks.D_TAG)
    if tag:
        before, first = load64(work + ks.D_TAG), load64(other + ks.D_FIRST_TAG)
        if before and first != before:
            count(state, ks.N_NETWORKS)
        store64(work + ks.D_TAG, tag)
    store64(other + ks.D_SEGMENTS, 0)
    store64(other + ks.D_LAST_NS, ks.NO_BIN)
    store64(other + ks.D_TAG, 0)
    store64(other + ks.D_RUN_LIMIT, 0)


@kernel
def join_rows(state: int, part: int, flows: int) -> None:
    """Add the part's conversations; write the flow here of each new one's first direction."""
    joined = get(part, ks.JOINED_ROWS)
    for number in range(get(part, ks.ROWS)):
        forth = work_of(part, number * 2)
        back = forth ^ 128
        if number >= joined:
            row = get(part, ks.CONVERSATIONS) + number * _ROW
            addresses, rest = key_of(state, row)
            first_ns = load64(row + _FIRST_NS)
            flow = flow_of(state, addresses, rest, row + _A, row + _B, first_ns)
            store64(flows + 8 * number, flow)
            mine = row_of(state, flow) + _FIRST_NS
            store64(mine, min(load64(mine), first_ns))
        elif load64(forth + ks.D_LAST_NS) == ks.NO_BIN and load64(back + ks.D_LAST_NS) == ks.NO_BIN:
            continue  # it has no packets in this part
        work = work_of(state, load64(flows + 8 * number))
        _join_direction(state, work, forth)
        _join_direction(state, work ^ 128, back)
    put(part, ks.JOINED_ROWS, get(part, ks.ROWS))


@kernel
def join_cells(state: int, begin: int, end: int, flows: int, shift: int) -> None:
    """Copy the part's cells, for which there is room."""
    at = get(state, ks.CELLS_AT)
    put(state, ks.CELLS_AT, at + end - begin)
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
    for word in range(ks.COUNTED, ks.COUNTED + _COUNTS):
        put(state, word, get(state, word) + get(part, word))
    put(state, ks.FIRST_NS, min(get(state, ks.FIRST_NS), get(part, ks.FIRST_NS)))
    put(state, ks.LAST_NS, max(get(state, ks.LAST_NS), get(part, ks.LAST_NS)))
    put(state, ks.MIN_BIN, min(get(state, ks.MIN_BIN), get(part, ks.MIN_BIN) + shift))
    put(state, ks.BIN, get(part, ks.BIN) + shift)
    put(state, ks.BIN_START_NS, get(part, ks.BIN_START_NS))
    put(state, ks.BIN_END_NS, get(part, ks.BIN_END_NS))


@kernel
def bins_between(state: int, part: int) -> int:
    """Return what is added to the part's bins."""
    return get(part, ks.BASE_BIN) - get(state, ks.BASE_BIN)
