"""Kernels of the flow table: which flow a packet belongs to, and its counters.

The table maps the 5-tuple as it stands in the packet to the flow, so that both directions are found at once; keys are
spread by multiplication (Knuth, The Art of Computer Programming 3, 6.4) and probed in a row.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernel_memory import (
    inlined,
    kernel,
    load8,
    load16,
    load32,
    load64,
    store8,
    store16,
    store32,
    store64,
    times,
)
from ringtap.analysis.pcap.kernel_state import (
    BASE_BIN,
    BIN,
    BIN_END_NS,
    BIN_NS,
    BIN_START_NS,
    CELLS_AT,
    CELLS_END,
    CONVERSATIONS,
    DIRECTIONS,
    DIRECTION_BYTES,
    D_BIN,
    D_BYTES,
    D_DATA_BYTES,
    D_DATA_PACKETS,
    D_LAST_NS,
    D_NEXT,
    D_PACKETS,
    D_PAYLOAD,
    D_SEGMENTS,
    D_SYN,
    D_TIMED,
    FIRST_NS,
    FULL_CELL_BYTES,
    FULL_CELL_PACKETS,
    K_FLOW,
    K_REST,
    LAST_NS,
    LEAST_BIN,
    MOST_BINS_AWAY,
    MOST_NS,
    MOST_ROWS,
    NO_BIN,
    N_BAD_TIME,
    N_OVER_LIMIT,
    PACKETS_AT,
    ROOM,
    ROWS,
    SLOTS,
    SLOT_MASK,
    SLOT_SHIFT,
    SLOTS_A_ROW,
)
from ringtap.analysis.pcap.layout import CELL, CONVERSATION, PACKET

_ROW, _CELL, _PACKET = CONVERSATION.itemsize, CELL.itemsize, PACKET.itemsize
_A, _B = (CONVERSATION.fields[name][1] for name in ("a", "b"))
_A_PORT, _B_PORT = (CONVERSATION.fields[name][1] for name in ("a_port", "b_port"))
_PACKETS, _BYTES, _PAYLOAD, _DATA_PACKETS, _DATA_BYTES, _SEGMENTS = (
    CONVERSATION.fields[name][1]
    for name in (
        "packets",
        "bytes",
        "payload",
        "data_packets",
        "data_bytes",
        "segments",
    )
)
_RTT_MIN, _HANDSHAKE, _FIRST_NS, _LAST_NS = (
    CONVERSATION.fields[name][1] for name in ("rtt_min_ns", "handshake_ns", "first_ns", "last_ns")
)
_MIX, _MIX_REST = -7046029254386353131, -4417276706812531889  # odd, of high entropy


@inlined
def get(state: int, word: int) -> int:
    """A word of the state."""
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
def spread(addresses: int, rest: int) -> int:
    """Hash of a key."""
    mixed = times(addresses, _MIX) ^ times(rest, _MIX_REST)
    mixed = times(mixed ^ ((mixed >> 32) & 0xFFFFFFFF), _MIX)
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


@inlined
def _half(at: int) -> int:
    mixed = times(load64(at) ^ times(load64(at + 8), _MIX_REST), _MIX)
    return mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)


@inlined
def key6(source: int, destination: int) -> int:
    """What stands for two IPv6 addresses in a key; who finds it compares the addresses themselves."""
    return times(_half(source), 3) ^ _half(destination)


@inlined
def _ports_reversed(rest: int) -> int:
    return (rest & -4294967296) | ((rest & 0xFFFF) << 16) | ((rest >> 16) & 0xFFFF)


@inlined
def rest_of(ports: int, protocol: int, kind: int, layer: int, family: int) -> int:
    """The part of a key beside the addresses; ports as they lie in the packet, loaded as one number."""
    return ports | protocol << 32 | kind << 40 | layer << 48 | family << 56


@inlined
def same16(a: int, b: int) -> bool:
    """Whether 16 bytes at two addresses are alike."""
    return load64(a) == load64(b) and load64(a + 8) == load64(b + 8)


@inlined
def row_of(state: int, flow: int) -> int:
    """Address of the conversation of a flow."""
    return get(state, CONVERSATIONS) + (flow >> 1) * _ROW


@inlined
def _find(state: int, addresses: int, rest: int, source: int, destination: int) -> int:
    """Address of the slot that holds a key, or of the free one where it belongs."""
    slots, mask = get(state, SLOTS), get(state, SLOT_MASK)
    index = spread(addresses, rest) & mask
    while True:
        slot = slots + (index << SLOT_SHIFT)
        flow = load64(slot + K_FLOW)
        if flow == 0:
            return slot
        if load64(slot) == addresses and load64(slot + K_REST) == rest:
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
    store64(slot + K_REST, rest)
    store64(slot + K_FLOW, flow + 1)


@kernel
def _grow(state: int) -> None:
    """Four times the slots; the flows are put in again, one direction of each conversation."""
    slots, mask = get(state, SLOTS), get(state, SLOT_MASK)
    for index in range(mask + 1):
        store64(slots + (index << SLOT_SHIFT) + K_FLOW, 0)
    put(state, SLOT_MASK, mask * 4 + 3)
    for number in range(get(state, ROWS)):
        row = get(state, CONVERSATIONS) + number * _ROW
        if load8(row + 3) == 0:
            continue
        ports = load8(row + _A_PORT + 1) | load8(row + _A_PORT) << 8
        ports |= load8(row + _B_PORT + 1) << 16 | load8(row + _B_PORT) << 24
        rest = rest_of(ports, load8(row), load8(row + 1), load8(row + 2), load8(row + 3))
        if load8(row + 3) == 4:
            addresses = (load64(row + _A) & 0xFFFFFFFF) | load64(row + _B) << 32
        else:
            addresses = key6(row + _A, row + _B)
        slot = _find(state, addresses, rest, row + _A, row + _B)
        _write_slot(slot, addresses, rest, number * 2)


@kernel
def _new_conversation(state: int, rest: int, source: int, destination: int, time_ns: int) -> int:
    """A new row; beyond the limit the one that all others share, as -1 less its flow."""
    number = get(state, ROWS)
    if number >= get(state, MOST_ROWS):
        count(state, N_OVER_LIMIT)
        if number > get(state, MOST_ROWS):
            return -1 - 2 * get(state, MOST_ROWS)
        rest = 255 << 32
    elif number * SLOTS_A_ROW > get(state, SLOT_MASK):
        _grow(state)
    put(state, ROWS, number + 1)
    row = get(state, CONVERSATIONS) + number * _ROW
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
    store64(row + _FIRST_NS, time_ns)
    store64(row + _LAST_NS, time_ns)
    for direction in range(2):
        work = get(state, DIRECTIONS) + (number * 2 + direction) * DIRECTION_BYTES
        store64(work + D_BIN, NO_BIN)
        store64(work + D_LAST_NS, NO_BIN)
        for offset in (D_NEXT, D_TIMED, D_SYN):
            store64(work + offset, -1)
    return number * 2 if rest >> 56 else -1 - number * 2


@kernel
def _new_flow(state: int, addresses: int, rest: int, source: int, destination: int, time_ns: int) -> int:
    """The flow of a key that has no slot: the way back of a conversation that is there, or a new conversation."""
    if (rest >> 56) == 4:
        back = (addresses << 32) | ((addresses >> 32) & 0xFFFFFFFF)
    else:
        back = key6(destination, source)
    reverse = load64(_find(state, back, _ports_reversed(rest), destination, source) + K_FLOW)
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
    """The flow of a packet; a new one where its key was never seen."""
    flow = load64(_find(state, addresses, rest, source, destination) + K_FLOW)
    if flow:
        return flow - 1
    return _new_flow(state, addresses, rest, source, destination, time_ns)


@inlined
def flow_of4(state: int, at: int, rest: int, time_ns: int) -> int:
    """The flow of a packet whose IPv4 addresses lie at an address."""
    return flow_of(state, load64(at), rest, at, at + 4, time_ns)


@inlined
def flow_of6(state: int, at: int, rest: int, time_ns: int) -> int:
    """The flow of a packet whose IPv6 addresses lie at an address."""
    return flow_of(state, key6(at, at + 16), rest, at, at + 16, time_ns)


@inlined
def work_of(state: int, flow: int) -> int:
    """Address of a flow's work area."""
    return get(state, DIRECTIONS) + flow * DIRECTION_BYTES


@kernel
def in_bin(state: int, time_ns: int) -> int:
    """Make the bin of a time the current one.

    Returns:
        The time; the latest one where it is out of all range, -1 if there was none yet.
    """
    width, latest = get(state, BIN_NS), get(state, LAST_NS)
    sound = 0 <= time_ns < MOST_NS
    if sound and latest >= 0:
        sound = abs(time_ns // width - get(state, BASE_BIN)) < MOST_BINS_AWAY
    if not sound:
        count(state, N_BAD_TIME)
        if latest < 0:
            return -1
        time_ns = latest
    number = time_ns // width
    if latest < 0:
        put(state, BASE_BIN, number)
        put(state, FIRST_NS, time_ns)
    put(state, BIN_START_NS, number * width)
    put(state, BIN_END_NS, number * width + width)
    number -= get(state, BASE_BIN)
    put(state, BIN, number)
    put(state, LEAST_BIN, min(number, get(state, LEAST_BIN)))
    return time_ns


@kernel
def _went_back(state: int, flow: int, time_ns: int) -> None:
    row, work = row_of(state, flow), work_of(state, flow)
    store64(row + _FIRST_NS, min(load64(row + _FIRST_NS), time_ns))
    store64(work + D_LAST_NS, max(load64(work + D_LAST_NS), time_ns))


@kernel
def _write_packet(state: int, flow: int, length: int, payload: int, time_ns: int) -> None:
    packet = get(state, PACKETS_AT)
    put(state, PACKETS_AT, packet + _PACKET)
    store64(packet, time_ns)
    for number, value in enumerate((flow, length, payload)):
        store32(packet + 8 + 4 * number, value)


@kernel
def close_cell(state: int, flow: int) -> None:
    """Write the open cell of a flow."""
    work = work_of(state, flow)
    number = load64(work + D_BIN)
    if number == NO_BIN:
        return
    packets, data_packets = load64(work + D_PACKETS), load64(work + D_DATA_PACKETS)
    size, data_bytes, payload = (
        load64(work + D_BYTES),
        load64(work + D_DATA_BYTES),
        load64(work + D_PAYLOAD),
    )
    cell = get(state, CELLS_AT)
    put(state, CELLS_AT, cell + _CELL)
    store32(cell, flow)
    store32(cell + 4, number)
    store16(cell + 8, packets)
    store16(cell + 10, data_packets)
    store32(cell + 12, size)
    store32(cell + 16, data_bytes)
    store32(cell + 20, payload)
    store64(work + D_BIN, NO_BIN)


@inlined
def account(state: int, flow: int, length: int, payload: int, time_ns: int) -> int:
    """Count a packet for its flow and the current bin.

    Returns:
        The address of the flow's work area.
    """
    work = work_of(state, flow)
    number = get(state, BIN)
    data = 1 if payload > 0 else 0
    if load64(work + D_BIN) == number:
        packets = load64(work + D_PACKETS) + 1
        size = load64(work + D_BYTES) + length
        store64(work + D_PACKETS, packets)
        store64(work + D_BYTES, size)
        add(work + D_DATA_PACKETS, data)
        add(work + D_DATA_BYTES, length * data)
        add(work + D_PAYLOAD, payload)
        if packets == FULL_CELL_PACKETS or size >= FULL_CELL_BYTES:
            close_cell(state, flow)
    else:
        close_cell(state, flow)
        store64(work + D_BIN, number)
        store64(work + D_PACKETS, 1)
        store64(work + D_BYTES, length)
        store64(work + D_DATA_PACKETS, data)
        store64(work + D_DATA_BYTES, length * data)
        store64(work + D_PAYLOAD, payload)
    if time_ns >= get(state, LAST_NS):
        store64(work + D_LAST_NS, time_ns)
    else:
        _went_back(state, flow, time_ns)
    if get(state, PACKETS_AT):
        _write_packet(state, flow, length, payload, time_ns)
    return work


@kernel
def close_all(state: int, first: int) -> int:
    """Close the cells of the flows from one on, as far as there is room; what the work areas hold goes to the rows.

    Returns:
        The flow to go on with; twice the number of rows when done.
    """
    flows = get(state, ROWS) * 2
    for flow in range(first, flows):
        if get(state, CELLS_AT) + ROOM * _CELL > get(state, CELLS_END):
            return flow
        close_cell(state, flow)
        work = work_of(state, flow)
        row = row_of(state, flow)
        store64(row + _SEGMENTS + (flow & 1) * 8, load64(work + D_SEGMENTS))
        store64(row + _LAST_NS, max(load64(row + _LAST_NS), load64(work + D_LAST_NS)))
    return flows


@kernel
def add_cells(state: int, begin: int, end: int) -> None:
    """Add cells to their conversations: in one go, so that the rows are not fetched for every packet."""
    for cell in range(begin, end, _CELL):
        flow = load32(cell)
        row = row_of(state, flow) + (flow & 1) * 8
        add(row + _PACKETS, load16(cell + 8))
        add(row + _DATA_PACKETS, load16(cell + 10))
        add(row + _BYTES, load32(cell + 12))
        add(row + _DATA_BYTES, load32(cell + 16))
        add(row + _PAYLOAD, load32(cell + 20))
