"""Packet captures of a node: payload by flow, in each iteration."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job.logs import NodeLogs
from ringtap.analysis.job.spread import Borders, Integers, Numbers
from ringtap.capture import Capture
from ringtap.errors import RingtapError

_BATCH = 200_000
_SUMS = ("payload_bytes", "frame_bytes", "packets")


@dataclass
class Packets:
    """TCP packets of a node's captures.

    Attributes:
        flows: one row an interface and direction of a connection: ``interface``, ``from``, ``from_port``, ``to``,
            ``to_port``, and sums over the capture: ``payload_bytes``, ``frame_bytes``, ``packets``.
        amounts: ``payload_bytes``, ``frame_bytes`` and ``packets`` in each bin, shape (rows of flows, bins).
        first_ns: time of the first packet by the node's clock; 0 without packets.
        last_ns: of the last.
        dropped: packets that the kernel or the interface dropped; None: the capture does not say.
        others: packets without TCP.
    """

    flows: pd.DataFrame
    amounts: dict[str, Numbers]
    first_ns: int = 0
    last_ns: int = 0
    dropped: int | None = None
    others: int = 0


@dataclass
class _Sums:
    """What one pass over captures adds up."""

    bins: int
    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    total: list[Numbers] = field(default_factory=list)
    binned: list[Numbers] = field(default_factory=list)

    def add(self, keys: list[tuple[Any, ...]], place: Integers, amounts: Numbers) -> None:
        numbers = self.numbers
        row = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
        while len(self.total) < len(numbers):
            self.total.append(np.zeros(len(_SUMS)))
            self.binned.append(np.zeros((len(_SUMS), self.bins)))
        inside = (place >= 0) & (place < self.bins)
        for number in np.unique(row):
            mine = row == number
            self.total[number] += amounts[:, mine].sum(axis=1)
            here = mine & inside
            for what in range(len(_SUMS)):
                self.binned[number][what] += np.bincount(place[here], amounts[what, here], self.bins)


def read_packets(logs: NodeLogs, borders: Borders) -> Packets | None:
    """Read a node's captures; None where it has none."""
    names = logs.names("packets/*.pcap*")
    if not names:
        return None
    sums, first_ns, last_ns, others = _Sums(borders.bins), 0, 0, 0
    for name in names:
        interface = name.removeprefix("packets/").partition(".pcap")[0].rpartition("-")[0]
        try:
            capture = Capture(logs.path / name)
            segments = capture.segments()
            while batch := list(itertools.islice(segments, _BATCH)):
                times, sources, sports, destinations, dports, payload, frame = zip(*batch, strict=True)
                t_ns = np.array(times, np.int64)
                place = np.searchsorted(borders.edges_ns, t_ns, side="right") - 1
                keys = [(interface, *ends) for ends in zip(sources, sports, destinations, dports, strict=True)]
                sums.add(keys, place, np.array([payload, frame, np.ones(len(batch))], np.float64))
                first_ns = min(first_ns or int(t_ns.min()), int(t_ns.min()))
                last_ns = max(last_ns, int(t_ns.max()))
        except (RingtapError, OSError) as error:
            logs.problems.append(f"{logs.name}/{name} is read up to where it breaks: {error}")
            continue
        others += capture.others
        if capture.torn_bytes:
            logs.torn.append(f"{logs.name}/{name}")
    flows = pd.DataFrame(list(sums.numbers), columns=["interface", "from", "from_port", "to", "to_port"])
    totals = np.array(sums.total).reshape(-1, len(_SUMS))
    binned = np.array(sums.binned).reshape(-1, len(_SUMS), borders.bins)
    for column, what in enumerate(_SUMS):
        flows[what] = totals[:, column]
    amounts = {what: binned[:, column] for column, what in enumerate(_SUMS)}
    return Packets(flows, amounts, first_ns, last_ns, _dropped(logs), others)


def _dropped(logs: NodeLogs) -> int | None:
    item = logs.json("packets/packets.json")
    known = [item[name] for name in ("dropped_by_kernel", "dropped_by_interface") if isinstance(item.get(name), int)]
    return sum(known) if known else None


def own_addresses(packets: Packets, known: set[str]) -> set[str]:
    """Addresses of the node that captured: those of its sockets, else the one that is in most packets."""
    if known:
        return known
    seen: Counter[str] = Counter()
    for side in ("from", "to"):
        for address, count in zip(packets.flows[side], packets.flows["packets"], strict=True):
            seen[str(address)] += int(count)
    return {seen.most_common(1)[0][0]} if seen else set()
