"""Decides whether a periodic exchange can be of gradients: the evidence that this needs, and what is missing.

A rhythm alone is no evidence: routers, industrial controllers and heartbeats also repeat the same bytes with a silence
between. Gradients are large, in full segments, between hosts, and a worker gets as many bytes back as it sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import TypeVar

from ringtap.analysis.structure.payload_time_series import PayloadStream
from ringtap.core.units import format_size

MIN_ITERATION_BYTES = 14_600
"""Payload that a worker sends per iteration, at least: the ten segments of 1,460 bytes that a new connection may send
at once (RFC 6928), in which requests, answers and heartbeats fit."""

MIN_PACKET_BYTES = 536
"""Mean payload of the packets with payload, at least: the smallest segment size that every host takes (RFC 9293)."""

BALANCED = 0.5
"""Largest difference between the bytes that a worker sends and gets per iteration, as a share of the smaller one: in
collectives they are equal, except that ZeRO's broadcasts of unequal shards were seen to differ by a third."""

Volumes = Iterable[tuple[PayloadStream, float]]
Key = TypeVar("Key", str, tuple[str, str])


def why_not_gradients(volumes: Volumes) -> str:
    """Return the evidence that some periodic streams lack to be gradients, as a clause; empty if they have it.

    Args:
        volumes: the streams that move most of the bytes, each with its payload bytes per iteration.
    """
    every = list(volumes)
    group = next((stream for stream, _ in every if is_for_many(stream.destination)), None)
    if group is not None:
        return f"it goes to {group.destination}, the address of many hosts, and gradients go from one host to one other"
    most = max(sums((stream.source, volume) for stream, volume in every).values())
    if most < MIN_ITERATION_BYTES:
        return (
            f"a host sends {format_size(most)} each time, as polls and heartbeats do, and less than "
            f"{format_size(MIN_ITERATION_BYTES)} cannot be told from them"
        )
    mean = sum(stream.total for stream, _ in every) / sum(stream.data_packets for stream, _ in every)
    if mean < MIN_PACKET_BYTES:
        return f"its packets have {format_size(mean)} of payload on average, and gradients fill their segments"
    return ""


def why_doubtful(volumes: Volumes) -> str:
    """Return a sentence if no host is seen to get as many bytes as it sends; else an empty text.

    Args:
        volumes: as for `why_not_gradients`.
    """
    every = list(volumes)
    sent = sums((_end(stream, 0), volume) for stream, volume in every)
    received = sums((_end(stream, 1), volume) for stream, volume in every)
    if any(_are_alike([sent[end], received[end]]) for end in sent.keys() & received.keys()):
        return ""
    if all(stream.source == stream.destination for stream, _ in every) and _are_alike(list(sent.values())):
        return ""
    if any(stream.answered for stream, _ in every):
        return f"no host gets as many bytes as it sends (within {BALANCED:.0%}), as a worker does"
    return "only one direction was captured, so it is not seen whether as many bytes come back"


def is_for_many(host: str) -> bool:
    """Return True for a multicast address and the broadcast address of all networks."""
    try:
        address = ip_address(host)
    except ValueError:  # the name of a host
        return False
    return address.is_multicast or host == "255.255.255.255"


def _end(stream: PayloadStream, side: int) -> str:
    """Return the sender (0) or the receiver (1) of a stream; ranks on one host are told apart by their ports."""
    if stream.source == stream.destination:
        return stream.ports.split(" > ")[-1 if side else 0]
    return stream.destination if side else stream.source


def _are_alike(volumes: list[float]) -> bool:
    return len(volumes) > 1 and max(volumes) <= (1 + BALANCED) * min(volumes)


def sums(amounts: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Add up amounts by key."""
    found: dict[Key, float] = {}
    for name, amount in amounts:
        found[name] = found.get(name, 0.0) + amount
    return found
