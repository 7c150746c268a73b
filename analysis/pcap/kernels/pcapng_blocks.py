"""Reads packets from pcapng blocks (draft-ietf-opsawg-pcapng); the caller reads the other blocks that matter."""

from __future__ import annotations

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, get, put
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load16,
    load32,
    load64,
    swapped16,
    swapped32,
)
from ringtap.core.capture_file_formats import (
    ENHANCED_BLOCK,
    INTERFACE_BLOCK,
    PACKET_BLOCK,
    SECTION_HEADER,
    SIMPLE_BLOCK,
    STATISTICS_BLOCK,
)

_PACKETS_DROPPED = 4  # an option of an enhanced packet

_MAX_SECONDS = 2**32


@inlined
def _word(state: int, at: int) -> int:
    return swapped32(at) if get(state, ks.SWAPPED) else load32(at)


@inlined
def _is_packet(kind: int) -> bool:
    return kind in (ENHANCED_BLOCK, SIMPLE_BLOCK, PACKET_BLOCK)


@inlined
def fits(kept: int, length: int, most_kept: int) -> bool:
    """True if a packet can have so many captured bytes and such a length, in files of both formats.

    As in libpcap (sf-pcap.c, sf-pcapng.c), the captured bytes may exceed the length that the file says.

    Args:
        kept: captured bytes.
        length: length on the wire.
        most_kept: MAX_KEPT of the state.
    """
    return kept <= most_kept and length <= ks.MAX_FRAME_BYTES


@inlined
def block_stops(state: int, block: int, size: int) -> int:
    """Return the reason to stop at a block, of which at least 12 bytes are available; MORE if the walk can continue.

    Blocks of unknown type are counted here.
    """
    if load32(block) == SECTION_HEADER:
        return ks.SECTION
    kind, total = _word(state, block), _word(state, block + 4)
    is_known = _is_packet(kind) or kind in (INTERFACE_BLOCK, STATISTICS_BLOCK)
    unsound = total & 3 or total < 12 or kind == 0 or (is_known and total > ks.MAX_BLOCK_BYTES)
    if unsound or (size >= total and _word(state, block + total - 4) != total):
        return ks.CORRUPT
    if kind in (INTERFACE_BLOCK, STATISTICS_BLOCK):
        return ks.SECTION
    if not is_known:
        count(state, ks.N_UNKNOWN_BLOCKS)
        if size < total:
            put(state, ks.NEEDED, total - size)
            return ks.PASS_OVER
    return ks.MORE


@inlined
def _time_ns(interface: int, high: int, low: int) -> int:
    scale, by, offset = load64(interface + ks.I_SCALE), load64(interface + ks.I_BY), load64(interface + ks.I_OFFSET_NS)
    ticks = high << 32 | low
    half = high << 31 | low >> 1  # the ticks may take all 64 bits; half of them has a sign bit of 0
    if scale == ks.DIVIDED:
        return half // (by >> 1) + offset
    if scale == ks.POWER_OF_TWO:
        whole, part = half >> (by - 1), ticks & ((1 << by) - 1)
        if whole > _MAX_SECONDS:
            return -1  # out of range
        if by > 30:  # 30 bits are enough for nanoseconds
            part, by = part >> (by - 30), 30
        return whole * 1_000_000_000 + (part * 1_000_000_000 >> by) + offset
    if ticks < 0 or ticks > load64(interface + ks.I_MOST):
        return -1
    return ticks * by + offset


@kernel
def _add_dropped(state: int, at: int, end: int) -> None:
    """Count the packets that were dropped before one, by its options, which lie between two addresses."""
    while at + 4 <= end:
        swapped = get(state, ks.SWAPPED)
        code, size = (swapped16(at), swapped16(at + 2)) if swapped else (load16(at), load16(at + 2))
        if code == 0:
            return
        if code == _PACKETS_DROPPED and size == 8 and at + 12 <= end:
            low, high = (8, 4) if swapped else (4, 8)
            add(state + 8 * ks.N_DROPPED, _word(state, at + low) | (_word(state, at + high) & 0xFFFF) << 32)
        at += 4 + (size + 3 & -4)


@inlined
def packet_of_block(state: int, block: int, total: int) -> tuple[int, int, int, int, int]:
    """Return captured bytes, length, time, data address (0: no packet) and interface number of a complete block."""
    kind = _word(state, block)
    if not _is_packet(kind):
        return 0, 0, 0, 0, 0
    header = 28 if kind != SIMPLE_BLOCK else 12
    if total < header + 4:
        count(state, ks.N_MALFORMED)
        return 0, 0, 0, 0, 0
    number = 0
    if kind == ENHANCED_BLOCK:
        number = _word(state, block + 8)
    elif kind == PACKET_BLOCK:
        number = swapped16(block + 8) if get(state, ks.SWAPPED) else load16(block + 8)
    if number >= get(state, ks.INTERFACE_COUNT):
        count(state, ks.N_NO_INTERFACE)
        return 0, 0, 0, 0, 0
    interface = get(state, ks.INTERFACES) + number * ks.INTERFACE_BYTES
    if kind == SIMPLE_BLOCK:
        length, time_ns = _word(state, block + 8), ks.NO_TIME
        snap = load64(interface + ks.I_SNAP)
        kept = min(length, total - header - 4)
        if snap:
            kept = min(kept, snap)
        count(state, ks.N_NO_TIME)
    else:
        kept, length = _word(state, block + 20), _word(state, block + 24)
        time_ns = _time_ns(interface, _word(state, block + 12), _word(state, block + 16))
        if time_ns < 0:
            time_ns = ks.NO_TIME - 1  # counted as an impossible time
    if kept > total - header - 4 or not fits(kept, length, get(state, ks.MAX_KEPT)):
        count(state, ks.N_MALFORMED)
        return 0, 0, 0, 0, 0
    if kind == ENHANCED_BLOCK and total > header + 4 + (kept + 3 & -4):
        _add_dropped(state, block + header + (kept + 3 & -4), block + total - 4)
    return kept, length, time_ns, block + header, number


@kernel
def is_block(state: int, block: int, size: int) -> int:
    """Return 1 if two valid blocks in a row begin at an address, else -1; 0 if NEEDED bytes are required to decide."""
    place, known = 0, 1
    for _ in range(2):
        if place and place == size and get(state, ks.IS_END):
            break
        if place + 12 > size:
            known = 0 if place else -1
            put(state, ks.NEEDED, place + 12)
            break
        kind, total = _word(state, block + place), _word(state, block + place + 4)
        if kind == SECTION_HEADER and place:
            break
        if kind > ENHANCED_BLOCK or kind == 0 or total & 3 or total < 12 or total > ks.MAX_BLOCK_BYTES:
            known = -1
            break
        if place + total > size:
            known = 0
            put(state, ks.NEEDED, place + total)
            break
        if _word(state, block + place + total - 4) != total:
            known = -1
            break
        place += total
    return known
