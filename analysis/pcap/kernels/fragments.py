"""Kernels for IP fragments: later ones belong to the flow of their first, which alone holds the ports.

A small table holds the latest first fragments by addresses, identification and protocol; a new one replaces an old one
in the same slot. Its hash uses no random secrets, so that every scan of a capture drops the same fragments.
"""

from __future__ import annotations

from ringtap.analysis.pcap.kernels.flow import get
from ringtap.analysis.pcap.kernels.memory import inlined, kernel, load64, store64, times
from ringtap.analysis.pcap.kernels.state import (
    F_ADDRESSES,
    F_FLOW,
    F_ID,
    F_NS,
    FRAGMENT_LIFE_NS,
    FRAGMENT_SHIFT,
    FRAGMENT_SLOTS,
    FRAGMENTS,
)

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
