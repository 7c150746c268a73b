"""Kernels that take a packet apart: link layer, IP, transport."""

from __future__ import annotations

from ringtap.analysis.pcap.kernel_flow import account, count, flow_of4, flow_of6, rest_of
from ringtap.analysis.pcap.kernel_memory import kernel, load8, load32, swapped16
from ringtap.analysis.pcap.kernel_state import N_CUT, N_FRAGMENTS, N_MALFORMED, N_NOT_IP, N_ZERO_LENGTH

_TCP, _UDP = 6, 17


@kernel
def decode(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> None:
    """Count one packet.

    Args:
        state: address of the state.
        at: address of the captured bytes.
        kept: how many there are.
        length: of the frame on the wire.
        time_ns: when it was captured.
        link: LINKTYPE of the interface.
    """
    if link == 1:
        if kept < 14:
            count(state, N_CUT)
            return
        ethertype, offset = swapped16(at + 12), 14
        while ethertype == 0x8100 or ethertype == 0x88A8 or ethertype == 0x9100:
            if kept < offset + 4:
                count(state, N_CUT)
                return
            ethertype, offset = swapped16(at + offset + 2), offset + 4
        if ethertype == 0x0800:
            ipv4(state, at, offset, kept, length, time_ns, 0)
            return
        if ethertype == 0x86DD:
            ipv6(state, at, offset, kept, length, time_ns, 0)
            return
    count(state, N_NOT_IP)


@kernel
def ipv4(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> None:
    """An IPv4 packet (RFC 791) that starts at an offset of the frame."""
    if kept < offset + 20:
        count(state, N_CUT)
        return
    ip = at + offset
    header = (load8(ip) & 15) * 4
    if load8(ip) >> 4 != 4 or header < 20:
        count(state, N_MALFORMED)
        return
    total = swapped16(ip + 2)
    if total == 0:
        count(state, N_ZERO_LENGTH)
        total = length - offset
    protocol = load8(ip + 9)
    fragment = swapped16(ip + 6) & 0x3FFF
    if fragment:
        count(state, N_FRAGMENTS)
    transport(state, at, offset + header, kept, length, time_ns, ip + 12, protocol, total - header, layer, 4)


@kernel
def ipv6(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> None:
    """An IPv6 packet (RFC 8200) that starts at an offset of the frame."""
    if kept < offset + 40:
        count(state, N_CUT)
        return
    ip = at + offset
    size = swapped16(ip + 4)
    if size == 0:
        count(state, N_ZERO_LENGTH)
        size = length - offset - 40
    transport(state, at, offset + 40, kept, length, time_ns, ip + 8, load8(ip + 6), size, layer, 6)


@kernel
def transport(
    state: int,
    at: int,
    offset: int,
    kept: int,
    length: int,
    time_ns: int,
    addresses: int,
    protocol: int,
    size: int,
    layer: int,
    family: int,
) -> None:
    """What IP carries: ``size`` bytes at an offset of the frame."""
    ports, payload = 0, max(size, 0)
    header = at + offset
    if protocol == _TCP:
        if kept < offset + 13:
            count(state, N_CUT)
        else:
            payload = max(size - (load8(header + 12) >> 4) * 4, 0)
    elif protocol == _UDP:
        payload = max(size - 8, 0)
    if (protocol == _TCP or protocol == _UDP) and kept >= offset + 4:
        ports = load32(header)
    rest = rest_of(ports, protocol, 0, layer, family)
    flow = flow_of4(state, addresses, rest, time_ns) if family == 4 else flow_of6(state, addresses, rest, time_ns)
    account(state, flow, length, payload, 1 if payload else 0, time_ns)
