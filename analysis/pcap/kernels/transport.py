"""Kernels for the transport layer: fragments, the flow of a packet, its payload, TCP and RoCEv2."""

from __future__ import annotations

from ringtap.analysis.pcap.kernels.cells import account
from ringtap.analysis.pcap.kernels.flow import add, count, flow_of4, flow_of6, get, rest_of
from ringtap.analysis.pcap.kernels.memory import (
    inlined,
    kernel,
    load8,
    load16,
    load32,
    load64,
    store64,
    swapped16,
    times,
)
from ringtap.analysis.pcap.kernels.roce import extended_bytes, roce
from ringtap.analysis.pcap.kernels.state import (
    D_SEGMENTS,
    D_TAG,
    F_ADDRESSES,
    F_FLOW,
    F_ID,
    F_NS,
    FRAGMENT_LIFE_NS,
    FRAGMENT_SHIFT,
    FRAGMENT_SLOTS,
    FRAGMENTS,
    N_CUT,
    N_FIRST_MISSING,
    N_MALFORMED,
    N_NETWORKS,
    TAG,
    UNTAGGED,
)
from ringtap.analysis.pcap.kernels.tcp import tcp
from ringtap.analysis.pcap.layout import NO_PORTS, PORTS_CUT, ROCE, TARGET_PORT_CUT

_MIX, _MIX_REST = -7046029254386353131, -4417276706812531889  # odd, of high entropy


@inlined
def _mixed(one: int, two: int) -> int:
    mixed = times(one ^ times(two, _MIX_REST), _MIX)
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


@inlined
def between(addresses: int, family: int) -> int:
    """Return a key for the addresses of a packet, where the destination follows the source."""
    if family == 4:
        return load64(addresses)
    source = _mixed(load64(addresses), load64(addresses + 8))
    return times(source, 3) ^ _mixed(load64(addresses + 16), load64(addresses + 24))


@kernel
def _slot(state: int, addresses: int, identity: int) -> int:
    return get(state, FRAGMENTS) + ((_mixed(addresses, identity) & (FRAGMENT_SLOTS - 1)) << FRAGMENT_SHIFT)


@kernel
def remember_first(state: int, addresses: int, identity: int, flow: int, time_ns: int) -> None:
    """Store the flow of a first fragment."""
    slot = _slot(state, addresses, identity)
    store64(slot + F_ADDRESSES, addresses)
    store64(slot + F_ID, identity)
    store64(slot + F_FLOW, flow + 1)
    store64(slot + F_NS, time_ns)


@kernel
def flow_of_first(state: int, addresses: int, identity: int, time_ns: int) -> int:
    """Return the flow of a later fragment; -1 if its first was not seen, or too long ago."""
    slot = _slot(state, addresses, identity)
    if load64(slot + F_ADDRESSES) != addresses or load64(slot + F_ID) != identity:
        return -1
    since = load64(slot + F_NS)
    is_known = time_ns >= 0 and since >= 0
    return -1 if is_known and abs(time_ns - since) > FRAGMENT_LIFE_NS else load64(slot + F_FLOW) - 1


_TCP, _UDP, _VXLAN_PORT, _ROCE_PORT = 6, 17, 4789, 4791
_BTH_BYTES, _ICRC_BYTES = 12, 4


@inlined
def tcp4(state: int, at: int, kept: int, length: int, total: int, time_ns: int) -> None:
    """Count a packet of TCP in IPv4 without options in Ethernet, of which at least 54 bytes were captured."""
    header_bytes = (load8(at + 46) >> 4) * 4
    payload = total - 20 - header_bytes
    if header_bytes < 20 or payload < 0:
        count(state, N_MALFORMED)
        payload = 0
    rest = rest_of(load32(at + 34), _TCP, 0, 0, 4)
    flow = flow_of4(state, at + 26, rest, time_ns)
    work = account(state, flow, length, payload, time_ns)
    store64(work + D_TAG, UNTAGGED)
    tcp(state, flow, work, at + 34, kept - 34, payload, 4, time_ns)


@kernel
def _flow(state: int, addresses: int, rest: int, family: int, time_ns: int) -> int:
    if family == 4:
        return flow_of4(state, addresses, rest, time_ns)
    return flow_of6(state, addresses, rest, time_ns)


@kernel
def _tcp_payload(state: int, header: int, kept: int, size: int) -> int:
    """Return the bytes after the TCP header; -1 if its length is invalid or was cut off. Anomalies are counted."""
    if kept < 13:
        count(state, N_CUT)
        return -1
    header_bytes = (load8(header + 12) >> 4) * 4
    if header_bytes < 20 or header_bytes > size:
        count(state, N_MALFORMED)
        return -1
    if kept < 20:
        count(state, N_CUT)
    return size - header_bytes


@kernel
def _roce_payload(state: int, header: int, kept: int, size: int) -> int:
    """Return the bytes after the base and extended headers, without pad and ICRC; negative if this is not RoCEv2."""
    if kept < _BTH_BYTES:
        if size >= _BTH_BYTES + _ICRC_BYTES:
            count(state, N_CUT)
        return -1
    extended = extended_bytes(load8(header))
    flags = load8(header + 1)
    if extended < 0 or flags & 15:  # transport version 0 is the only one
        return -1
    return size - _BTH_BYTES - extended - (flags >> 4 & 3) - _ICRC_BYTES


@kernel
def _udp_payload(state: int, header: int, kept: int, size: int) -> tuple[int, int]:
    """Return the kind of a UDP packet, and the bytes after all its headers."""
    if swapped16(header + 2) == _ROCE_PORT:
        inside = _roce_payload(state, header + 8, kept - 8, size - 8)
        if inside >= 0:
            return ROCE, inside
    return 0, size - 8


@kernel
def _is_tunnel(header: int, kept: int) -> bool:
    """True if a UDP header is followed by VXLAN (RFC 7348) with an Ethernet header."""
    return kept >= 30 and swapped16(header + 2) == _VXLAN_PORT and load8(header + 8) & 8 != 0


@inlined
def _keep_network(state: int, work: int) -> None:
    """Count changes of VLAN or VNI, which are not part of a conversation's key."""
    tag, before = get(state, TAG), load64(work + D_TAG)
    if tag != before:
        if before:
            count(state, N_NETWORKS)
        store64(work + D_TAG, tag)


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
    identity: int,
    first: int,
    layer: int,
    family: int,
) -> int:
    """Count the payload of an IP packet.

    Args:
        state: address of the state.
        at: address of the packet.
        offset: offset of the IP payload in the packet.
        kept: captured bytes of the packet.
        length: bytes of the frame.
        time_ns: time of capture.
        addresses: address of the source address, which the destination address follows.
        protocol: protocol number of the IP header.
        size: bytes of the IP payload.
        identity: identification and protocol of the datagram if this is a fragment of it; else -1.
        first: 1 if the datagram begins here, else 0.
        layer: 0, or 1 inside VXLAN.
        family: 4 or 6.

    Returns:
        Offset of an inner Ethernet frame; 0 if there is none.
    """
    key = between(addresses, family)
    if not first:
        flow = flow_of_first(state, key, identity, time_ns)
        if flow < 0:
            count(state, N_FIRST_MISSING)
            flow = _flow(
                state,
                addresses,
                rest_of(0, protocol, NO_PORTS if protocol in (_TCP, _UDP) else 0, layer, family),
                family,
                time_ns,
            )
        add(account(state, flow, length, size, time_ns) + D_SEGMENTS, 1 if size else 0)
        return 0
    header, seen = at + offset, kept - offset
    kind, ports, payload, inner, whole = 0, 0, size, 0, 1
    if protocol in (_TCP, _UDP):
        if seen < 4 or size < 8:
            count(state, N_CUT if size >= 8 else N_MALFORMED)
            payload = whole = 0
            kind = NO_PORTS if size < 8 else PORTS_CUT
            if kind == PORTS_CUT and seen >= 2:
                kind, ports = TARGET_PORT_CUT, load16(header)
        elif protocol == _TCP:
            ports = load32(header)
            payload = _tcp_payload(state, header, seen, size)
            whole = 1 if payload >= 0 and seen >= 20 else 0
            payload = max(payload, 0)
        else:
            ports = load32(header)
            kind, payload = _udp_payload(state, header, seen, size)
            if layer == 0 and _is_tunnel(header, seen):
                inner = offset + 16
    flow = _flow(state, addresses, rest_of(ports, protocol, kind, layer, family), family, time_ns)
    if identity >= 0:
        remember_first(state, key, identity, flow, time_ns)
    work = account(state, flow, length, payload, time_ns)
    _keep_network(state, work)
    if protocol == _TCP and whole and identity < 0:
        tcp(state, flow, work, header, seen, payload, family, time_ns)
    elif payload:
        add(work + D_SEGMENTS, 1)
    if kind == ROCE:
        roce(
            state,
            header + 8,
            kept - offset - 8,
            length,
            payload,
            addresses,
            family,
            time_ns,
        )
    return inner
