"""Measures the packets that a sweep recorded at some loads: rates of flows, how they yield to each other, and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from ringtap.analysis.job.captured_payload_per_iteration import lost_packets
from ringtap.analysis.job.flows import CrossTrafficDestinations
from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.pcap import read_captures
from ringtap.analysis.pcap.captured_traffic import Traffic
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.run import JobRun, SweepRun, window_on_reference, within_window
from ringtap.analysis.runs.samples_to_iterations import Borders, shares
from ringtap.analysis.runs.sockets import SocketLog, socket_log
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.structure.flow_roles_and_rates import CROSSING, ONLY, SHARED, moving_average
from ringtap.analysis.sweeps.points import Point, ordered_windows
from ringtap.core.errors import UsageError
from ringtap.core.ethernet import family_of, headers_bytes
from ringtap.core.run_directory_schema import CAPTURED_JSON, CAPTURED_SOCKETS, NIC_REC, PACKETS, VARIANTS
from ringtap.core.sweep_plans.collective_algorithms import IN_NETWORK, PARAMETER_SERVER, SHARDED

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

BIN_NS = 100_000  # a sample of the injection rate
SAMPLES, SAMPLES_HEAVY, HEAVY_LOAD = 30, 50, 0.5  # moving averages in figures 3-10 and 3-11, (a) and (b)
YIELD_NS = 10_000_000  # bins in which training and cross traffic are compared
MAX_DIFFERENCE = 0.02  # up to which the counts of training bytes agree
_BY_SERVERS = (PARAMETER_SERVER, SHARDED, IN_NETWORK)
_EDGE_SHARE = 0.01  # of an iteration's training bytes at each end, which may come long before or after the others


@dataclass(frozen=True, eq=False)
class CapturedFlow:
    """Payload of a flow at one capture point.

    Attributes:
        role: one of the roles in `ringtap.analysis.structure.flow_roles_and_rates`.
        source: sending host.
        destination: receiving host.
        place: node on which it was captured.
        payload: bytes in each bin of `BIN_NS`, retransmitted ones included, shape (bins,).
        repeated_share: share of the payload that was captured more than once, over the whole capture.
    """

    role: str
    source: str
    destination: str
    place: str
    payload: Integers
    repeated_share: float


@dataclass(frozen=True)
class Ratio:
    """Relative decrease of a rate under a condition.

    Attributes:
        value: 1 minus the mean rate under the condition over that without it.
        low: lower end of the 95 % interval, from the differences between iterations.
        high: upper end.
        bins: number of bins compared.
    """

    value: float
    low: float
    high: float
    bins: int


@dataclass(frozen=True)
class TrainingBytes:
    """Payload that a worker sends in an iteration, at full size and counted in several ways; None: not known.

    Attributes:
        packets: by captured packets, each byte once.
        interfaces: by interface counters, without headers and the bytes that were captured more than once.
        sockets: by the bytes that the receivers acknowledged to the sockets.
        equation: by equation 3.1, without headers of the job's library.
        reasons: by name, the reason that a number is not known.
        workers: workers over which the first three are means.
    """

    packets: float | None
    interfaces: float | None
    sockets: float | None
    equation: float | None
    reasons: Mapping[str, str]
    workers: tuple[str, ...]

    @property
    def header_share(self) -> float | None:
        """Share by which the packets exceed equation 3.1: headers of the job's library."""
        return None if self.packets is None or not self.equation else self.packets / self.equation - 1

    @property
    def largest_difference(self) -> float | None:
        """Largest relative difference between two of the counts; None with fewer than two."""
        known = [one for one in (self.packets, self.interfaces, self.sockets, self.equation) if one]
        return max(known) / min(known) - 1 if len(known) > 1 else None


@dataclass(frozen=True, eq=False)
class CapturedPoint:
    """Packets of one point.

    Attributes:
        point: the point, which was measured just before.
        title: name of the model in reports.
        load: requested load as a share of the capacity.
        scale: full-size rate over the rate of the testbed.
        start_ns: begin of the span, CLOCK_REALTIME of the reference node; bin 0 begins here.
        edges_ns: ends of iterations in the span, the first one its begin; empty if nothing was recorded.
        flows: the flows of figures 3-10 and 3-11, in their order; those that were not captured are missing.
        at_bottleneck: payload of training and of cross traffic in each bin at the bottleneck; None if not captured.
        bytes: training bytes.
        dropped: packets that the captures dropped; None: not known.
        flow_plan: flow plan of the cross traffic; None if its kind has none.
        why: reason that the packets are missing or cut short; empty if they are complete.
    """

    point: Point
    title: str
    load: float
    scale: float
    start_ns: int
    edges_ns: Integers
    flows: tuple[CapturedFlow, ...]
    at_bottleneck: tuple[Integers, Integers] | None
    bytes: TrainingBytes | None
    dropped: int | None
    flow_plan: Path | None
    why: str

    @property
    def samples(self) -> int:
        """Bins of the moving average."""
        return SAMPLES if self.load < HEAVY_LOAD else SAMPLES_HEAVY

    @property
    def mean_s(self) -> float | None:
        """Mean iteration time while packets were recorded."""
        return float(self.edges_ns[-1] - self.edges_ns[0]) / 1e9 / (len(self.edges_ns) - 1) if self.flows else None

    def flow(self, role: str) -> CapturedFlow | None:
        """Return the flow in a role."""
        return next((flow for flow in self.flows if flow.role == role), None)

    def smoothed_bps(self, flow: CapturedFlow) -> Numbers:
        """Return the payload rate of a flow as a moving average, shape (bins,)."""
        return moving_average(flow.payload, self.samples, BIN_NS)

    def sending_bps(self, role: str) -> float | None:
        """Return the mean of a flow's moving average where the flow sends (Table 3.11); None without the flow."""
        flow = self.flow(role)
        if flow is None:
            return None
        busy = (rates := self.smoothed_bps(flow)) > 0
        return float(rates[busy].mean()) if busy.any() else None

    @property
    def oversupply(self) -> float | None:
        """Rate of the training flow alone over that of the flow beside cross traffic, less 1."""
        alone, shared = self.sending_bps(ONLY), self.sending_bps(SHARED)
        return None if alone is None or not shared else alone / shared - 1

    @cached_property
    def training_backoff(self) -> Ratio | None:
        """Decrease of the training rate at the bottleneck in bins whose cross traffic is above its median.

        Only bins during an exchange count: without the first and the last percent of an iteration's training bytes.
        """
        return self._yielding(during_exchange=True)

    @cached_property
    def cross_backoff(self) -> Ratio | None:
        """Decrease of the cross traffic at the bottleneck in bins with training traffic, against those without."""
        return self._yielding(during_exchange=False)

    def _yielding(self, *, during_exchange: bool) -> Ratio | None:
        if self.at_bottleneck is None or len(self.edges_ns) < 3:
            return None
        width = YIELD_NS // BIN_NS
        count = len(self.at_bottleneck[0]) // width
        training, cross = (one[: count * width].reshape(count, width).sum(axis=1) for one in self.at_bottleneck)
        middles = self.start_ns + (np.arange(count) + 0.5) * YIELD_NS
        iteration = np.searchsorted(self.edges_ns[1:], middles, side="right")
        sends = training > 0
        if not during_exchange:
            return decrease(cross, sends, iteration)
        inside = np.zeros(count, bool)
        for number in np.unique(iteration[sends]):
            mine = np.flatnonzero(iteration == number)
            passed = np.cumsum(training[mine])
            first, last = np.searchsorted(passed, (_EDGE_SHARE * passed[-1], (1 - _EDGE_SHARE) * passed[-1]))
            inside[mine[first] : mine[last] + 1] = True
        if not inside.any():
            return None
        return decrease(training[inside], (cross > np.median(cross[inside]))[inside], iteration[inside])

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain values; rates and bytes at full size."""
        point = self.point

        def gbps(bps: float | None) -> float | None:
            return None if bps is None else bps * self.scale / 1e9

        item: dict[str, Any] = {"series": point.series, "model": point.model, "traffic": point.traffic}
        item |= {name: getattr(point, name) for name in VARIANTS}
        item |= {"load": self.load, "requested_gbps": point.requested_gbps}
        item |= {"iterations": max(len(self.edges_ns) - 1, 0), "mean_s": self.mean_s, "window_mean_s": point.mean_s}
        item |= {"dropped_packets": self.dropped, "why": self.why, "samples": self.samples}
        item["flows"] = [
            {"role": flow.role, "source": flow.source, "destination": flow.destination, "captured_on": flow.place}
            | {"sending_gbps": gbps(self.sending_bps(flow.role))}
            | {"iteration_gbps": gbps(float(flow.payload.sum()) * 8e9 / (len(flow.payload) * BIN_NS))}
            for flow in self.flows
        ]
        item |= {"alone_gbps": gbps(self.sending_bps(ONLY)), "shared_gbps": gbps(self.sending_bps(SHARED))}
        item["oversupply"] = self.oversupply
        for name, ratio in (("training_backoff", self.training_backoff), ("cross_backoff", self.cross_backoff)):
            item[name] = None if ratio is None else vars(ratio).copy()
        found = self.bytes
        item["bytes"] = None
        if found is not None:
            item["bytes"] = vars(found) | {"workers": list(found.workers), "header_share": found.header_share}
            difference = found.largest_difference
            item["bytes"] |= {"largest_difference": difference}
            item["bytes"] |= {"agree": None if difference is None else difference <= MAX_DIFFERENCE}
        return item


def decrease(rates: Integers, condition: npt.NDArray[np.bool_], blocks: Integers) -> Ratio | None:
    """Return the decrease of a mean rate under a condition; None if it, or its opposite, is in fewer than two blocks.

    The interval is Student's t of the jackknife over blocks. In simulations it holds the truth in 93 to 95 % from three
    blocks on; resampled blocks hold it in 77 % with three, and in 83 % with five.
    """
    if not condition.any() or condition.all() or not rates[~condition].any():
        return None
    _, block = np.unique(blocks, return_inverse=True)
    count = int(block.max()) + 1
    sides = []
    for mask in (condition, ~condition):
        sums, bins = np.bincount(block[mask], rates[mask], count), np.bincount(block[mask], minlength=count)
        # all blocks, then all but each
        sides.append((np.append(0, sums) - sums.sum(), np.append(0, bins) - bins.sum()))
    (with_sums, with_bins), (sums, bins) = sides
    if count < 2 or not (with_bins.all() and bins.all() and sums.all()):
        return None
    ratios = with_sums / with_bins / (sums / bins)
    error = math.sqrt((count - 1) * float(ratios[1:].var()))
    reach = error * float(special.stdtrit(count - 1, (1 + LEVEL) / 2))
    value = 1 - float(ratios[0])
    return Ratio(value, value - reach, min(value + reach, 1.0), len(rates))


def captured_points(sweep: SweepRun, points: Sequence[Point]) -> list[CapturedPoint]:
    """Return the points of a sweep at which it recorded packets, in the order of ``points``.

    Args:
        sweep: the sweep.
        points: its points, from `ringtap.analysis.sweeps.points.measure`.
    """
    return [
        _PointReading(sweep, window, point).result()
        for window, point in zip(ordered_windows(sweep), points, strict=True)
        if "packets_start_ns" in window or window.get("packets_why")
    ]


class _PointReading:
    """Reading of one point's packets."""

    def __init__(self, sweep: SweepRun, window: Mapping[str, Any], point: Point) -> None:
        self._sweep, self._window, self._point = sweep, window, point
        self._job: JobRun = sweep.job(window["directory"])
        self._hosts: dict[str, dict[str, str]] = (sweep.info.get("capture") or {}).get("hosts") or {}
        topology = sweep.plan["topology"]
        self._workers = [name for name in topology.get("workers") or [] if name in self._hosts]
        self._from, self._to = topology.get("cross_from") or "", topology.get("cross_to") or ""
        self._nodes = self._job.nodes
        models: dict[str, Mapping[str, Any]] = {one["name"]: one for one in sweep.plan["models"]}
        self._model = models[point.model]
        self._title, self._scale = str(self._model.get("title", point.model)), float(sweep.plan["scale"])
        self._parts: dict[str, str] = {}
        self._dropped: list[int | None] = []

    def result(self) -> CapturedPoint:
        """Return the packets, or why there are none."""
        load = float(self._window["requested_bps"]) / float(self._sweep.plan["capacity_bps"])
        why = self._window.get("packets_why") or ""
        if "packets_start_ns" not in self._window:
            return self._nothing(load, why)
        recorded_ns = int(self._window["packets_start_ns"]), int(self._window["packets_end_ns"])
        start, end = window_on_reference(recorded_ns, self._job)
        times = self._job.iterations
        times = times[within_window(times["start_ns"].to_numpy(), times["end_ns"].to_numpy(), (start - BIN_NS, end))]
        if not len(times):
            return self._nothing(load, why or "no whole iteration lies in the recorded time")
        edges = np.append(times["start_ns"].to_numpy(np.int64)[:1], times["end_ns"].to_numpy(np.int64))
        self._start_ns = int(edges[0]) // BIN_NS * BIN_NS
        self._bins = int(edges[-1] - self._start_ns) // BIN_NS
        captures = {name: traffic for name, logs in self._nodes.items() if (traffic := self._traffic(logs, edges))}
        flows = self._flows(captures)
        bottleneck = self._bottleneck()
        both = None
        if bottleneck in captures:
            traffic = captures[bottleneck]
            training, cross = (self._binned(traffic, bottleneck, words) for words in (self._training(), self._cross()))
            both = training, cross
        return CapturedPoint(
            self._point,
            self._title,
            load,
            self._scale,
            self._start_ns,
            edges,
            flows,
            both,
            self._bytes(captures, edges) if captures else None,
            None if None in self._dropped else sum(filter(None, self._dropped)),
            self._flow_plan(),
            why or ("" if captures else "the packets are not in the run directory"),
        )

    def _nothing(self, load: float, why: str) -> CapturedPoint:
        nothing = np.empty(0, np.int64)
        return CapturedPoint(self._point, self._title, load, self._scale, 0, nothing, (), None, None, 0, None, why)

    def _flow_plan(self) -> Path | None:
        parts = set(self._parts.values())
        paths = [self._job.path / "nodes" / self._from / "sent" / f"{part}.plan" for part in parts]
        return next((path for path in paths if path.is_file()), None)

    def _bottleneck(self) -> str:
        total = (self._sweep.info.get("bottleneck") or {}).get("total") or [{}]
        return str((total if isinstance(total, dict) else total[0]).get("node", ""))

    def _traffic(self, logs: NodeLogs, edges: Integers) -> Traffic | None:
        """Return the captures of a node that cover this point."""
        files = []
        for name in logs.names(CAPTURED_JSON.format(part="*")):
            facts = logs.json(name, PACKETS)
            begin, end = logs.clock.on_reference(np.array([facts.get(side) or 0 for side in ("begin_ns", "end_ns")]))
            if begin <= edges[-1] and end >= edges[0]:
                files += [
                    logs.path / name for name in logs.regular(f"packets/{file}" for file in facts.get("files") or [])
                ]
                self._parts[logs.name] = name.removeprefix("packets/").removesuffix(f"-{facts.get('interface')}.json")
                self._dropped.append(lost_packets(facts))
        try:
            return read_captures(files, bin_s=BIN_NS / 1e9) if files else None
        except UsageError as error:
            logs.report(str(error))
            return None

    def _address(self, host: str, side: str) -> str:
        return self._hosts[host][side]

    def _cross(self) -> str:
        """Return a filter for the cross traffic."""
        if not {self._from, self._to} <= set(self._hosts):
            return ""
        words = f"src host {self._address(self._from, 'cross')} and dst host {self._address(self._to, 'cross')}"
        ports = self._shared_ports()
        return f"{words} and ({' or '.join(f'dst port {port}' for port in ports)})" if ports else words

    def _shared_ports(self) -> list[int]:
        """Return the receiver's ports if the addresses do not tell cross traffic from training; else an empty list."""
        ends = {self._from, self._to} & set(self._workers)
        if len(ends) < 2 or any(self._address(one, "training") != self._address(one, "cross") for one in ends):
            return []
        receiver = self._address(self._to, "cross")
        return sorted(port for address, port in CrossTrafficDestinations.of(self._nodes).ends if address == receiver)

    def _training(self, source: str = "", destination: str = "") -> str:
        """Return a filter for the training traffic, from one worker, and to one."""
        sides = []
        for side, host in (("src", source), ("dst", destination)):
            hosts = [host] if host else self._workers
            sides.append("(" + " or ".join(f"{side} host {self._address(one, 'training')}" for one in hosts) + ")")
        return " and ".join([*sides, *(f"not port {port}" for port in self._shared_ports())])

    def _binned(self, traffic: Traffic, node: str, words: str) -> Integers:
        """Return the payload in the bins of the span on the reference clock."""
        result = np.zeros(self._bins, np.int64)
        selected = _selected(traffic, words)
        if selected is None:
            return result
        payload = selected.binned()
        at = selected.start_ns + np.flatnonzero(payload) * BIN_NS
        clock = self._nodes[node].clock
        # on another clock, a bin overlaps two bins: it counts in the one with the larger part
        bins = (clock.on_reference(at) + BIN_NS // 2 - self._start_ns) // BIN_NS
        inside = (bins >= 0) & (bins < self._bins)
        np.add.at(result, bins[inside], payload[payload > 0][inside])
        return result

    def _flows(self, captures: Mapping[str, Traffic]) -> tuple[CapturedFlow, ...]:
        """Return the training flow alone, the one beside cross traffic, and the cross traffic."""
        pairs = {
            (a, b): flow for a in self._workers for b in self._workers
            if a != b and (flow := self._flow(captures, "", a, b, self._training(a, b)))
        }  # fmt: skip
        order = sorted(pairs, key=lambda pair: -int(pairs[pair].payload.sum()))
        # as in `roles_of`; but if the sender of cross traffic trains too, its link is the bottleneck
        side, end = (0, self._from) if self._from in self._workers else (1, self._to)
        shared = [pair for pair in order if pair[side] == end]
        alone = [pair for pair in order if not {self._from, self._to} & set(pair)]
        roles = [(ONLY, alone), (SHARED, shared)]
        found = [replace(pairs[some[0]], role=role) for role, some in roles if some]
        cross = self._flow(captures, CROSSING, self._from, self._to, self._cross()) if self._cross() else None
        return (*found, cross) if cross else tuple(found)

    def _flow(
        self, captures: Mapping[str, Traffic], role: str, source: str, destination: str, words: str
    ) -> CapturedFlow | None:
        """Return a flow as its sender captured it, else its receiver, else another node; None if none did."""
        for place in dict.fromkeys((source, destination, *captures)):
            if place not in captures or (selected := _selected(captures[place], words)) is None:
                continue
            if (payload := self._binned(captures[place], place, words)).any():
                table = selected.flows()
                again = float(table["repeated_bytes"].sum()) / max(float(table["payload"].sum()), 1.0)
                return CapturedFlow(role, source, destination, place, payload, again)
        return None

    def _bytes(self, captures: Mapping[str, Traffic], edges: Integers) -> TrainingBytes:
        """Count the training bytes of the workers that captured what they sent."""
        workers = tuple(name for name in self._workers if name in captures)
        counts: dict[str, list[float]] = {"packets": [], "interfaces": [], "sockets": []}
        reasons: dict[str, str] = {}
        if self._point.collective in _BY_SERVERS:
            why = f"with {self._point.collective}, workers send nothing to each other"
            return TrainingBytes(None, None, None, None, dict.fromkeys((*counts, "equation"), why), workers)
        for name in workers:
            sent = self._flow(captures, "", name, "", self._training(name))
            again = 0.0
            if sent is None:
                reasons.setdefault("packets", f"{name} captured no training packet of its own")
            else:
                total = float(sent.payload.sum())
                again = total * sent.repeated_share
                counts["packets"].append(total - again)
            for what, found in (("interfaces", self._nic_payload(name, edges)), ("sockets", self._acked(name, edges))):
                if isinstance(found, str):
                    reasons.setdefault(what, f"{name}: {found}")
                else:
                    counts[what].append(found - (again if what == "interfaces" else 0.0))
        per_iteration = self._scale / (len(edges) - 1)
        means = {
            what: per_iteration * sum(values) / len(values) if values and len(values) == len(workers) else None
            for what, values in counts.items()
        }
        if not workers:
            reasons |= dict.fromkeys(counts, "no worker captured what it sent")
        equation = self._equation()
        reasons |= {"equation": equation} if isinstance(equation, str) else {}
        known = None if isinstance(equation, str) else equation
        return TrainingBytes(**means, equation=known, reasons=reasons, workers=workers)

    def _equation(self) -> float | str:
        parameters, count = self._model.get("parameters"), len(self._workers)
        if self._point.collective not in ("", "ring"):
            return f"the equation is of a ring, and {self._point.collective} exchanged the gradients"
        if self._job.ranks != count:
            return f"{self._job.ranks} ranks on {count} workers exchange within hosts too"
        if count < 2 or not parameters:
            return "the plan does not tell workers and parameters"
        return self._scale * demand(round(parameters / self._scale), count).worker_bytes

    def _nic_payload(self, name: str, edges: Integers) -> float | str:
        """Return the payload that a worker's training interface sent, by its counters, or why it is not known."""
        nic, other = self._hosts[name]["training_nic"], self._hosts[name]["cross_nic"]
        log = self._nodes[name].wide(NIC_REC)
        if log is None or f"{nic}.tx_bytes" not in log.columns:
            return f"the counters of {nic} were not recorded"
        if name == self._from and other == nic:
            return f"{nic} also carries the cross traffic that the worker sends"
        ends = self._nodes[name].clock.from_reference(edges[[0, -1]])
        borders = Borders.of(ends[:1], ends[1:])

        def payload(interface: str) -> float:
            grown = [float(log.growth(f"{interface}.tx_{unit}", borders)[0]) for unit in ("bytes", "packets")]
            return grown[0] - headers_bytes(family_of(self._address(name, "training"))) * grown[1]

        links = ((self._nodes[name].info.get("before") or {}).get("links") or {}).get(other) or {}
        stacked = name == self._from and nic in (links.get("below") or [])
        found = payload(nic) - (payload(other) if stacked else 0.0)
        return found if np.isfinite(found) else f"the counters of {nic} do not cover the packets, or have gaps"

    def _acked(self, name: str, edges: Integers) -> float | str:
        """Return the training bytes that were acknowledged to a worker's sockets, or why they are not known."""
        logs = self._nodes[name]
        records = logs.records(CAPTURED_SOCKETS.format(part=self._parts[name]))
        log = socket_log(logs) if records is None else SocketLog(*records)
        if log is None:
            return "no sockets were recorded"
        if not len(log):
            return "no connection was there when sockets were sampled"
        table, own = log.sockets, self._address(name, "training")
        others = [self._address(one, "training") for one in self._workers if one != name]
        mine = (table["local"] == own) & table["remote"].isin(others)
        for port in self._shared_ports():
            mine &= (table["local_port"] != port) & (table["remote_port"] != port)
        ends, total = logs.clock.from_reference(edges[[0, -1]]), 0.0
        for grown in log.growth():
            span, _, share = shares(grown.begin_ns, grown.end_ns, ends)
            amount = (grown.amounts["bytes_acked"][span] * share)[mine.to_numpy(bool)[grown.end[span]]]
            total += float(np.nansum(amount))
        return total


def _selected(traffic: Traffic, words: str) -> Traffic | None:
    """Return the part of the traffic that a filter accepts; None if there is none."""
    try:
        return traffic.select(words) if words else None
    except UsageError:
        return None
