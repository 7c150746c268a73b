"""Builds a Snapshot from the state of a running job's directory."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ringtap.analysis.live.flows import LiveFlow, flows
from ringtap.analysis.live.follow_run import NodeLog, RunFollower
from ringtap.analysis.live.iterations import IterationStats, RankSteps, join
from ringtap.analysis.live.recent_counters import RecentWideLog
from ringtap.analysis.live.repeated_diagnosis import RepeatedDiagnosis
from ringtap.analysis.live.snapshot import (
    CollectorState,
    Diagnosis,
    Gpu,
    Health,
    Host,
    Mark,
    Nic,
    NodeState,
    ProcessState,
    Queue,
    Rank,
    Snapshot,
    Throughput,
)
from ringtap.analysis.runs.growing_files import Document
from ringtap.analysis.runs.traffic_classes import TRAINING
from ringtap.core.interface_capacity import capacity_bps
from ringtap.core.link_counter_sources import count_once, counts_marks, counts_pauses
from ringtap.core.run_completeness import failed_job, missing_ranks
from ringtap.core.run_directory_schema import RUN, RUN_JSON, SERIES

_STALE_NS = 3 * 10**9
_LINK_RATE = re.compile(r"([\d.]+)\s*Gb/sec")
PORT_DROPS = ("port_xmit_discards", "hw.out_of_buffer")
_PORT_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "link_downed", "hw.packet_seq_err")
_PORT_PAUSES = ("hw.rp_cnp_handled", "hw.np_cnp_sent")
_PORT_MARKS = ("hw.np_ecn_marked_roce_packets",)
_MAX_FLOWS = 500
_MAX_OUTPUT = 200
# A collector is silent after this time, and after this many of its periods, without a sample
_SILENT_S, _SILENT_PERIODS = 5.0, 10
_GOOD = ("ok", "running", "no job", "")
_ALL_DONE_S = 5.0
_THROUGHPUTS = 300
# Names of losses in node.json, by the agent and the collectors
_LOSSES = ("lost", "lost_records", "lost_answers", "dropped", "dropped_by_kernel", "dropped_by_interface")


def nic_logs(node: NodeLog) -> dict[str, RecentWideLog]:
    """Return the log of each of the node's network interfaces, loopback last."""
    by_nic: dict[str, RecentWideLog] = {}
    files = sorted((log for (name, _), log in node.wide.items() if name == "nic"), key=lambda log: log.mono_ns)
    newest = files[-1].mono_ns if files else 0
    for log in files:
        if log.mono_ns >= newest - _STALE_NS:
            by_nic |= {name.removesuffix(".tx_bytes"): log for name in log.file.index if name.endswith(".tx_bytes")}
    return {name: by_nic[name] for name in sorted(by_nic, key=lambda name: (name == "lo", name))}


def _nics(node: NodeLog) -> Iterator[Nic]:
    for name, log in nic_logs(node).items():
        yield _nic(node, name, log)
    for name, port in port_logs(node).items():
        yield _port(node, name, port)


def _nic(node: NodeLog, name: str, log: RecentWideLog) -> Nic:
    ethtool = node.wide.get(("ethtool", name))
    pauses = marks = None
    if ethtool is not None:
        pauses = sum_known(ethtool.rate(column) for column in ethtool.file.index if counts_pauses(column))
        marks = sum_known(ethtool.rate(column) for column in ethtool.file.index if counts_marks(column))
    drops = [f"{name}.{direction}_drops" for direction in ("tx", "rx")]
    return Nic(
        node.name,
        name,
        "nic",
        _bits(log, f"{name}.tx_bytes"),
        _bits(log, f"{name}.rx_bytes"),
        log.rate(f"{name}.tx_packets"),
        log.rate(f"{name}.rx_packets"),
        sum_known(log.rate(column) for column in drops),
        sum_known(log.total(column) for column in drops),
        sum_known(log.total(f"{name}.{direction}_errors") for direction in ("tx", "rx")),
        capacity_bps(node.facts, name),
        pauses,
        marks,
    )


def port_logs(node: NodeLog) -> dict[str, RecentWideLog]:
    """Return the log of each port of the node's RDMA devices."""
    logs = {stem: log for (collector, stem), log in sorted(node.wide.items()) if collector == "infiniband"}
    return {
        f"{log.file.about.get('device', stem)}:{log.file.about.get('port', '')}".rstrip(":"): log
        for stem, log in logs.items()
    }


def _port(node: NodeLog, name: str, log: RecentWideLog) -> Nic:
    return Nic(
        node.name,
        name,
        "rdma",
        _bits(log, "port_xmit_data"),
        _bits(log, "port_rcv_data"),
        log.rate("port_xmit_packets"),
        log.rate("port_rcv_packets"),
        sum_known(log.rate(name) for name in PORT_DROPS),
        sum_known(log.total(name) for name in PORT_DROPS),
        sum_known(log.total(name) for name in _PORT_ERRORS),
        _speed_bps(log),
        sum_known(log.rate(name) for name in _PORT_PAUSES),
        sum_known(log.rate(name) for name in _PORT_MARKS),
    )


def _bits(log: RecentWideLog, name: str) -> float | None:
    """Return a data counter's rate in bit/s."""
    rate = log.rate(name)
    return None if rate is None else rate * 8 * log.file.column(name).octets


def _speed_bps(log: RecentWideLog) -> float | None:
    match = _LINK_RATE.match(str(log.file.about.get("rate") or ""))
    return float(match[1]) * 1e9 if match else None


def gpus_of(node: NodeLog) -> Iterator[Gpu]:
    """Yield the node's GPUs."""
    for (collector, stem), log in sorted(node.wide.items()):
        if collector != "gpu":
            continue
        share, power_mw = log.value("utilization_pct"), log.value("power_mw")
        yield Gpu(
            node.name,
            f"{stem.removeprefix('gpu')} {log.file.about.get('name', '')}".strip(),
            None if share is None else share / 100,
            log.value("memory_used_bytes"),
            None if power_mw is None else power_mw / 1000,
            *(_pcie_bits(log, f"pcie_{direction}_bytes") for direction in ("tx", "rx")),
            *(_bits(log, f"nvlink_{direction}_bytes") for direction in ("tx", "rx")),
        )


def _pcie_bits(log: RecentWideLog, counter: str) -> float | None:
    """Return a counter's rate in bit/s; older drivers provide a gauge of the rate instead."""
    bits, bytes_per_s = _bits(log, counter), log.value(f"{counter}_per_s")
    return bytes_per_s * 8 if bits is None and bytes_per_s is not None else bits


def sum_known(numbers: Iterable[float | None]) -> float | None:
    """Return the sum of the numbers that are known; None if none is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


class SnapshotSource:
    """Source of Snapshots of a run.

    Args:
        path: the run directory.
        clock: returns CLOCK_REALTIME in nanoseconds.
    """

    def __init__(self, path: Path, clock: Callable[[], int] = time.time_ns) -> None:
        self._follower = RunFollower(path)
        self._diagnosis = RepeatedDiagnosis(self._follower)
        self._clock = clock
        is_series = path.absolute().parent.name == SERIES
        self._sweep = Document(path.absolute().parents[1] / RUN_JSON, RUN) if is_series else None
        self._all_done_ns: int | None = None
        self._throughput: deque[Throughput] = deque(maxlen=_THROUGHPUTS)
        self._is_over_loopback = False

    def take(self) -> Snapshot:
        """Read what was added to the run's logs, and return the current state of the run."""
        follower, now_ns = self._follower, self._clock()
        follower.poll()
        nodes = [follower.nodes[name] for name in sorted(follower.nodes)]
        status, why = self._status(nodes, now_ns)
        ended = status != "running"
        newest_ns = max([0, *(node.t_ns for node in nodes), *(steps.last_end_ns for steps in follower.ranks)])
        end_ns = newest_ns if ended and newest_ns else now_ns
        live_ns = None if ended else now_ns
        sockets = {node.name: node.keyed["sockets", "sockets"] for node in nodes}
        known = [len(series.latest) for series in sockets.values() if series.file is not None]
        iterations = join(follower.ranks)
        nics = tuple(row for node in nodes for row in _nics(node))
        moving = flows(sockets, {node.name: node.owners for node in nodes})
        self._note_loopback(moving)
        self._note_throughput(nodes, nics, live_ns)
        return Snapshot(
            now_ns,
            str(follower.path),
            status,
            why,
            ended,
            max(0.0, (end_ns - int(follower.info.get("created_ns") or end_ns)) / 1e9),
            sum(known) if known else None,
            iterations,
            tuple(_node(node, live_ns) for node in nodes),
            tuple(_ranks(follower.ranks, iterations, live_ns)),
            tuple(moving[:_MAX_FLOWS]),
            nics,
            tuple(row for node in nodes for row in _queues(node)),
            tuple(row for node in nodes for row in _host(node)),
            tuple(row for node in nodes for row in _processes(node)),
            tuple(row for node in nodes for row in gpus_of(node)),
            tuple(row for node in nodes for row in _collectors(node, live_ns)),
            tuple(Mark(mark["t_ns"], str(mark.get("text", ""))) for mark in follower.marks),
            _output(nodes),
            tuple(self._throughput),
            Diagnosis() if ended else self._diagnosis.look(),
            self._is_over_loopback,
        )

    def _note_loopback(self, moving: Iterable[LiveFlow]) -> None:
        ends = [(flow.source, flow.destination) for flow in moving if flow.traffic == TRAINING]
        if ends:
            self._is_over_loopback = all(a.rpartition(":")[0] == b.rpartition(":")[0] for a, b in ends)

    def _note_throughput(self, nodes: Iterable[NodeLog], nics: Iterable[Nic], now_ns: int | None) -> None:
        used = [nic for nic in nics if nic.name != "lo" or self._is_over_loopback]
        known = [nic for nic in used if nic.tx_bps is not None and nic.rx_bps is not None]
        names: dict[str, list[str]] = {}
        for nic in known:
            names.setdefault(nic.node, []).append(nic.name)
        facts = {node.name: node.facts for node in nodes}
        once = {(node, name) for node, own in names.items() for name in count_once(own, facts[node])}
        known = [nic for nic in known if (nic.node, nic.name) in once]
        if now_ns and known:
            sums = sum(nic.tx_bps or 0.0 for nic in known), sum(nic.rx_bps or 0.0 for nic in known)
            self._throughput.append(Throughput(now_ns, *sums))

    def _status(self, nodes: list[NodeLog], now_ns: int) -> tuple[str, str]:
        """Return the status and reason by run.json; a run still running there ends some seconds after its last node."""
        status, why = self._recorded_status(nodes, now_ns)
        if status != "complete":
            return status, why
        status, why = failed_job({node.name: node.node.item for node in nodes})
        if status == "complete" and (
            missing := missing_ranks((file.rank, file.world_size) for file in self._follower.ranks if file.launch[0])
        ):
            return "partial", missing
        return status, why

    def _recorded_status(self, nodes: list[NodeLog], now_ns: int) -> tuple[str, str]:
        info = self._follower.info
        status, why = str(info.get("status", "running")), str(info.get("why") or "")
        partial = [node for node in nodes if node.node.item.get("status") == "partial"]
        if status in ("running", "complete") and partial:
            why = why or f"{partial[0].name}: {partial[0].node.item.get('why') or 'partial'}"
            status = status if status == "running" else "partial"
        if status == "running" and self._sweep is not None:
            self._sweep.poll()
            if self._sweep.item.get("status", "running") != "running":
                return "partial", why or "its sweep has ended"
        if status == "running" and nodes and all(node.done for node in nodes):
            self._all_done_ns = self._all_done_ns or now_ns
            if now_ns - self._all_done_ns > _ALL_DONE_S * 1e9:
                return ("partial" if partial else "complete"), why
        else:
            self._all_done_ns = None
        return status, why


def _age_s(now_ns: int | None, t_ns: int) -> float | None:
    """Return the time since ``t_ns``, not below 0 although clocks may differ; None if either time is not known."""
    return max(0.0, (now_ns - t_ns) / 1e9) if now_ns and t_ns else None


def _output(nodes: list[NodeLog]) -> tuple[str, ...]:
    """Return the job's last lines of output; with several nodes each line begins with its node's name."""
    with_output = [node for node in nodes if node.output.lines]
    if len(with_output) == 1:
        return with_output[0].output.lines[-_MAX_OUTPUT:]
    share = _MAX_OUTPUT // max(1, len(with_output))
    return tuple(f"{node.name}: {line}" for node in with_output for line in node.output.lines[-share:])


def _node(node: NodeLog, now_ns: int | None) -> NodeState:
    known = [one for one in node.clock.item.get("measurements") or () if one.get("error_ns") is not None]
    best: dict[str, Any] = node.clock.item.get("fit") or min(known, key=lambda one: one["error_ns"], default={})
    offset, error = best.get("offset_ns"), best.get("error_ns")
    item = node.node.item
    status = "complete" if node.done else "running"
    return NodeState(
        node.name,
        str(item.get("status") or status),
        str(item.get("why") or ""),
        node.done,
        None if node.done else _age_s(now_ns, node.t_ns),
        None if offset is None else offset / 1e9,
        None if error is None else error / 1e9,
        *((item.get("disk") or {}).get(name) for name in ("bytes", "bytes_per_hour", "limit_bytes")),
    )


def _ranks(files: list[RankSteps], iterations: IterationStats, now_ns: int | None) -> Iterator[Rank]:
    last = iterations.history[-1].number if iterations.history else None
    newest = {file.rank: file for file in sorted(files, key=lambda file: file.generation) if file.ends and file.counts}
    ended = {rank: next((end.end_ns for end in file.ends if end.step == last), 0) for rank, file in newest.items()}
    first_ns = min([end for end in ended.values() if end], default=0)
    for rank in sorted(newest):
        file = newest[rank]
        yield Rank(
            file.node,
            rank,
            file.pid,
            file.ends[-1].step,
            _age_s(now_ns, file.last_end_ns),
            file.last_step_s,
            (ended[rank] - first_ns) / 1e9 if ended[rank] else None,
            *(file.passes.last.get(name) for name in ("forward_s", "backward_s", "comm_s", "overlap_s")),
        )


def _queues(node: NodeLog) -> Iterator[Queue]:
    series = node.keyed["qdisc", "qdisc"]
    if series.file is None:
        return
    names, kinds = series.file.about.get("interfaces") or {}, series.file.about.get("kinds") or {}
    for key in series.latest:
        interface, handle, parent = key
        rate = series.rate(key, "bytes")
        yield Queue(
            node.name,
            str(names.get(str(interface), interface)),
            str(kinds.get(f"{interface}:{handle}") or kinds.get(f"{interface}:{handle:x}") or "?"),
            f"{handle >> 16:x}:{handle & 0xFFFF or ''}" if handle else f"0: of {parent >> 16:x}:{parent & 0xFFFF:x}",
            None if rate is None else rate * 8,
            series.peak(key, "backlog_bytes") or 0.0,
            series.peak(key, "backlog_packets") or 0.0,
            series.rate(key, "drops"),
            series.total(key, "drops"),
            series.rate(key, "overlimits"),
        )


def _host(node: NodeLog) -> Iterator[Host]:
    log = node.wide.get(("host", "host"))
    if log is None:
        return
    cores = [name for name in log.file.index if name.startswith("cpu") and name.endswith(".busy_s")]
    cores.sort(key=lambda name: int(name[3 : name.index(".")]))
    total, available = log.value("memory.total_bytes"), log.value("memory.available_bytes")
    yield Host(
        node.name,
        tuple(min(1.0, log.rate(name) or 0.0) for name in cores),
        1 - available / total if total and available is not None else None,
        log.rate("tcp.segments_retransmitted"),
        log.total("tcp.segments_retransmitted"),
    )


def _processes(node: NodeLog) -> Iterator[ProcessState]:
    series = node.keyed["host", "processes"]
    if series.file is None:
        return
    alive_ns = series.mono_ns - round(max(3.0, 3 * float(series.file.about.get("every_s") or 0)) * 1e9)
    for pid, record in series.latest.items():
        if record[series.file.index["mono_ns"]] < alive_ns:
            continue
        about = node.owners.processes.get(int(pid), {})
        yield ProcessState(
            node.name,
            int(pid),
            node.owners.rank_of(about),
            series.rate(pid, "cpu_s"),
            series.value(pid, "rss_bytes") or 0.0,
            int(series.value(pid, "threads") or 0),
            str(about.get("command") or ""),
        )


def _collectors(node: NodeLog, now_ns: int | None) -> Iterator[CollectorState]:
    """Yield the state of each collector, by node.json and its logs."""
    entries: dict[str, dict[str, Any]] = node.node.item.get("collectors") or {}
    newest, every, missed = _from_logs(node)
    for name in [*entries, *(name for name in sorted(newest.keys() | node.failures.keys()) if name not in entries)]:
        item = entries.get(name) or {}
        state = str(item.get("state") or "running")
        # packets.json is written once a second, node.json when the collector ends
        source = node.packets.item if name == "packets" and node.packets.item else item
        losses = [int(source[key]) for key in _LOSSES if isinstance(source.get(key), int)]
        reported = item.get("missed_samples")
        counted = missed.get(name)
        known = [int(number) for number in (reported, counted) if number is not None and str(number).isdigit()]
        every_s = item.get("every_s") or every.get(name)
        age_s = None if node.done else _age_s(now_ns, newest.get(name, 0))
        health = _health(state, age_s, every_s)
        # Where only changes are written, silence is not a fault.
        health = "good" if health == "warning" and name in ("sockets", "steps", "qdisc") and state in _GOOD else health
        yield CollectorState(
            node.name,
            name,
            state,
            node.failures.get(name) or str(item.get("reason") or ""),
            every_s,
            max(known) if known else None,
            sum(losses) if losses else None,
            age_s,
            node.bytes.get(name, 0),
            "bad" if name in node.failures else health,
        )


def _health(state: str, age_s: float | None, every_s: float | None) -> Health:
    if state not in _GOOD:
        return "warning" if state in ("degraded", "unavailable") else "bad"
    return "warning" if age_s and age_s > max(_SILENT_S, _SILENT_PERIODS * (every_s or 0)) else "good"


def _from_logs(node: NodeLog) -> tuple[dict[str, int], dict[str, float], dict[str, int]]:
    """Return the newest sample, period and missed samples of each collector, from its logs."""
    newest: dict[str, int] = {}
    every: dict[str, float] = {}
    missed: dict[str, int] = {}
    for (name, _), wide in node.wide.items():
        newest[name] = max(newest.get(name, 0), wide.t_ns)
        missed[name] = max(missed.get(name, 0), wide.missed)
        every[name] = float(wide.file.about.get("every_s") or 0)
    for (name, _), keyed in node.keyed.items():
        if keyed.file is not None:
            newest[name] = max(newest.get(name, 0), keyed.t_ns)
            every.setdefault(name, float(keyed.file.about.get("every_s") or 0))
    for steps in node.ranks.values():
        newest["steps"] = max(newest.get("steps", 0), steps.last_end_ns)
    return newest, every, missed
