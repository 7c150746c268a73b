"""Decodes a packet: link layers, tags, IPv4, IPv6, fragments, tunnels, the transport's payload.

A packet is given by its address in memory, the number of captured bytes and its length. Link types are those of
tcpdump.org/linktypes.html. The kernels for links, tags and IP return the offset of the packet inside a tunnel: positive
for an Ethernet frame, negative for an IP packet, 0 if there is none.
"""

from __future__ import annotations

from ringtap.analysis.pcap import scan_dtypes as dtypes
from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.kernels.flow import add, count, flow_of, flow_of4, flow_of6, get, put, rest_of
from ringtap.analysis.pcap.kernels.kernel_primitives import (
    inlined,
    kernel,
    load8,
    load16,
    load32,
    load64,
    store64,
    swapped16,
    swapped32,
    times,
)
from ringtap.analysis.pcap.kernels.rate_bins import account
from ringtap.analysis.pcap.kernels.roce import extended_bytes, roce
from ringtap.analysis.pcap.kernels.tcp import tcp
from ringtap.core.capture_file_formats import (
    LINK_COOKED,
    LINK_COOKED2,
    LINK_ETHERNET,
    LINK_IPOIB,
    LINK_IPV4,
    LINK_IPV6,
    LINK_LOOP,
    LINK_NULL,
    LINK_RAW,
    LINK_RAW_BSD,
    LINK_RAW_OTHER,
)

_IPV4, _IPV6, _MPLS, _MPLS_MULTICAST = 0x0800, 0x86DD, 0x8847, 0x8848
_ARP, _RARP, _PPPOE = 0x0806, 0x8035, 0x8864
_PPP_IPV4, _PPP_IPV6 = 0x0021, 0x0057
_TAG_MASK = 2**60 - 1  # of five VLANs
_FOR_IPV4 = 0x04060008  # fields of ARP as loaded: protocol IPv4, addresses of six and four bytes
_HOP_BY_HOP, _FRAGMENT, _AUTHENTICATION = 0, 44, 51
_MIX, _MIX_REST = -7046029254386353131, -4417276706812531889  # odd, of high entropy
_TCP, _UDP, _VXLAN_PORT, _ROCE_PORT, _GENEVE_PORT = 6, 17, 4789, 4791, 6081
_IPV4_INSIDE, _IPV6_INSIDE, _GRE = 4, 41, 47
_SHORTEST, _CHECK_BYTES = 64, 4  # an Ethernet frame, padded, with its check sequence
_BRIDGED = 0x6558  # an Ethernet frame inside GRE or Geneve
_BTH_BYTES, _ICRC_BYTES = 12, 4


@inlined
def _mixed(one: int, two: int) -> int:
    mixed = times(one ^ times(two, _MIX_REST), _MIX)
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


@inlined
def _between(addresses: int, family: int) -> int:
    """Return a key for the addresses of a packet, where the destination follows the source."""
    if family == 4:
        return load64(addresses)
    source = _mixed(load64(addresses), load64(addresses + 8))
    return times(source, 3) ^ _mixed(load64(addresses + 16), load64(addresses + 24))


@kernel
def _slot(state: int, addresses: int, identity: int) -> int:
    return get(state, ks.FRAGMENTS) + ((_mixed(addresses, identity) & (ks.FRAGMENT_SLOTS - 1)) << ks.FRAGMENT_SHIFT)


@kernel
def _remember_first(state: int, addresses: int, identity: int, flow: int, time_ns: int) -> None:
    """Store the flow of a first fragment."""
    slot = _slot(state, addresses, identity)
    store64(slot + ks.F_ADDRESSES, addresses)
    store64(slot + ks.F_ID, identity)
    store64(slot + ks.F_FLOW, flow + 1)
    store64(slot + ks.F_NS, time_ns)


@kernel
def _flow_of_first(state: int, addresses: int, identity: int, time_ns: int) -> int:
    """Return the flow of a later fragment; -1 if the first one was not seen, or is too old."""
    slot = _slot(state, addresses, identity)
    if load64(slot + ks.F_ADDRESSES) != addresses or load64(slot + ks.F_ID) != identity:
        return -1
    since = load64(slot + ks.F_NS)
    is_known = time_ns >= 0 and since >= 0
    return -1 if is_known and abs(time_ns - since) > ks.FRAGMENT_LIFE_NS else load64(slot + ks.F_FLOW) - 1


@inlined
def _keep_network(state: int, work: int, tag: int) -> None:
    """Count changes of VLAN or VNI, which are not part of a conversation's key."""
    before = load64(work + ks.D_TAG)
    if tag != before:
        if before:
            count(state, ks.N_NETWORKS)
        elif get(state, ks.SEGMENTS_AT):
            store64(work + ks.D_FIRST_TAG, tag)
        store64(work + ks.D_TAG, tag)


@inlined
def _after_tcp_header(header: int, size: int) -> int:
    """Return how much of an IP payload follows its TCP header; -1 if that contradicts itself or the size."""
    header_bytes = (load8(header + 12) >> 4) * 4
    return size - header_bytes if 20 <= header_bytes <= size else -1


@inlined
def _tcp4(state: int, at: int, kept: int, length: int, payload: int, time_ns: int) -> None:
    """Count an Ethernet frame with TCP in IPv4 without options, of which at least 54 bytes were captured."""
    rest = rest_of(load32(at + 34), _TCP, 0, 0, 4)
    flow = flow_of4(state, at + 26, rest, time_ns)
    work = account(state, flow, length, payload, time_ns)
    _keep_network(state, work, ks.UNTAGGED)
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
        count(state, ks.N_CUT)
        return -1
    payload = _after_tcp_header(header, size)
    if payload < 0:
        count(state, ks.N_MALFORMED)
    elif kept < 20:
        count(state, ks.N_CUT)
    return payload


@kernel
def _roce_payload(state: int, header: int, kept: int, size: int) -> int:
    """Return the bytes after the base and extended headers, without pad and ICRC; negative if this is not RoCEv2."""
    if kept < _BTH_BYTES:
        if size >= _BTH_BYTES + _ICRC_BYTES:
            count(state, ks.N_CUT)
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
            return dtypes.ROCE, inside
    return 0, size - 8


@kernel
def _by_version(first: int) -> int:
    version = first >> 4
    return _IPV4 if version == 4 else _IPV6 if version == 6 else 0


@kernel
def _inside(at: int, offset: int, kept: int, ethertype: int) -> int:
    """Return the offset of the packet inside a tunnel, in the module's notation.

    Args:
        at: address of the packet.
        offset: where the one inside begins.
        kept: captured bytes of the packet.
        ethertype: kind of the one inside.
    """
    if ethertype == _BRIDGED:
        return offset if kept >= offset + 14 else 0
    is_ip = ethertype in (_IPV4, _IPV6) and kept > offset and _by_version(load8(at + offset)) == ethertype
    return -offset if is_ip else 0


@kernel
def _inside_udp(state: int, header: int, offset: int, kept: int) -> int:
    """Return the offset of the packet inside VXLAN (RFC 7348) or Geneve (RFC 8926); 0 if the UDP packet is neither.

    Args:
        state: address of the state, of which this sets the tag.
        header: address of the UDP header.
        offset: its offset in the packet.
        kept: captured bytes of the packet.
    """
    if kept < offset + 16:
        return 0
    port, inner = swapped16(header + 2), 0
    if port == _VXLAN_PORT and load8(header + 8) & 8:
        inner = _inside(header - offset, offset + 16, kept, _BRIDGED)
    elif port == _GENEVE_PORT and load8(header + 8) >> 6 == 0:
        options = (load8(header + 8) & 63) * 4
        inner = _inside(header - offset, offset + 16 + options, kept, swapped16(header + 10))
    if inner:
        put(state, ks.INNER_TAG, ks.UNTAGGED << 24 | swapped32(header + 12) >> 8)  # the network identifier
    return inner


@kernel
def _inside_ip(header: int, offset: int, kept: int, protocol: int) -> int:
    """Return the offset of the packet inside IP (RFC 2003, 4213) or GRE (RFC 2784, 2890); 0 if there is none.

    Args:
        header: address of the IP payload.
        offset: its offset in the packet.
        kept: captured bytes of the packet.
        protocol: protocol number of the IP header.
    """
    if protocol == _IPV4_INSIDE:
        return _inside(header - offset, offset, kept, _IPV4)
    if protocol == _IPV6_INSIDE:
        return _inside(header - offset, offset, kept, _IPV6)
    if protocol != _GRE or kept < offset + 4 or load8(header + 1) & 7:  # version 1 is PPTP
        return 0
    flags = load8(header)
    if flags & 0x40:  # with routing (RFC 1701)
        return 0
    optional = (flags >> 7 & 1) + (flags >> 5 & 1) + (flags >> 4 & 1)
    return _inside(header - offset, offset + 4 + optional * 4, kept, swapped16(header + 2))


@kernel
def _transport(
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
        layer: 0, or 1 inside a tunnel.
        family: 4 or 6.

    Returns:
        Offset of the packet inside a tunnel, in the module's notation.
    """
    key = _between(addresses, family)
    if not first:
        flow = _flow_of_first(state, key, identity, time_ns)
        if flow < 0:
            count(state, ks.N_FIRST_MISSING)
            flow = _flow(
                state,
                addresses,
                rest_of(0, protocol, dtypes.NO_PORTS if protocol in (_TCP, _UDP) else 0, layer, family),
                family,
                time_ns,
            )
        add(account(state, flow, length, size, time_ns) + ks.D_SEGMENTS, 1 if size else 0)
        return 0
    header, seen = at + offset, kept - offset
    kind, ports, payload, inner, whole = 0, 0, size, 0, 1
    if protocol in (_TCP, _UDP):
        if seen < 4 or size < 8:
            count(state, ks.N_CUT if size >= 8 else ks.N_MALFORMED)
            payload = whole = 0
            kind = dtypes.NO_PORTS if size < 8 else dtypes.PORTS_CUT
            if kind == dtypes.PORTS_CUT and seen >= 2:
                kind, ports = dtypes.TARGET_PORT_CUT, load16(header)
        elif protocol == _TCP:
            ports = load32(header)
            payload = _tcp_payload(state, header, seen, size)
            whole = 1 if payload >= 0 and seen >= 20 else 0
            payload = max(payload, 0)
        else:
            ports = load32(header)
            kind, payload = _udp_payload(state, header, seen, size)
            inner = _inside_udp(state, header, offset, kept) if layer == 0 else 0
    elif layer == 0 and identity < 0:
        inner = _inside_ip(header, offset, kept, protocol)
    flow = _flow(state, addresses, rest_of(ports, protocol, kind, layer, family), family, time_ns)
    if identity >= 0:
        _remember_first(state, key, identity, flow, time_ns)
    work = account(state, flow, length, payload, time_ns)
    _keep_network(state, work, get(state, ks.TAG))
    if protocol == _TCP and whole and identity < 0:
        tcp(state, flow, work, header, seen, payload, family, time_ns)
    elif payload:
        add(work + ks.D_SEGMENTS, 1)
    if kind == dtypes.ROCE:
        roce(state, header + 8, kept - offset - 8, length, payload, addresses, family, time_ns)
    return inner


@kernel
def _is_copy(state: int, ip: int, kept: int, header_bytes: int, identity: int, family: int, time_ns: int) -> bool:
    """True if an IP packet, hop count and checksum aside, was captured shortly before, as at another interface.

    Args:
        state: address of the state.
        ip: address of the IP header.
        kept: captured bytes from there on.
        header_bytes: length of the IP header.
        identity: identification and protocol; 0 if the packet has no identification.
        family: 4 or 6.
        time_ns: time of capture.
    """
    key = _mixed(_between(ip + (12 if family == 4 else 8), family), load32(ip) | identity << 32)
    place, end = header_bytes, min(kept, header_bytes + 40) - 8
    while place <= end:
        key = _mixed(key, load64(ip + place))
        place += 8
    first = get(state, ks.RECENT) + ((key & (ks.RECENT_SLOTS - ks.RECENT_WAYS)) << ks.RECENT_SHIFT)
    most_ns = ks.COPY_NS if identity else ks.UNIDENTIFIED_COPY_NS
    oldest = first
    for way in range(ks.RECENT_WAYS):
        slot = first + (way << ks.RECENT_SHIFT)
        if load64(slot + ks.P_KEY) == key:
            if abs(time_ns - load64(slot + ks.P_NS)) <= most_ns:
                count(state, ks.N_COPIES)
                return True
            oldest = slot
            break
        if load64(slot + ks.P_NS) < load64(oldest + ks.P_NS):
            oldest = slot
    store64(oldest + ks.P_KEY, key)
    store64(oldest + ks.P_NS, time_ns)
    return False


@kernel
def _ipv4(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> int:
    """Decode an IPv4 packet (RFC 791)."""
    if kept < offset + 20:
        count(state, ks.N_CUT)
        return 0
    ip = at + offset
    header, total = (load8(ip) & 15) * 4, swapped16(ip + 2)
    if total == 0:
        count(state, ks.N_ZERO_LENGTH)
        total = length - offset
    if load8(ip) >> 4 != 4 or header < 20 or total < header:
        count(state, ks.N_MALFORMED)
        return 0
    if total > length - offset:
        count(state, ks.N_MALFORMED)
        total = max(length - offset, header)
    protocol, fragment = load8(ip + 9), swapped16(ip + 6) & 0x3FFF
    identity = -1
    if fragment:
        count(state, ks.N_FRAGMENTS)
        identity = swapped16(ip + 4) | protocol << 32
    first = 0 if fragment & 0x1FFF else 1
    if get(state, ks.RECENT) and not layer:
        unique = swapped16(ip + 4)
        if _is_copy(state, ip, kept - offset, header, unique << 8 | protocol if unique else 0, 4, time_ns):
            return 0
    return _transport(
        state, at, offset + header, kept, length, time_ns, ip + 12, protocol, total - header, identity, first, layer, 4
    )


@kernel
def _ipv6(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, layer: int) -> int:
    """Decode an IPv6 packet (RFC 8200) with its extension headers."""
    if kept < offset + 40:
        count(state, ks.N_CUT)
        return 0
    ip, place = at + offset, offset + 40
    size, protocol = swapped16(ip + 4), load8(ip + 6)
    if load8(ip) >> 4 != 6:
        count(state, ks.N_MALFORMED)
        return 0
    if size == 0 and length > place:
        count(state, ks.N_ZERO_LENGTH)  # a jumbogram, or segmentation offload
        size = length - place
    if size > length - place:
        count(state, ks.N_MALFORMED)
        size = max(length - place, 0)
    end, identity, first = place + size, -1, 1
    while first and protocol in (_HOP_BY_HOP, 43, _FRAGMENT, _AUTHENTICATION, 60, 135, 139, 140):
        if kept < place + 8:
            count(state, ks.N_CUT)
            break
        header = at + place
        following, units = load8(header), load8(header + 1)
        if protocol == _FRAGMENT:
            fragment = swapped16(header + 2)
            if fragment & 0xFFF9:  # not an atomic fragment (RFC 6946)
                count(state, ks.N_FRAGMENTS)
                identity = swapped32(header + 4) | following << 32
                first = 0 if fragment & 0xFFF8 else 1
            place += 8
        else:
            place += (units + 2) * 4 if protocol == _AUTHENTICATION else (units + 1) * 8
        protocol = following
    if place > end:
        count(state, ks.N_MALFORMED)
    size = max(end - place, 0)
    if get(state, ks.RECENT) and not layer and _is_copy(state, ip, kept - offset, 40, 0, 6, time_ns):
        return 0
    return _transport(state, at, place, kept, length, time_ns, ip + 8, protocol, size, identity, first, layer, 6)


@kernel
def _not_ip(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, ethertype: int, layer: int) -> None:
    """Count a non-IP frame: ARP by its protocol addresses (RFC 826), all others in one row, for filters on them."""
    count(state, ks.N_NOT_IP)
    arp, kind = at + offset, dtypes.ARP if ethertype == _ARP else dtypes.RARP if ethertype == _RARP else dtypes.NOT_IP
    none, target = state + 8 * ks.ZEROS, at + offset + 24
    if kind != dtypes.NOT_IP and kept < offset + 28:
        kind, target = dtypes.ARP_CUT if kind == dtypes.ARP else dtypes.RARP_CUT, none
        if kept < length:
            count(state, ks.N_CUT)
    if kind != dtypes.NOT_IP and kept >= offset + 18 and load32(arp + 2) == _FOR_IPV4:
        addresses = load32(arp + 14) | load32(target) << 32
        flow = flow_of(state, addresses, rest_of(0, 0, kind, layer, 4), arp + 14, target, time_ns)
    else:
        flow = flow_of6(state, none, rest_of(0, 0, kind, layer, dtypes.NO_ADDRESSES), time_ns)
    account(state, flow, length, 0, time_ns)


@kernel
def _behind_labels(at: int, offset: int, kept: int, length: int) -> tuple[int, int]:
    """Return the ethertype of what follows MPLS labels, which do not name it, and its offset; ethertype 0: not known.

    It is IP if its length fits the frame; or an Ethernet frame, with or without a control word (RFC 4448), if its
    ethertype is known.
    """
    ethertype, rest = _by_version(load8(at + offset)), length - offset
    slack = rest if length <= _SHORTEST else _CHECK_BYTES
    if ethertype == _IPV4 and kept >= offset + 20 and 0 <= rest - swapped16(at + offset + 2) <= slack:
        return ethertype, offset
    if ethertype == _IPV6 and kept >= offset + 40 and 0 <= rest - 40 - swapped16(at + offset + 4) <= slack:
        return ethertype, offset
    for skipped in (4, 0):
        place = offset + skipped + 14
        if kept >= place:
            inside = swapped16(at + place - 2)
            if inside in (_IPV4, _IPV6, _ARP):
                return inside, place
    return 0, offset


@kernel
def _network(state: int, at: int, offset: int, kept: int, length: int, time_ns: int, ethertype: int, layer: int) -> int:
    """Decode the packet behind an ethertype and any number of tags."""
    while ethertype in (0x8100, 0x88A8, 0x9100, 0x9200):
        if kept < offset + 4:
            count(state, ks.N_CUT)
            return 0
        put(state, ks.TAG, (get(state, ks.TAG) << 12 | swapped16(at + offset) & 0xFFF) & _TAG_MASK)
        ethertype, offset = swapped16(at + offset + 2), offset + 4
    if ethertype in (_MPLS, _MPLS_MULTICAST):
        bottom = 0
        while not bottom and kept > offset + 4:
            bottom, offset = load8(at + offset + 2) & 1, offset + 4
        if not bottom:
            count(state, ks.N_CUT)
            return 0
        ethertype, offset = _behind_labels(at, offset, kept, length)
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
    if link == LINK_ETHERNET:
        header, place = 14, 12
    elif link == LINK_COOKED:
        header, place = 16, 14
    elif link == LINK_COOKED2:
        header, place = 20, 0
    elif link == LINK_IPOIB:
        header, place = 44, 40  # after a global route header
    elif link in (LINK_NULL, LINK_LOOP):
        header, place = 4, -1
    elif link in (LINK_RAW_BSD, LINK_RAW_OTHER, LINK_RAW, LINK_IPV4, LINK_IPV6):
        header, place = 0, -1
    else:
        count(state, ks.N_LINK)
        return 0
    if kept <= header:
        count(state, ks.N_CUT)
        return 0
    if place >= 0:
        ethertype = swapped16(at + place)
    elif header == 0 or _is_loopback_ip(at):
        ethertype = _by_version(load8(at + header))
    return _network(state, at, header, kept, length, time_ns, ethertype, 0)


@kernel
def _any(state: int, at: int, kept: int, length: int, time_ns: int, link: int) -> None:
    put(state, ks.TAG, ks.UNTAGGED)
    put(state, ks.INNER_TAG, ks.UNTAGGED)
    inner = _link(state, at, kept, length, time_ns, link)
    if inner:
        put(state, ks.TAG, get(state, ks.INNER_TAG))
        place = inner + 14 if inner > 0 else -inner
        ethertype = swapped16(at + inner + 12) if inner > 0 else _by_version(load8(at + place))
        _network(state, at, place, kept, length, time_ns, ethertype, 1)


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
    # fast path of nearly every packet, with the results of the other one: Ethernet, IPv4 without options, no fragment,
    # TCP with its whole header
    if (
        link == LINK_ETHERNET
        and kept >= 54
        and load32(at + 12) & 0xFFFFFF == 0x450008
        and load16(at + 20) & 0xFF3F == 0
        and load8(at + 23) == 6
        and get(state, ks.RECENT) == 0
    ):
        total = swapped16(at + 16)
        payload = _after_tcp_header(at + 34, total - 20)
        if total <= length - 14 and payload >= 0:
            _tcp4(state, at, kept, length, payload, time_ns)
            return
    _any(state, at, kept, length, time_ns, link)
