"""Counts packets by flow and time bin: each in its flow's open cell, which closes when the flow enters another bin.

Conversations are summed up from the cells, not packet by packet, so that each packet touches little memory.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, get, put, row_of, work_of
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load16,
    load32,
    load64,
    store16,
    store32,
    store64,
)
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, PACKET, PICK, offsets

_CELL, _PACKET = CELL.itemsize, PACKET.itemsize
_PACKETS, _BYTES, _PAYLOAD, _DATA_PACKETS, _DATA_BYTES, _SEGMENTS = offsets(
    CONVERSATION, "packets", "bytes", "payload", "data_packets", "data_bytes", "segments"
)
_FIRST_NS, _LAST_NS = offsets(CONVERSATION, "first_ns", "last_ns")
_FLOW, _INNER = offsets(PICK, "flow", "inner")


@kernel
def in_bin(state: int, time_ns: int) -> int:
    """Set the current bin to that of a time.

    Returns:
        The time; NO_TIME if it is missing or impossible, and then the bin of the previous packet stays current.
    """
    width, latest = get(state, ks.BIN_NS), get(state, ks.LAST_NS)
    if time_ns < 0 or time_ns >= ks.MAX_NS:
        if time_ns != ks.NO_TIME:
            count(state, ks.N_BAD_TIME)
        if latest < 0:
            put(state, ks.BIN, ks.UNKNOWN_BIN)
        return ks.NO_TIME
    number = time_ns // width
    if latest < 0:
        put(state, ks.BASE_BIN, number)
        put(state, ks.FIRST_NS, time_ns)
    elif abs(number * width - get(state, ks.BIN_START_NS)) > ks.JUMP_NS:
        count(state, ks.N_JUMPS)
    put(state, ks.BIN_START_NS, number * width)
    put(state, ks.BIN_END_NS, number * width + width)
    number -= get(state, ks.BASE_BIN)
    put(state, ks.BIN, number)
    put(state, ks.MIN_BIN, min(number, get(state, ks.MIN_BIN)))
    return time_ns


@kernel
def _went_back(state: int, flow: int, time_ns: int) -> None:
    """Record the time of a packet that is earlier than a previous one; without a time, it counts at the latest time."""
    if time_ns < 0:
        time_ns = get(state, ks.LAST_NS)
    row, work = row_of(state, flow), work_of(state, flow)
    store64(row + _FIRST_NS, min(load64(row + _FIRST_NS), time_ns))
    store64(work + ks.D_LAST_NS, max(load64(work + ks.D_LAST_NS), time_ns))


@kernel
def _write_packet(state: int, flow: int, length: int, payload: int, time_ns: int) -> None:
    packet = get(state, ks.PACKETS_AT)
    put(state, ks.PACKETS_AT, packet + _PACKET)
    store64(packet, time_ns if time_ns >= 0 else get(state, ks.LAST_NS))
    for number, value in enumerate((flow, length, payload, 0)):
        store32(packet + 8 + 4 * number, value)


@kernel
def _note_flow(row: int, flow: int, payload: int) -> None:
    """Write the flow and payload of a picked packet into its row; those inside a tunnel come second."""
    at = row + (_INNER if load32(row + _FLOW) else _FLOW)
    store32(at, flow + 1)
    store32(at + 4, payload)


@kernel
def close_cell(state: int, flow: int) -> None:
    """Write the open cell of a flow, if it has one."""
    work = work_of(state, flow)
    number = load64(work + ks.D_BIN)
    if number == ks.NO_BIN:
        return
    packets, data_packets = load64(work + ks.D_PACKETS), load64(work + ks.D_DATA_PACKETS)
    size, data_bytes, payload = load64(work + ks.D_BYTES), load64(work + ks.D_DATA_BYTES), load64(work + ks.D_PAYLOAD)
    cell = get(state, ks.CELLS_AT)
    put(state, ks.CELLS_AT, cell + _CELL)
    store64(cell, number)
    store32(cell + 8, flow)
    store16(cell + 12, packets)
    store16(cell + 14, data_packets)
    store32(cell + 16, size)
    store32(cell + 20, data_bytes)
    store32(cell + 24, payload)
    store64(work + ks.D_BIN, ks.NO_BIN)


@inlined
def account(state: int, flow: int, length: int, payload: int, time_ns: int) -> int:
    """Count a packet for its flow and the current bin.

    Returns:
        The address of the flow's work area.
    """
    work = work_of(state, flow)
    number = get(state, ks.BIN)
    data = 1 if payload > 0 else 0
    if load64(work + ks.D_BIN) == number:
        packets = load64(work + ks.D_PACKETS) + 1
        size = load64(work + ks.D_BYTES) + length
        store64(work + ks.D_PACKETS, packets)
        store64(work + ks.D_BYTES, size)
        add(work + ks.D_DATA_PACKETS, data)
        add(work + ks.D_DATA_BYTES, length * data)
        add(work + ks.D_PAYLOAD, payload)
        if packets == ks.FULL_CELL_PACKETS or size >= ks.FULL_CELL_BYTES:
            close_cell(state, flow)
    else:
        close_cell(state, flow)
        store64(work + ks.D_BIN, number)
        store64(work + ks.D_PACKETS, 1)
        store64(work + ks.D_BYTES, length)
        store64(work + ks.D_DATA_PACKETS, data)
        store64(work + ks.D_DATA_BYTES, length * data)
        store64(work + ks.D_PAYLOAD, payload)
    if time_ns >= get(state, ks.LAST_NS):
        store64(work + ks.D_LAST_NS, time_ns)
    else:
        _went_back(state, flow, time_ns)
    if get(state, ks.PACKETS_AT):
        _write_packet(state, flow, length, payload, time_ns)
    if get(state, ks.PICKED):
        _note_flow(get(state, ks.PICKED), flow, payload)
    return work


@kernel
def close_all(state: int, first: int) -> int:
    """Close the cells of the flows from ``first`` on while there is room, and copy their work areas to the rows.

    Returns:
        The flow to continue with; twice the number of rows when done.
    """
    flows = get(state, ks.ROWS) * 2
    for flow in range(first, flows):
        if get(state, ks.CELLS_AT) + ks.ROOM * _CELL > get(state, ks.CELLS_END):
            return flow
        close_cell(state, flow)
        work = work_of(state, flow)
        row = row_of(state, flow)
        store64(row + _SEGMENTS + (flow & 1) * 8, load64(work + ks.D_SEGMENTS))
        store64(row + _LAST_NS, max(load64(row + _LAST_NS), load64(work + ks.D_LAST_NS)))
    return flows


@kernel
def add_cells(state: int, begin: int, end: int) -> None:
    """Add cells to their conversations, in one pass so that the rows are not fetched for every packet."""
    for cell in range(begin, end, _CELL):
        flow = load32(cell + 8)
        row = row_of(state, flow) + (flow & 1) * 8
        add(row + _PACKETS, load16(cell + 12))
        add(row + _DATA_PACKETS, load16(cell + 14))
        add(row + _BYTES, load32(cell + 16))
        add(row + _DATA_BYTES, load32(cell + 20))
        add(row + _PAYLOAD, load32(cell + 24))
