"""The structure of training traffic from packets alone: one object with everything that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.structure import bursts
from ringtap.analysis.structure.autocorrelation import Likeness, likeness
from ringtap.analysis.structure.detection import CROSS, OTHER, TRAINING, Sorted, Training, sort_out
from ringtap.analysis.structure.iteration_time import Period, period_of
from ringtap.analysis.structure.periodicity import Integers
from ringtap.analysis.structure.roles import Role, mean_rates, roles_of
from ringtap.analysis.structure.streams import Streams
from ringtap.analysis.structure.topology import STAR, Topology, shape_of
from ringtap.analysis.structure.validation import StepCheck
from ringtap.analysis.structure.volume import Volume, volume_of
from ringtap.errors import MeasurementError


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of a training job, from its packets.

    Times ending in ``_ns`` are CLOCK_REALTIME of the common clock.

    Attributes:
        streams: all payload, as streams between hosts.
        sorted: which of them are training, cross traffic or other.
        training: the job.
        iterations: one row an iteration (`bursts.iterations_of`).
        alike: autocorrelation of the training payload.
        period: iteration time.
        shape: who exchanges with whom.
        volume: bytes of a worker in an iteration, and parameters.
        roles: the three flows of figures 3-10 and 3-11.
        roles_missing: a sentence on those of them that are not there.
        steps: errors against step logs; None without.
        warnings: what of the captures is missing, a sentence each.
        notes: what was unusual in them, likewise.
    """

    streams: Streams
    sorted: Sorted
    training: Training
    iterations: pd.DataFrame
    alike: Likeness
    period: Period
    shape: Topology
    volume: Volume
    roles: tuple[Role, ...]
    roles_missing: str
    steps: StepCheck | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def boundaries_ns(self) -> Integers:
        """Begins of communication, one more than there are iterations."""
        return self.streams.start_ns + self.training.starts * self.streams.bin_ns

    @cached_property
    def senders(self) -> dict[str, Integers]:
        """Gradient bytes that each host sent in each bin, shape (bins,)."""
        hosts = dict.fromkeys(member.stream.source for member in self.training.major)
        return {
            host: self.streams.dense([one.stream for one in self.training.major if one.stream.source == host])
            for host in sorted(hosts)
        }

    @cached_property
    def bursts(self) -> pd.DataFrame:
        """Bursts of each sender: ``host`` and the columns of `bursts.bursts_of`."""
        parts = [
            bursts.bursts_of(sent, self.training.starts, self.streams.bin_ns).assign(host=host)
            for host, sent in self.senders.items()
        ]
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def peaks(self) -> pd.DataFrame:
        """Peak to mean of each sender at several time scales (`bursts.peak_to_mean`)."""
        return bursts.peak_to_mean(self.senders, self.training.starts, self.streams.bin_ns)

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """Gradient bytes an iteration, median: a row a sender, a column a receiver."""
        edges = edges_of(self.training)
        hosts = list(dict.fromkeys([*self.shape.hosts, *(host for pair in edges for host in pair)]))
        table = pd.DataFrame(0.0, index=hosts, columns=hosts)
        for (source, destination), volume in edges.items():
            table.loc[source, destination] = volume
        return table

    @cached_property
    def flow_rates(self) -> pd.DataFrame:
        """Mean rates of the three flows around iterations (`ringtap.analysis.structure.roles.mean_rates`)."""
        return mean_rates(self.streams, self.roles, self.iterations)

    def table(self) -> pd.DataFrame:
        """All streams: ``class``, ``why``, hosts, ports, ``flows``, ``payload_bytes`` and what repeats in training."""
        members = {member.stream: member for member in self.training.members}
        rows = []
        for stream, (kind, why) in zip(self.streams.streams, self.sorted.kinds, strict=True):
            member = members.get(stream)
            row: dict[str, Any] = {"class": kind, "why": why, "protocol": stream.protocol, "source": stream.source}
            row |= {"destination": stream.destination, "ports": stream.ports, "flows": stream.flows}
            row |= {"payload_bytes": stream.total, "retransmitted_bytes": stream.retransmitted_bytes}
            row["bytes_per_iteration"] = None if member is None else member.volume
            row["seen_by"] = ",".join(sorted(stream.seen_by))
            rows.append(row)
        return pd.DataFrame(rows).astype({"bytes_per_iteration": "Float64"})

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; times of iterations in nanoseconds, all else in the units of its name."""
        streams, mine = self.streams, self.iterations
        training_retransmitted = sum(member.stream.retransmitted_bytes for member in self.training.members)
        item: dict[str, Any] = {"places": list(streams.places), "start_ns": streams.start_ns}
        item |= {"bin_s": streams.bin_ns / 1e9, "seconds": streams.bins * streams.bin_ns / 1e9}
        item["period"] = self.period.to_json()
        item["boundaries_ns"] = self.boundaries_ns.tolist()
        item["iterations"] = {
            "communication_s": float(mine["communication_s"].median()),
            "silence_s": float(mine["silence_s"].median()),
            "bytes": float(mine["bytes"].median()),
        }
        item["shape"] = vars(self.shape) | {"hosts": list(self.shape.hosts)}
        item["volume"] = self.volume.to_json() | {"retransmitted_bytes": training_retransmitted}
        item["bytes_per_iteration"] = [
            {"source": a, "destination": b, "bytes": volume} for (a, b), volume in edges_of(self.training).items()
        ]
        item["bursts"] = self._bursts_json()
        item["peak_to_mean"] = self.peaks.to_dict("records")
        item["flows"] = self.flow_rates.to_dict("records")
        item["flows_missing"] = self.roles_missing
        item["classes"] = {
            kind: sum(
                one.total for one, (its, _) in zip(streams.streams, self.sorted.kinds, strict=True) if its == kind
            )
            for kind in (TRAINING, CROSS, OTHER)
        }
        table = self.table()
        columns = [str(name) for name in table.columns]
        item["streams"] = [
            {name: None if value is pd.NA else value for name, value in zip(columns, row, strict=True)}
            for row in table.itertuples(index=False, name=None)
        ]
        item |= {"warnings": list(self.warnings), "notes": list(self.notes)}
        item["other_exchanges"] = list(self.sorted.rivals)
        item["steps"] = None if self.steps is None else self.steps.to_json()
        return item

    def _bursts_json(self) -> list[dict[str, Any]]:
        rows = []
        for host, part in self.bursts.groupby("host"):
            length = part["length_s"]
            rows.append(
                {
                    "host": str(host),
                    "per_iteration": len(part) / len(self.iterations),
                    "median_s": float(length.median()),
                    "p99_s": float(length.quantile(0.99)),
                    "longest_s": float(length.max()),
                    "median_bytes": float(part["bytes"].median()),
                }
            )
        return rows


def find_structure(streams: Streams) -> Structure:
    """Find the training job in some streams, and everything about it.

    Args:
        streams: as `streams.streams_of` makes them.

    Raises:
        MeasurementError: there is no training in them; says what there was instead.
    """
    found = sort_out(streams)
    training = found.training
    if training is None:
        raise MeasurementError(f"no training was found in {', '.join(streams.places)}: {found.why}")
    payload = streams.dense([member.stream for member in training.major])
    iterations = bursts.iterations_of(payload, training.starts, training.found, streams.start_ns, streams.bin_ns)
    alike = likeness(payload[training.starts[0] : training.starts[-1]], float(np.median(np.diff(training.starts))))
    edges = edges_of(training)
    shape = shape_of(edges, only_host(training))
    roles, missing = roles_of(streams, found)
    return Structure(
        streams,
        found,
        training,
        iterations,
        alike,
        period_of(training, iterations, alike, streams.bin_ns),
        shape,
        volume_of(shape, worker_bytes(shape, edges)),
        roles,
        missing,
    )


def edges_of(training: Training) -> dict[tuple[str, str], float]:
    """Gradient bytes an iteration by (sender, receiver): medians of the streams, added up."""
    edges: dict[tuple[str, str], float] = {}
    for member in training.major:
        pair = (member.stream.source, member.stream.destination)
        edges[pair] = edges.get(pair, 0.0) + member.volume
    return dict(sorted(edges.items()))


def only_host(training: Training) -> str | None:
    """The host at which every packet was captured; None where the captures together show all exchanges.

    A capture that shows exchanges without a host in common is of the wire, and shows all that pass there.
    """
    places: dict[str, set[frozenset[str]]] = {}
    for member in training.major:
        for place in member.stream.seen_by:
            places.setdefault(place, set()).add(frozenset((member.stream.source, member.stream.destination)))
    owners: list[set[str]] = []
    for links in places.values():
        common = set.intersection(*(set(link) for link in links))
        if not common:
            return None
        owners.append(common)
    common = set.intersection(*owners)
    different = any(member.stream.copies > 1 for member in training.major)
    # two hosts are common to all of it: neither exchanges with others, if each of them captured
    if not common or (len(common) > 1 and different):
        return None
    return sorted(common)[0]


def worker_bytes(shape: Topology, edges: Mapping[tuple[str, str], float]) -> float:
    """Bytes that a worker sends in an iteration, mean over the workers whose packets are there."""
    sent: dict[str, float] = {}
    for (source, _), volume in edges.items():
        sent[source] = sent.get(source, 0.0) + volume
    workers: Sequence[str] = [host for host in sent if not (shape.name == STAR and host == shape.hub)]
    if not shape.whole and shape.hosts and len(shape.hosts) > 1:
        # only one host's own packets are all there
        centre = max(sent, key=lambda host: sum(1 for pair in edges if host in pair))
        return sent[centre]
    return sum(sent[host] for host in workers) / len(workers)
