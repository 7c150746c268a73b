"""Finds the structure of training traffic in packets alone, as one object with all results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.notebook_formatting import html_of_text
from ringtap.analysis.runs.traffic_classes import CROSS, OTHER, TRAINING
from ringtap.analysis.structure import closed_form_patterns
from ringtap.analysis.structure import topology as shapes
from ringtap.analysis.structure.detect_training_streams import Sorted, Training, sort_out
from ringtap.analysis.structure.flow_roles_and_rates import Role, mean_rates, roles_of
from ringtap.analysis.structure.gradient_evidence import sums, why_doubtful
from ringtap.analysis.structure.iterations_against_step_logs import StepCheck
from ringtap.analysis.structure.payload_time_series import Streams, between_hosts
from ringtap.analysis.structure.period_from_silences import Integers, Likeness, is_loud, likeness
from ringtap.analysis.structure.topology import ExchangeTopology, shape_of
from ringtap.core.errors import MeasurementError
from ringtap.core.thesis_neural_networks import GRADIENT_BYTES
from ringtap.core.units import counted


@dataclass(frozen=True, eq=False, repr=False)
class Structure:
    """Structure of a training job, inferred from its packets.

    Times ending in ``_ns`` are CLOCK_REALTIME of the common clock.

    Attributes:
        streams: all payload, as streams between hosts.
        sorted: class of each stream: training, cross traffic or other.
        training: the job.
        iterations: one row per iteration (`iterations_of`).
        alike: autocorrelation of the training payload.
        period: iteration time.
        shape: pattern of the exchange between hosts.
        volume: bytes of a worker per iteration, and parameters.
        roles: the three flows of figures 3-10 and 3-11.
        roles_missing: a sentence about missing flows; empty if no flow is missing.
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
    shape: ExchangeTopology
    volume: Volume
    roles: tuple[Role, ...]
    roles_missing: str
    steps: StepCheck | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        mean = f"{counted(self.period.iterations, 'iteration')} of {self.period.mean_s * 1e3:.1f} ms on average"
        return f"<Structure: {self.shape.name} of {' > '.join(self.shape.hosts)}, {mean} ({self.period.verdict})>"

    def _repr_html_(self) -> str:
        from ringtap.analysis.structure.structure_text import describe

        return html_of_text("\n".join(describe(self)))

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
        """Bursts of each sender: ``host`` and the columns of `bursts_of`."""
        parts = [
            bursts_of(sent, self.training.starts, self.streams.bin_ns).assign(host=host)
            for host, sent in self.senders.items()
        ]
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def peaks(self) -> pd.DataFrame:
        """Peak-to-mean ratio of each sender at several time scales (`peak_to_mean`)."""
        return peak_to_mean(self.senders, self.training.starts, self.streams.bin_ns)

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
        """Mean rates of the three flows over iterations, as from `mean_rates`."""
        return mean_rates(self.streams, self.roles, self.iterations)

    def table(self) -> pd.DataFrame:
        """Return all streams: ``traffic_class``, ``why``, hosts, ports, ``flows``, their bytes."""
        members = {member.stream: member for member in self.training.members}
        rows = []
        for stream, (kind, why) in zip(self.streams.streams, self.sorted.kinds, strict=True):
            member = members.get(stream)
            row: dict[str, Any] = {"traffic_class": kind, "why": why}
            row |= {name: getattr(stream, name) for name in ("protocol", "source", "destination", "ports", "flows")}
            row |= {"payload_bytes": stream.total, "retransmitted_bytes": stream.retransmitted_bytes}
            row["bytes_per_iteration"] = None if member is None else member.volume
            rows.append(row | {"seen_by": ",".join(sorted(stream.seen_by))})
        return pd.DataFrame(rows).astype({"bytes_per_iteration": "Float64"})

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain values, in the units that the keys name."""
        streams, mine = self.streams, self.iterations
        training_retransmitted = sum(member.stream.retransmitted_bytes for member in self.training.members)
        item: dict[str, Any] = {"places": list(streams.places), "start_ns": streams.start_ns}
        item |= {"bin_s": streams.bin_ns / 1e9, "seconds": streams.bins * streams.bin_ns / 1e9}
        item["period"] = vars(self.period) | {"reasons": list(self.period.reasons)}
        item["boundaries_ns"] = self.boundaries_ns.tolist()
        item["iterations"] = {
            "communication_s": float(mine["communication_s"].median()),
            "silence_s": float(mine["silence_s"].median()),
            "bytes": float(mine["bytes"].median()),
        }
        item["shape"] = vars(self.shape) | {"hosts": list(self.shape.hosts), "servers": list(self.shape.servers)}
        item["volume"] = vars(self.volume) | {"retransmitted_bytes": training_retransmitted}
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
        item["steps"] = None if self.steps is None else vars(self.steps).copy()
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
        streams: all streams, from `streams.streams_of`.

    Raises:
        MeasurementError: there is no training in the streams; the message describes the traffic instead.
    """
    found = sort_out(streams)
    training = found.training
    if training is None:
        raise MeasurementError(f"no training was found in {', '.join(streams.places)}: {found.why}")
    payload = streams.dense([member.stream for member in training.major])
    iterations = iterations_of(payload, training.starts, training.found, streams.start_ns, streams.bin_ns)
    alike = likeness(payload[training.starts[0] : training.starts[-1]], float(np.median(np.diff(training.starts))))
    edges = edges_of(training)
    shape = shape_of(edges, only_host(training), leading_of(training))
    if shape.name == closed_form_patterns.STAR and shape.whole:
        shape = replace(shape, evidence=f"{shape.evidence}; {_answers(both_ways(streams, training))}")
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
    return dict(sorted(sums((member.stream.ends, member.volume) for member in training.major).items()))


def leading_of(training: Training) -> set[tuple[str, str]]:
    """Return the (sender, receiver) whose bytes come before those in the other direction, in most iterations.

    Two directions are compared by the mean time of their bytes within an iteration.
    """
    starts, count = training.starts, len(training.starts) - 1
    passed: dict[tuple[str, str], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}
    for member in training.major:
        stream = member.stream
        number = np.searchsorted(starts, stream.bins, side="right") - 1
        inside = (number >= 0) & (number < count)
        number, payload = number[inside], stream.payload[inside]
        after = stream.bins[inside] - starts[number]
        size, moment = passed.get(stream.ends, (np.zeros(count), np.zeros(count)))
        size, moment = size + np.bincount(number, payload, count), moment + np.bincount(number, payload * after, count)
        passed[stream.ends] = size, moment
    found = set()
    for (source, destination), (size, moment) in passed.items():
        if (destination, source) in passed:
            other_size, other_moment = passed[destination, source]
            both = (size > 0) & (other_size > 0)
            earlier = moment[both] / size[both] < other_moment[both] / other_size[both]
            if both.any() and earlier.mean() >= _MOST:
                found.add((source, destination))
    return found


def both_ways(streams: Streams, training: Training) -> float:
    """Return the share of the bytes that pass between two hosts while others pass the other way, in the same bin."""
    pairs = between_hosts(member.stream for member in training.major)
    at_once = total = 0
    for (source, destination), one in pairs.items():
        payload = streams.dense(one)
        at_once += int(np.minimum(payload, streams.dense(pairs.get((destination, source), []))).sum())
        total += int(payload.sum())
    return at_once / total


def _answers(share: float) -> str:
    if share < _AT_ONCE:
        return f"a worker gets them after it has sent its own ({share:.1%} pass at once), as with a parameter server"
    return (
        f"it gets them while it still sends ({share:.1%} pass at once), as with a switch that adds piece by piece, a "
        "server with several tensors under way, or transfers that are short for the bins"
    )


def only_host(training: Training) -> str | None:
    """Return the host at which every packet was captured; None if the captures together show all exchanges.

    A capture of exchanges without a common host was taken on the link, and shows all exchanges that pass there.
    Captures that show different exchanges, each of one host's, were taken at several hosts.
    """
    places: dict[str, set[frozenset[str]]] = {}
    for member in training.major:
        for place in member.stream.seen_by:
            places.setdefault(place, set()).add(frozenset(member.stream.ends))
    owners = [set[str](set.intersection(*(set(link) for link in links))) for links in places.values()]
    common = set.intersection(*owners)
    if not common or not all(owners):
        return None
    if len(common) > 1:
        # if each of them captured, neither exchanges with others
        return None if any(member.stream.copies > 1 for member in training.major) else sorted(common)[0]
    (centre,) = common
    others = set[str]().union(*(link for links in places.values() for link in links)) - common
    # an exchange is not seen if neither end captured
    captured = set[str]().union(*(next(iter(links)) for links in places.values() if len(links) == 1)) - common
    return None if len(others - captured) <= 1 else centre


def worker_bytes(shape: ExchangeTopology, edges: Mapping[tuple[str, str], float]) -> float:
    """Return the bytes that a worker sends per iteration: the mean over the workers whose packets were captured."""
    sent = sums((source, volume) for (source, _), volume in edges.items())
    if not shape.whole and len(shape.hosts) > 1:
        # only the packets of one host are complete
        centre = max(sent, key=lambda host: sum(1 for pair in edges if host in pair))
        return sent[centre]
    workers = [host for host in sent if host not in shape.servers]
    return sum(sent[host] for host in workers) / len(workers)


# bytes of an iteration of sharded training, relative to an all-reduce of the gradients: it gathers the parameters twice
# and reduces the gradients once, each of which is half an all-reduce; gloo reduces by a whole all-reduce
_SHARDED_LEAST, _SHARDED_MOST = 1.5, 2.0
# message headers of the libraries: gloo 48 bytes per message, 0.4 to 1.5 % of the volume in scale models
HEADER_SHARE = 0.02


@dataclass(frozen=True)
class Volume:
    """Bytes that a worker sends per iteration, and the size of the model that follows.

    Attributes:
        worker_bytes: payload that a worker sends per iteration: median over iterations, mean over workers.
        parameters: number of 32-bit parameters for this volume, if all payload is gradients; None without equation.
        parameters_least: the same if `HEADER_SHARE` of the payload is headers; if the number of workers is not known,
            also for infinitely many workers.
        parameters_most: the same as ``parameters``; if the number of workers is not known, for the fewest possible
            workers (2, or 3 for a member of a ring).
        why: the assumptions, or the reason that a value is not known, as a clause.
        sharded_least: fewest parameters if the job shards them (FSDP, ZeRO-3), which looks the same; None if it cannot.
        sharded_most: most parameters then.
        several_least: fewest parameters if each host has several workers of a ring; None if there is no ring.
    """

    worker_bytes: float
    parameters: int | None
    parameters_least: int | None
    parameters_most: int | None
    why: str
    sharded_least: int | None = None
    sharded_most: int | None = None
    several_least: int | None = None


def volume_of(shape: ExchangeTopology, worker_bytes: float) -> Volume:
    """Infer the size of the model from the bytes of an iteration.

    Args:
        shape: the topology of the exchange.
        worker_bytes: payload that a worker sends per iteration.
    """
    if shape.sent_per_byte is not None:
        count = round(worker_bytes / (shape.sent_per_byte * GRADIENT_BYTES))
        why = (
            f"one worker per host and {8 * GRADIENT_BYTES} bits per parameter; headers of the library's own messages "
            f"are in the payload, so there may be up to {HEADER_SHARE:.0%} fewer parameters"
        )
        least = count * (1 - HEADER_SHARE)
        volume = Volume(worker_bytes, count, round(least), count, why)
        if shape.name in _REDUCED and shape.workers:
            # with R workers, N of the R links of their ring lie between hosts, and each carries 2(R-1)/R of the bytes
            several = round(least * (shape.workers - 1) / shape.workers)
            volume = replace(_sharded(volume), several_least=several if shape.name in _RINGS else None)
        return volume
    if shape.name in (shapes.RING_MEMBER, shapes.ONE_PEER, shapes.ONE_HOST, shapes.ONE_DIRECTION):
        if shape.name == shapes.ONE_HOST:
            why = "all ranks share one address, so the bytes of a single rank are not observable"
            return Volume(worker_bytes, None, None, None, why)
        fewest = 3 if shape.name == shapes.RING_MEMBER else 2
        most = worker_bytes / demand(1, fewest).worker_bytes
        least = worker_bytes / (2 * GRADIENT_BYTES) * (1 - HEADER_SHARE)
        why = f"if it is a ring: the most parameters with {fewest} workers, the fewest with infinitely many"
        return _sharded(Volume(worker_bytes, None, round(least), round(most), why))
    why = f"there is no equation for this pattern ({shape.name})"
    if shape.name == closed_form_patterns.PIPELINE:
        why = "a pipeline sends activations, which do not show the number of parameters"
    return Volume(worker_bytes, None, None, None, why)


def _sharded(volume: Volume) -> Volume:
    """Return a volume with the parameters that sharded training of as many bytes has."""
    assert volume.parameters_least is not None
    assert volume.parameters_most is not None
    # shards are small messages, and so have a larger share of headers
    least = volume.parameters_least * (1 - HEADER_SHARE) / _SHARDED_MOST
    most = volume.parameters_most / _SHARDED_LEAST
    return replace(volume, sharded_least=round(least), sharded_most=round(most))


_RINGS = (closed_form_patterns.RING, closed_form_patterns.TWO_WAY_RING, closed_form_patterns.PAIR)
_REDUCED = (*_RINGS, closed_form_patterns.HALVING, closed_form_patterns.ALL_TO_ALL)

SCALES_S = (0.001, 0.01, 0.1, 1.0)
# pauses of fewer bins do not separate two bursts
_PAUSE_BINS = 2


def loud_bins(payload: Integers) -> Integers:
    """Return the bins in which a stream sent more than small messages (`period_from_silences.is_loud`).

    Args:
        payload: bytes in each bin, shape (bins,).
    """
    used = np.flatnonzero(payload)
    return used[is_loud(payload[used])].astype(np.int64)


def iterations_of(
    payload: Integers, starts: Integers, found: npt.NDArray[np.bool_], start_ns: int, bin_ns: int
) -> pd.DataFrame:
    """Return the iterations, one row per iteration, each from the start of its communication to the next start.

    Columns: ``start_ns``, ``end_ns`` (CLOCK_REALTIME), ``iteration_s``, ``communication_s`` (first to last payload),
    ``silence_s`` (after it), ``bytes`` (sum of ``payload``), ``seen`` (a silence was found before and after it).

    Args:
        payload: training payload in each bin, shape (bins,).
        starts: bins in which communication begins, ascending.
        found: True for starts that follow a silence.
        start_ns: start of bin 0.
        bin_ns: width of a bin.
    """
    loud = loud_bins(payload)
    last = loud[np.clip(np.searchsorted(loud, starts[1:]) - 1, 0, len(loud) - 1)]
    ends = np.maximum(last + 1, starts[:-1] + 1)
    table = {
        "start_ns": start_ns + starts[:-1] * bin_ns,
        "end_ns": start_ns + starts[1:] * bin_ns,
        "iteration_s": np.diff(starts) * (bin_ns / 1e9),
        "communication_s": (ends - starts[:-1]) * (bin_ns / 1e9),
        "silence_s": (starts[1:] - ends) * (bin_ns / 1e9),
        "bytes": np.add.reduceat(payload[: starts[-1]], starts[:-1]),
        "seen": found[:-1] & found[1:],
    }
    return pd.DataFrame(table)


def bursts_of(payload: Integers, starts: Integers, bin_ns: int) -> pd.DataFrame:
    """Return the bursts of one sender within the iterations; pauses under two bins do not separate bursts.

    Columns: ``iteration`` (its number), ``begin_s`` (since the iteration's start), ``length_s``, ``bytes``.

    Args:
        payload: bytes that the host sent in each bin, shape (bins,).
        starts: bins in which iterations begin, ascending.
        bin_ns: width of a bin.
    """
    loud = loud_bins(payload)
    loud = loud[(loud >= starts[0]) & (loud < starts[-1])]
    if not len(loud):
        return pd.DataFrame({"iteration": [], "begin_s": [], "length_s": [], "bytes": []})
    heads = np.flatnonzero(np.concatenate(([True], np.diff(loud) > _PAUSE_BINS)))
    begin, end = loud[heads], loud[np.append(heads[1:] - 1, len(loud) - 1)] + 1
    passed = np.concatenate(([0], np.cumsum(payload)))
    iteration = np.searchsorted(starts, begin, side="right") - 1
    table = {
        "iteration": iteration,
        "begin_s": (begin - starts[iteration]) * (bin_ns / 1e9),
        "length_s": (end - begin) * (bin_ns / 1e9),
        "bytes": passed[end] - passed[begin],
    }
    return pd.DataFrame(table)


def peak_to_mean(senders: Mapping[str, Integers], starts: Integers, bin_ns: int) -> pd.DataFrame:
    """Return the highest rate in windows of several lengths, relative to the mean rate of whole iterations.

    Columns: ``host``, ``scale_s``, ``peak_bps`` (highest over sliding windows), ``mean_bps``, ``peak_to_mean``. Scales
    below a bin or above half of the iterations' span are omitted.

    Args:
        senders: bytes that each host sent in each bin, shape (bins,).
        starts: bins in which iterations begin, ascending.
        bin_ns: width of a bin.
    """
    rows = []
    for host, payload in senders.items():
        inside = payload[starts[0] : starts[-1]]
        passed = np.concatenate(([0], np.cumsum(inside)))
        mean_bps = float(passed[-1]) * 8e9 / (len(inside) * bin_ns)
        for scale_s in SCALES_S:
            width = round(scale_s * 1e9 / bin_ns)
            if width < 1 or width > len(inside) // 2 or mean_bps <= 0:
                continue
            peak_bps = float((passed[width:] - passed[:-width]).max()) * 8e9 / (width * bin_ns)
            rows.append((host, scale_s, peak_bps, mean_bps, peak_bps / mean_bps))
    return pd.DataFrame(rows, columns=["host", "scale_s", "peak_bps", "mean_bps", "peak_to_mean"])


# share of the iterations in which bytes come before those in the other direction, if they lead
_MOST = 0.8
# share of the bytes that pass both ways at once: in bins of 1 ms 0.1 % with a server for one tensor after the other, 4
# to 10 % with a switch that adds in four pieces
_AT_ONCE = 0.02

SURE, LIKELY, DOUBTFUL = "sure", "likely", "doubtful"

_RESAMPLES = 2000
_FEW_ITERATIONS = 16


@dataclass(frozen=True)
class Period:
    """Iteration time.

    Attributes:
        iterations: whole iterations captured.
        mean_s: mean of the iteration times.
        low_s: lower end of the mean's 95 % interval, by bootstrap over iterations.
        high_s: upper end of this interval.
        median_s: median of the iteration times.
        p99_s: 99th percentile of the iteration times.
        verdict: ``sure``, ``likely`` or ``doubtful``.
        confidence: 1 less the probability that chance gives as many silences at the boundaries.
        found_share: share of the boundaries at which there was a silence.
        silence_s: usual silence before a boundary (lower quartile).
        other_silence_s: usual length of the longest silence within an iteration (lower quartile).
        autocorrelation: autocorrelation of the training rate at its peak near the median; None: no peak there.
        autocorrelation_s: lag of this peak; None: no peak.
        reasons: arguments against the period, one sentence each.
    """

    iterations: int
    mean_s: float
    low_s: float
    high_s: float
    median_s: float
    p99_s: float
    verdict: str
    confidence: float
    found_share: float
    silence_s: float
    other_silence_s: float
    autocorrelation: float | None
    autocorrelation_s: float | None
    reasons: tuple[str, ...]


def period_of(training: Training, iterations: pd.DataFrame, alike: Likeness, bin_ns: int) -> Period:
    """Summarize the iteration times, and give a verdict with reasons.

    Args:
        training: the job.
        iterations: a table of `iterations_of`.
        alike: autocorrelation of the training payload.
        bin_ns: width of a bin.
    """
    rhythm = training.rhythm
    times = iterations["iteration_s"].to_numpy(np.float64)
    draws = np.random.default_rng(1).integers(0, len(times), (_RESAMPLES, len(times)))
    low, high = np.quantile(times[draws].mean(axis=1), (0.025, 0.975))
    # a boundary may lie anywhere in its bin
    grain_s = bin_ns / 1e9 / len(times)
    reasons = []
    contrast = rhythm.silence_bins / rhythm.other_bins if rhythm.other_bins else np.inf
    if len(times) < 8:
        reasons.append(f"only {len(times)} whole iterations were captured")
    if rhythm.found_share < 0.9:
        reasons.append(f"{1 - rhythm.found_share:.0%} of the boundaries have no silence")
    if contrast < 1.5:
        reasons.append("a silence within the iterations is nearly as long as those between them")
    long = rhythm.long_bins > 2 * rhythm.silence_bins
    if training.pause_after:
        reasons.append(
            f"every {training.pause_after} iterations a longer pause follows, in which hosts exchange small messages, "
            "as in an evaluation"
        )
    elif rhythm.parts > 1:
        reasons.append(
            f"each has {rhythm.parts} equal parts with a silence before each, which may be the iterations, with a "
            f"pause after every {rhythm.parts}"
        )
    if long and not training.pause_after:
        reasons.append("some silences are far longer than usual, so that several bursts may be one iteration")
    if rhythm.silence_bins < 4:
        reasons.append("silences are only a few bins long: a smaller --bin shows them better")
    near = alike.period_bins is not None and abs(alike.period_bins * bin_ns / 1e9 / np.median(times) - 1) < 0.1
    if not near and float(np.std(times)) < 0.1 * float(times.mean()):
        reasons.append("the rate's autocorrelation has no peak at this period")
    if unbalanced := why_doubtful(training.volumes):
        reasons.append(unbalanced)
    # if there are few silences, a far longer one may be the only one between iterations
    is_doubtful = bool(unbalanced) or (long and len(times) < _FEW_ITERATIONS)
    verdict = SURE if not reasons else LIKELY if len(reasons) == 1 and not is_doubtful else DOUBTFUL
    return Period(
        len(times),
        float(times.mean()),
        float(low) - grain_s,
        float(high) + grain_s,
        float(np.median(times)),
        float(np.quantile(times, 0.99)),
        verdict,
        rhythm.confidence,
        rhythm.found_share,
        rhythm.silence_bins * bin_ns / 1e9,
        rhythm.other_bins * bin_ns / 1e9,
        alike.at_period if near else None,
        alike.period_bins * bin_ns / 1e9 if near and alike.period_bins is not None else None,
        tuple(reasons),
    )
