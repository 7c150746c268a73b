"""Kernels that decode a packet down to IP: link layers, VLAN and MPLS tags, IPv4, IPv6.

A packet is given by its address in memory, the number of captured bytes and its length. Link types are those of
tcpdump.org/linktypes.html. The kernels of link, tags and IP return the offset of an inner Ethernet frame, or 0.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels.cells import account
from ringtap.analysis.pcap.kernels.flow import count, flow_of, flow_of6, get, put, rest_of
from ringtap.analysis.pcap.kernels.memory import (
    inlined,
    kernel,
    load8,
    load16,
    load32,
    swapped16,
    swapped32,
)
from ringtap.analysis.pcap.kernels.state import (
    N_CUT,
    N_FRAGMENTS,
    N_LINK,
    N_MALFORMED,
    N_NOT_IP,
    N_ZERO_LENGTH,
    TAG,
    UNTAGGED,
    ZEROS,
)
from ringtap.analysis.pcap.kernels.transport import tcp4, transport
from ringtap.analysis.pcap.layout import ARP, ARP_CUT, NO_ADDRESSES, NOT_IP, RARP, RARP_CUT

_IPV4, _IPV6, _MPLS, _MPLS_MULTICAST = 0x0800, 0x86DD, 0x8847, 0x8848
_ARP, _RARP, _PPPOE = 0x0806, 0x8035, 0x8864
_PPP_IPV4, _PPP_IPV6 = 0x0021, 0x0057
_TAG_MASK = 2**60 - 1  # of five VLANs
_FOR_IPV4 = 0x04060008  # of ARP, as loaded: protocol IPv4, addresses of six and four bytes
_NULL, _ETHERNET, _LOOP, _COOKED, _IPOIB, _COOKED2 = 0, 1, 108, 113, 242, 276
_HOP_BY_HOP, _FRAGMENT, _AUTHENTICATION = 0, 44, 51


@kernel
def _by_version(first: int) -> int:
    version = first >> 4
    return _IPV4 if version == 4 else _IPV6 if version == 6 else 0


@kernel
def _ipv4(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> int:
    """Decode an IPv4 packet (RFC 791)."""
    if kept < offset + 20:
        count(state, N_CUT)
        return 0
    ip = at + offset
    header, total = (load8(ip) & 15) * 4, swapped16(ip + 2)
    if total == 0:
        count(state, N_ZERO_LENGTH)
        total = length - offset
    if load8(ip) >> 4 != 4 or header < 20 or total < header:
        count(state, N_MALFORMED)
        return 0
    if total > length - offset:
        count(state, N_MALFORMED)
        total = max(length - offset, header)
    protocol, fragment = load8(ip + 9), swapped16(ip + 6) & 0x3FFF
    identity = -1
    if fragment:
        count(state, N_FRAGMENTS)
        identity = swapped16(ip + 4) | protocol << 32
    first = 0 if fragment & 0x1FFF else 1
    return transport(
        state,
        at,
        offset + header,
        kept,
        length,
        time_ns,
        ip + 12,
        protocol,
        total - header,
        identity,
        first,
        layer,
        4,
    )


@kernel
def _ipv6(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> int:
    """Decode an IPv6 packet (RFC 8200) with its extension headers."""
    if kept < offset + 40:
        count(state, N_CUT)
        return 0
    ip, place = at + offset, offset + 40
    size, protocol = swapped16(ip + 4), load8(ip + 6)
    if load8(ip) >> 4 != 6:
        count(state, N_MALFORMED)
        return 0
    if size == 0 and length > place:
        count(state, N_ZERO_LENGTH)  # a jumbogram, or segmentation offload
        size = length - place
    if size > length - place:
        count(state, N_MALFORMED)
        size = max(length - place, 0)
    end, identity, first = place + size, -1, 1
    while first and protocol in (
        _HOP_BY_HOP,
        43,
        _FRAGMENT,
        _AUTHENTICATION,
        60,
        135,
        139,
        140,
    ):
        if kept < place + 8:
            count(state, N_CUT)
            break
        header = at + place
        following, units = load8(header), load8(header + 1)
        if protocol == _FRAGMENT:
            fragment = swapped16(header + 2)
            if fragment & 0xFFF9:  # not an atomic fragment (RFC 6946)
                count(state, N_FRAGMENTS)
                identity = swapped32(header + 4) | following << 32
                first = 0 if fragment & 0xFFF8 else 1
            place += 8
        else:
            place += (units + 2) * 4 if protocol == _AUTHENTICATION else (units + 1) * 8
        protocol = following
    if place > end:
        count(state, N_MALFORMED)
    size = max(end - place, 0)
    return transport(
        state,
        at,
        place,
        kept,
        length,
        time_ns,
        ip + 8,
        protocol,
        size,
        identity,
        first,
        layer,
        6,
    )


@kernel
def _not_ip(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, ethertype: int, layer: int) -> None:
    """Count a non-IP frame: ARP by its protocol addresses (RFC 826), all others in one row, for filters on them."""
    count(state, N_NOT_IP)
    arp, kind = at + offset, ARP if ethertype == _ARP else RARP if ethertype == _RARP else NOT_IP
    none, target = state + 8 * ZEROS, at + offset + 24
    if kind != NOT_IP and kept < offset + 28:
        kind, target = ARP_CUT if kind == ARP else RARP_CUT, none
        if kept < length:
            count(state, N_CUT)
    if kind != NOT_IP and kept >= offset + 18 and load32(arp + 2) == _FOR_IPV4:
        addresses = load32(arp + 14) | load32(target) << 32
        flow = flow_of(state, addresses, rest_of(0, 0, kind, layer, 4), arp + 14, target, time_ns)
    else:
        flow = flow_of6(state, none, rest_of(0, 0, kind, layer, NO_ADDRESSES), time_ns)
    account(state, flow, length, 0, time_ns)


@kernel
def _network(
    state: int,
    at: int,
    offset: int,
    kept: int,
    length: int,
    time_ns: int,
    ethertype: int,
    layer: int,
) -> int:
    """Decode the packet behind an ethertype and any number of tags."""
    while ethertype in (0x8100, 0x88A8, 0x9100, 0x9200):
        if kept < offset + 4:
            count(state, N_CUT)
            return 0
        put(state, TAG, (get(state, TAG) << 12 | swapped16(at + offset) & 0xFFF) & _TAG_MASK)
        ethertype, offset = swapped16(at + offset + 2), offset + 4
    if ethertype in (_MPLS, _MPLS_MULTICAST):
        bottom = 0
        while not bottom and kept > offset + 4:
            bottom, offset = load8(at + offset + 2) & 1, offset + 4
        if not bottom:
            count(state, N_CUT)
            return 0
        ethertype = _by_version(load8(at + offset))
    if ethertype == _PPPOE and kept >= offset + 8:
        inside = swapped16(at + offset + 6)
        if inside in (_PPP_IPV4, _PPP_IPV6):
            ethertype, offset = _IPV4 if inside == _PPP_IPV4 else _IPV6, offset + 8
    if ethertype == _IPV4:
        return _ipv4(state, at, offset, kept, length, time_ns, layer)
    if ethertype == _IPV6:
        return _ipv6(state, at, offset, kept, length, time_ns, layer)
    _not_ip(state, at, offset, kept, length, time_ns, ethertype, layer)
    return 0


@kernel
def _is_loopback_ip(at: int) -> bool:
    """True if a loopback header holds IPv4 or IPv6, as an address family of some system or as an ethertype."""
    family = load32(at)
    return (family if family < 0x10000 else swapped32(at)) in (2, 10, 24, 28, 30, _IPV4, _IPV6)


@kernel
def _link(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> int:
    ethertype = 0
    if link == _ETHERNET:
        header, place = 14, 12
    elif link == _COOKED:
        header, place = 16, 14
    elif link == _COOKED2:
        header, place = 20, 0
    elif link == _IPOIB:
        header, place = 44, 40  # after a global route header
    elif link in (_NULL, _LOOP):
        header, place = 4, -1
    elif link in (12, 14, 101, 228, 229):  # raw IP
        header, place = 0, -1
    else:
        count(state, N_LINK)
        return 0
    if kept <= header:
        count(state, N_CUT)
        return 0
    if place >= 0:
        ethertype = swapped16(at + place)
    elif header == 0 or _is_loopback_ip(at):
        ethertype = _by_version(load8(at + header))
    return _network(state, at, header, kept, length, time_ns, ethertype, 0)


@kernel
def _any(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> None:
    put(state, TAG, UNTAGGED)
    inner = _link(state, at, kept, length, time_ns, link)
    if inner:
        put(state, TAG, UNTAGGED << 24 | swapped32(at + inner - 4) >> 8)  # the VNI
        ethertype = swapped16(at + inner + 12)
        _network(state, at, inner + 14, kept, length, time_ns, ethertype, 1)


@inlined
def decode(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> None:
    """Count one packet.

    Args:
        state: address of the state.
        at: address of the captured bytes.
        kept: number of captured bytes.
        length: bytes of the frame on the wire.
        time_ns: time of capture.
        link: LINKTYPE of the interface.
    """
    # nearly every packet: Ethernet, IPv4 without options, no fragment, TCP with its whole header
    if (
        link == _ETHERNET
        and kept >= 54
        and load32(at + 12) & 0xFFFFFF == 0x450008
        and load16(at + 20) & 0xFF3F == 0
        and load8(at + 23) == 6
    ):
        total = swapped16(at + 16)
        if 40 <= total <= length - 14:
            tcp4(state, at, kept, length, total, time_ns)
            return
    _any(state, at, kept, length, time_ns, link)
