"""Structure of training traffic, inferred from packets alone: one object with all results."""

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
    """Structure of a training job, inferred from its packets.

    Times ending in ``_ns`` are CLOCK_REALTIME of the common clock.

    Attributes:
        streams: all payload, as streams between hosts.
        sorted: class of each stream: training, cross traffic or other.
        training: the job.
        iterations: one row per iteration (`bursts.iterations_of`).
        alike: autocorrelation of the training payload.
        period: iteration time.
        shape: topology of the exchange between hosts.
        volume: bytes of a worker per iteration, and parameters.
        roles: the three flows of figures 3-10 and 3-11.
        roles_missing: a sentence about those of them that are missing; empty if none is.
        steps: errors against step logs; None without step logs.
        warnings: missing parts of the captures, one sentence each.
        notes: remarks on the captures, one sentence each.
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
        """Starts of communication, one more than there are iterations."""
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
        """Peak-to-mean ratio of each sender at several time scales (`bursts.peak_to_mean`)."""
        return bursts.peak_to_mean(self.senders, self.training.starts, self.streams.bin_ns)

    @cached_property
    def matrix(self) -> pd.DataFrame:
        """Gradient bytes per iteration (median), one row per sender and one column per receiver."""
        edges = edges_of(self.training)
        hosts = list(dict.fromkeys([*self.shape.hosts, *(host for pair in edges for host in pair)]))
        table = pd.DataFrame(0.0, index=hosts, columns=hosts)
        for (source, destination), volume in edges.items():
            table.loc[source, destination] = volume
        return table

    @cached_property
    def flow_rates(self) -> pd.DataFrame:
        """Mean rates of the three flows over iterations (`ringtap.analysis.structure.roles.mean_rates`)."""
        return mean_rates(self.streams, self.roles, self.iterations)

    def table(self) -> pd.DataFrame:
        """Return all streams: ``class``, ``why``, hosts, ports, ``flows``, bytes and ``bytes_per_iteration``."""
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
        """Return everything as plain values, in the units of their names."""
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
    """Find the training job in some streams, and measure its structure.

    Args:
        streams: as from `streams.streams_of`.

    Raises:
        MeasurementError: there is no training in them; the message describes the traffic instead.
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
    """Return the gradient bytes per iteration by (sender, receiver), as sums of the streams' medians."""
    edges: dict[tuple[str, str], float] = {}
    for member in training.major:
        pair = (member.stream.source, member.stream.destination)
        edges[pair] = edges.get(pair, 0.0) + member.volume
    return dict(sorted(edges.items()))


def only_host(training: Training) -> str | None:
    """Return the host at which every packet was captured; None if the captures together show all exchanges.

    A capture of exchanges without a common host was taken on the link, and shows all exchanges that pass there.
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
    # two common hosts: if each of them captured, neither exchanges with others
    if not common or (len(common) > 1 and different):
        return None
    return sorted(common)[0]


def worker_bytes(shape: Topology, edges: Mapping[tuple[str, str], float]) -> float:
    """Return the bytes that a worker sends per iteration, as a mean over the workers whose packets were captured."""
    sent: dict[str, float] = {}
    for (source, _), volume in edges.items():
        sent[source] = sent.get(source, 0.0) + volume
    workers: Sequence[str] = [host for host in sent if not (shape.name == STAR and host == shape.hub)]
    if not shape.whole and shape.hosts and len(shape.hosts) > 1:
        # only the packets of one host are complete
        centre = max(sent, key=lambda host: sum(1 for pair in edges if host in pair))
        return sent[centre]
    return sum(sent[host] for host in workers) / len(workers)
