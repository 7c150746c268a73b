"""Holds what plans of all kinds share: the load and its bytes, checks of addresses, the header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import ringtap
from ringtap.core.errors import UsageError
from ringtap.core.ethernet import ETHERNET_BYTES, ETHERNET_MTU, IPV4, IPV6, segment_bytes
from ringtap.core.flow_plan_format import BASIC_VERSION, FORMAT, MAX_INT64
from ringtap.core.host_port import parse_address

NS = 1_000_000_000
MAX_FLOWS = 10**9
_WIRE_BYTES = ETHERNET_BYTES + 8 + 4 + 12  # on the wire also a preamble, a checksum and a gap
_MIN_MTU, _MAX_MTU = 576, 65_535


@dataclass(frozen=True)
class OfferedLoad:
    """The requested load.

    Attributes:
        bps: rate in bits per second.
        counts: what the rate counts: ``payload``, or ``wire`` (full-size packets with headers, preamble, checksum and
            gap).
        mtu: largest IP packet in bytes, for ``wire``.
        ipv6: packets have IPv6 headers.
    """

    bps: float
    counts: Literal["payload", "wire"] = "payload"
    mtu: int = ETHERNET_MTU
    ipv6: bool = False

    def check(self) -> None:
        """Check that the load is usable.

        Raises:
            UsageError: the load is not usable.
        """
        if not isinstance(self.bps, (int, float)):
            raise UsageError(f"load {self.bps!r} is not a number of bit/s: write it as one")
        if not 0 < self.bps < 1e15:
            raise UsageError(f"load {self.bps} bit/s is not usable: it must be above 0 and below 1 Pbit/s")
        if not _MIN_MTU <= self.mtu <= _MAX_MTU:
            raise UsageError(f"--mtu {self.mtu} is not usable: it must be from {_MIN_MTU} to {_MAX_MTU}")

    def payload_of_wire(self) -> Fraction:
        """Return the payload bits per bit on the wire, for packets of full size."""
        payload = segment_bytes(self.mtu, IPV6 if self.ipv6 else IPV4)
        return Fraction(payload, self.mtu + _WIRE_BYTES)

    def payload_bps(self) -> Fraction:
        """Return the exact payload rate in bits per second."""
        return Fraction(self.bps) * (self.payload_of_wire() if self.counts == "wire" else 1)

    def bytes_until(self, until_ns: int) -> int:
        """Return the payload bytes from the launch to ``until_ns``, computed exactly and rounded once."""
        # Rounds half to even like round() of the Fraction, but ten times as fast
        rate = self._bytes_per_ns
        whole, rest = divmod(rate.numerator * until_ns, rate.denominator)
        above = 2 * rest - rate.denominator
        return whole + (above > 0 or (above == 0 and whole % 2 == 1))

    @cached_property
    def _bytes_per_ns(self) -> Fraction:
        return self.payload_bps() / (8 * NS)

    def header(self) -> dict[str, Any]:
        """Return the keys that describe the load in a plan's header."""
        header: dict[str, Any] = {"load_bps": self.bps, "load_counts": self.counts}
        if self.counts == "wire":
            header |= {"mtu": self.mtu, "wire_bits_per_payload_bit": float(1 / self.payload_of_wire())}
        return header


@dataclass(frozen=True)
class PlanOutline:
    """The contents of a plan of any kind, apart from its flows.

    Attributes:
        duration_ns: length of the plan.
        destinations: ``host:port`` of the receivers.
        sources: addresses to which the flows' sockets bind; empty: unbound.
        seed: seed of everything random, 0 or more.
        transport: socket options that senders set; keys as in the plan's header.
    """

    duration_ns: int
    destinations: Sequence[str]
    sources: Sequence[str] = ()
    seed: int = 1
    transport: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check that a plan can be made from these values.

        Raises:
            UsageError: a value is not usable.
        """
        if not isinstance(self.duration_ns, int):
            raise UsageError(f"duration {self.duration_ns!r} is not a whole number of nanoseconds: write it as one")
        if not 0 < self.duration_ns <= MAX_INT64 // 4:
            raise UsageError(f"duration {self.duration_ns} ns is not usable: it must be above 0 and below 70 years")
        if self.seed < 0:
            raise UsageError(f"seed {self.seed} is negative: use 0 or more")
        if not self.destinations:
            raise UsageError("a plan needs a destination: give --to HOST:PORT")
        check_names(self.destinations, self.sources)

    def header(self, kind: str, flows: int, total_bytes: int, **more: Any) -> dict[str, Any]:
        """Return the plan's first line.

        Raises:
            UsageError: there are more flows or bytes than a plan can hold.
        """
        if flows > MAX_FLOWS:
            raise UsageError(f"a plan of {flows} flows is too long: at most {MAX_FLOWS}")
        if total_bytes > MAX_INT64:
            raise UsageError(f"a plan of {total_bytes} bytes is too large: at most {MAX_INT64}")
        header: dict[str, Any] = {"format": FORMAT, "version": BASIC_VERSION, "kind": kind}
        header |= {"duration_ns": self.duration_ns, "flows": flows, "bytes": total_bytes}
        header |= {"sources": list(self.sources), "destinations": list(self.destinations), "seed": self.seed}
        header |= {"starts": "ns after the sender's launch", "transport": dict(self.transport)}
        header["ringtap"] = ringtap.__version__
        return header | more

    def ipv6(self) -> bool:
        """Return True if all destinations are IPv6 addresses."""
        return all(":" in parse_address(destination)[0] for destination in self.destinations)


def check_lists(**names: Sequence[str]) -> None:
    """Refuse a text where a list of them belongs.

    Raises:
        UsageError: a value is a text.
    """
    for what, value in names.items():
        if isinstance(value, str):
            raise UsageError(f"{what} {value!r} is one text: give a list, [{value!r}]")


def check_names(destinations: Sequence[str], sources: Sequence[str]) -> None:
    """Check that plans can name these destinations and sources.

    Raises:
        UsageError: a name is not an address or is given twice.
    """
    check_lists(destinations=destinations, sources=sources)
    for destination in destinations:
        if parse_address(destination)[1] == 0:
            raise UsageError(f"destination {destination!r} has port 0: name the port that the receiver listens on")
        if not destination.isprintable():
            raise UsageError(f"destination {destination!r} is not an address: write HOST:PORT")
    if len(set(destinations)) != len(destinations):
        raise UsageError("a destination is named twice: name each --to and --node once")
    for source in sources:
        if source in ("", "-") or not source.isprintable() or len(source.split()) != 1:
            raise UsageError(f"source {source!r} is not an address: give --from ADDRESS, for example 10.0.0.1")
    if len(set(sources)) != len(sources):
        raise UsageError("a source is named twice: name each --from once")
