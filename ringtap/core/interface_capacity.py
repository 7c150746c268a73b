"""Says how much an interface can send, by the facts of node.json about its node, and which interfaces a node has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ringtap.core.ethernet import ETHERNET_MTU, payload_share


def capacity_bps(before: Mapping[str, Any], nic: str) -> float | None:
    """Return the rate at which an interface sends frames: the limit of its queue or, of a device, its speed.

    A virtual interface without a limit states a speed that nothing keeps, so its rate is not known (None). One over
    another interface (VLAN, macvlan) is as fast as that one, at most.

    Args:
        before: facts of node.json about the node before the run.
        nic: name of the interface.
    """
    known: list[float] = []
    for name in _downwards(before, nic):
        limit_bps = ((before.get("links") or {}).get(name) or {}).get("rate_bps")
        facts = (before.get("nics") or {}).get(name) or {}
        speed_bps = 1e6 * (facts.get("speed") or 0) if facts.get("driver") else 0
        known += [float(rate_bps) for rate_bps in (limit_bps, speed_bps) if rate_bps and rate_bps > 0]
    return min(known, default=None)


def carrier_of(before: Mapping[str, Any], nic: str) -> str:
    """Return the interface that carries the frames of one: the lowest below it (of a VLAN or macvlan), or itself.

    What is over several interfaces, such as a bond, is itself.
    """
    return _downwards(before, nic)[-1]


def _downwards(before: Mapping[str, Any], nic: str) -> list[str]:
    """Return an interface, the one below it, the one below that, and so on, while there is just one."""
    links, found = before.get("links") or {}, [nic]
    while len(below := list((links.get(found[-1]) or {}).get("below") or ())) == 1 and below[0] not in found:
        found.append(str(below[0]))
    return found


def interface_with(before: Mapping[str, Any], address: str) -> str | None:
    """Return the interface that has an address; None: not known."""
    for nic, facts in (before.get("nics") or {}).items():
        if address in (facts.get("addresses") or ()):
            return str(nic)
    return None


def payload_capacity_bps(before: Mapping[str, Any], address: str) -> float | None:
    """Return the rate at which the interface with an address sends payload in full TCP segments; None: not known."""
    nic = interface_with(before, address)
    return None if nic is None else _payload_bps(before, nic)


def _payload_bps(before: Mapping[str, Any], nic: str) -> float | None:
    rate_bps, share = capacity_bps(before, nic), payload_share(before["nics"][nic].get("mtu") or ETHERNET_MTU)
    return None if rate_bps is None or share <= 0 else rate_bps * share


def sending_capacity_bps(facts: Sequence[Mapping[str, Any]], addresses: Iterable[str]) -> float | None:
    """Return the payload that the interfaces with these addresses send together, at most; None: not known.

    Args:
        facts: what node.json says about the node, before the run and after it.
        addresses: the addresses.
    """
    total_bps = 0.0
    for address in addresses:
        known = [payload_capacity_bps(fact, address) for fact in facts if fact]
        if not known or None in known:
            return None
        total_bps += max(rate_bps for rate_bps in known if rate_bps is not None)
    return total_bps


def unused_networks(facts: Sequence[Mapping[str, Any]], used: Collection[str]) -> dict[str, tuple[float, str]]:
    """Return the networks that a node reaches by interfaces that are up, but not by those that it uses.

    Args:
        facts: what node.json says about the node, before the run and after it.
        used: the interfaces that carry the frames that it sends and receives.

    Returns:
        By network, such as ``10.0.0.0/24``, the payload that the fastest interface there sends at most, in bit/s, and
        its name.
    """
    known = []
    for fact in facts:
        found: dict[str, tuple[float, str]] = {}
        for nic, own in (fact.get("nics") or {}).items():
            rate_bps = _payload_bps(fact, nic) if own.get("isup") and carrier_of(fact, nic) not in used else None
            if rate_bps is not None:
                for network in own.get("networks") or ():
                    found[network] = max(found.get(network, (0.0, "")), (rate_bps, nic))
        known += [found] if fact else []
    common = set.intersection(*map(set, known)) if known else set()
    return {network: min(found[network] for found in known) for network in sorted(common)}
