"""Table pages of the live view: their columns, and the rows that they take from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ringtap.analysis.live import drawing
from ringtap.analysis.live.drawing import BAD, DIM, WARNING, Column, TextRow, count, gbps, milliseconds, percent
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.units import format_duration, format_size

_TRAFFIC_STYLE = {"training": "", "cross": "cyan", "other": DIM}
_HEALTH_STYLE = {"good": "", "warning": WARNING, "bad": BAD}
_FULL = 0.95


@dataclass(frozen=True)
class Page:
    """A page of the view.

    Attributes:
        title: its name in the bar.
        columns: its columns.
        rows: function that returns the rows of a snapshot.
        sort: number of the initial sort column, None for the order given.
        descending: True for an initial order of largest first.
        collector: the collector that provides its data, named if the page is empty.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Callable[[Snapshot], Iterable[TextRow]]
    sort: int | None = None
    descending: bool = True
    collector: str = ""

    def empty(self, snapshot: Snapshot) -> str:
        """Return the reason why there is nothing to show."""
        told = [item for item in snapshot.collectors if item.name == self.collector and item.health != "good"]
        if told:
            return f"{self.collector} on {told[0].node}: {told[0].state}. {told[0].reason}".strip()
        return f"Nothing yet ({self.collector})." if self.collector else "Nothing yet."


def _row(node: str, pairs: Iterable[tuple[str, Any]], style: str = "") -> TextRow:
    cells, keys = zip(*pairs, strict=True)
    return TextRow(node, cells, keys, style)


def _of(value: Any, show: Callable[[Any], str]) -> tuple[str, Any]:
    return show(value), value


def _text(value: str) -> tuple[str, Any]:
    return value, value


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(value)


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _flows(snapshot: Snapshot) -> Iterable[TextRow]:
    for flow in snapshot.flows:
        lossy = bool(flow.retransmissions_per_s)
        yield _row(
            "",
            (
                _text(flow.traffic),
                _text(flow.source),
                _text(flow.destination),
                _of(flow.rate_bps, gbps),
                _of(flow.retransmissions_per_s, count),
                _of(flow.rtt_s, milliseconds),
                _of(flow.cwnd_segments, drawing.number),
                _of(flow.delivery_bps, gbps),
                _of(flow.queued_bytes, _size),
                _of(flow.rank, drawing.number),
                _text(flow.command),
            ),
            WARNING if lossy else _TRAFFIC_STYLE[flow.traffic],
        )


def _nics(snapshot: Snapshot) -> Iterable[TextRow]:
    for nic in snapshot.nics:
        rates = [rate for rate in (nic.tx_bps, nic.rx_bps) if rate is not None]
        load = max(rates) / nic.speed_bps if rates and nic.speed_bps else None
        style = BAD if nic.drops_per_s else WARNING if load and load > _FULL else DIM if nic.name == "lo" else ""
        yield _row(
            nic.node,
            (
                _text(nic.node),
                _text(nic.name),
                _of(nic.tx_bps, gbps),
                _of(nic.rx_bps, gbps),
                _of(load, percent),
                _of(nic.drops_per_s, count),
                _of(nic.drops_total, count),
                _of(nic.errors_total, count),
                _of(nic.tx_packets_per_s, count),
                _of(nic.rx_packets_per_s, count),
                _of(nic.pauses_per_s, count),
                _of(nic.marks_per_s, count),
            ),
            style,
        )


def _queues(snapshot: Snapshot) -> Iterable[TextRow]:
    for queue in snapshot.queues:
        yield _row(
            queue.node,
            (
                _text(queue.node),
                _text(queue.interface),
                _text(queue.kind),
                _text(queue.handle),
                _of(queue.rate_bps, gbps),
                _of(queue.backlog_bytes, _size),
                _of(queue.backlog_packets, count),
                _of(queue.drops_per_s, count),
                _of(queue.drops_total, count),
                _of(queue.overlimits_per_s, count),
            ),
            BAD if queue.drops_per_s else WARNING if queue.backlog_bytes else "",
        )


def _ranks(snapshot: Snapshot) -> Iterable[TextRow]:
    slowest = snapshot.iterations.slowest_rank
    for rank in snapshot.ranks:
        yield _row(
            rank.node,
            (
                _of(rank.rank, str),
                _text(rank.node),
                _of(rank.step, str),
                _of(rank.step_s, milliseconds),
                _of(rank.behind_s, milliseconds),
                _of(rank.forward_s, milliseconds),
                _of(rank.backward_s, milliseconds),
                _of(rank.comm_s, milliseconds),
                _of(rank.overlap_s, milliseconds),
                _of(rank.age_s, lambda age: "-" if age is None else f"{age:.1f}"),
                _of(rank.pid, str),
            ),
            WARNING if rank.rank == slowest else "",
        )


def _nodes(snapshot: Snapshot) -> Iterable[TextRow]:
    hosts = {host.node: host for host in snapshot.hosts}
    for node in snapshot.nodes:
        host = hosts.get(node.name)
        cores = host.cores if host else ()
        mean = sum(cores) / len(cores) if cores else None
        yield _row(
            node.name,
            (
                _text(node.name),
                _text(node.status),
                _of(mean, percent),
                (drawing.core_bars(cores, 32), max(cores, default=None)),
                _of(host.memory_used_share if host else None, percent),
                _of(host.retransmissions_per_s if host else None, count),
                _of(host.retransmissions_total if host else None, count),
                _of(node.age_s, lambda age: "-" if age is None else f"{age:.1f}"),
                _of(node.clock_offset_s, _microseconds),
                _of(node.clock_error_s, _microseconds),
                _text(node.why),
            ),
            BAD if node.status in ("partial", "failed") else WARNING if mean and mean > _FULL else "",
        )


def _processes(snapshot: Snapshot) -> Iterable[TextRow]:
    for process in snapshot.processes:
        yield _row(
            process.node,
            (
                _text(process.node),
                _of(process.pid, str),
                _of(process.rank, drawing.number),
                _of(process.cpu_share, percent),
                _of(process.rss_bytes, format_size),
                _of(process.threads, str),
                _text(process.command),
            ),
        )


def _gpus(snapshot: Snapshot) -> Iterable[TextRow]:
    for gpu in snapshot.gpus:
        yield _row(
            gpu.node,
            (
                _text(gpu.node),
                _text(gpu.name),
                _of(gpu.utilization_share, percent),
                _of(gpu.memory_used_bytes, _size),
                _of(gpu.power_w, lambda power: "-" if power is None else f"{power:.0f}"),
                _of(gpu.pcie_tx_bps, gbps),
                _of(gpu.pcie_rx_bps, gbps),
                _of(gpu.nvlink_tx_bps, gbps),
                _of(gpu.nvlink_rx_bps, gbps),
            ),
        )


def _collectors(snapshot: Snapshot) -> Iterable[TextRow]:
    for item in snapshot.collectors:
        yield _row(
            item.node,
            (
                _text(item.node),
                _text(item.name),
                _text(item.state),
                _of(item.every_s, lambda every: format_duration(every) if every else "-"),
                _of(item.missed, drawing.number),
                _of(item.lost, drawing.number),
                _of(item.age_s, lambda age: "-" if age is None else f"{age:.1f}"),
                _of(item.bytes, format_size),
                _text(item.reason),
            ),
            WARNING if item.lost and item.health == "good" else _HEALTH_STYLE[item.health],
        )


FLOWS = Page(
    "Flows",
    (
        Column("traffic"),
        Column("from", least=15),
        Column("to", least=15),
        Column("Gbit/s", True),
        Column("retr/s", True),
        Column("RTT ms", True),
        Column("cwnd", True, 1),
        Column("delivery", True, 3),
        Column("unsent", True, 4),
        Column("rank", True, 2),
        Column("command", least=8, rank=5),
    ),
    _flows,
    3,
    collector="sockets",
)
NICS = Page(
    "NICs",
    (
        Column("node", least=4),
        Column("interface", least=6),
        Column("tx Gbit/s", True),
        Column("rx Gbit/s", True),
        Column("link", True),
        Column("drops/s", True),
        Column("drops", True),
        Column("errors", True),
        Column("tx pkt/s", True, 1),
        Column("rx pkt/s", True, 1),
        Column("pause/s", True, 2),
        Column("ECN/s", True, 3),
    ),
    _nics,
    collector="nic",
)
QUEUES = Page(
    "Queues",
    (
        Column("node", least=4),
        Column("interface", least=6),
        Column("kind", least=5),
        Column("handle", rank=2),
        Column("Gbit/s", True),
        Column("backlog", True),
        Column("packets", True, 1),
        Column("drops/s", True),
        Column("drops", True),
        Column("overlim/s", True, 3),
    ),
    _queues,
    collector="qdisc",
)
RANKS = Page(
    "Ranks",
    (
        Column("rank", True),
        Column("node", least=4),
        Column("step", True),
        Column("step ms", True),
        Column("behind", True),
        Column("forward", True),
        Column("backward", True),
        Column("comm", True),
        Column("overlap", True),
        Column("age s", True, 2),
        Column("pid", True, 3),
    ),
    _ranks,
    0,
    False,
    collector="steps",
)
NODES = Page(
    "Nodes",
    (
        Column("node", least=4),
        Column("state"),
        Column("CPU", True),
        Column("cores", least=8),
        Column("mem", True),
        Column("retr/s", True),
        Column("retr", True),
        Column("age s", True),
        Column("clock µs", True, 2),
        Column("± µs", True, 2),
        Column("why", least=6, rank=3),
    ),
    _nodes,
)
PROCESSES = Page(
    "Procs",
    (
        Column("node", least=4),
        Column("pid", True),
        Column("rank", True),
        Column("CPU", True),
        Column("memory", True),
        Column("threads", True, 1),
        Column("command", least=10),
    ),
    _processes,
    3,
    collector="host",
)
GPUS = Page(
    "GPUs",
    (
        Column("node", least=4),
        Column("GPU", least=6),
        Column("busy", True),
        Column("memory", True),
        Column("W", True),
        Column("PCIe tx", True),
        Column("PCIe rx", True),
        Column("NVLink tx", True, 1),
        Column("NVLink rx", True, 1),
    ),
    _gpus,
    collector="gpu",
)
COLLECTORS = Page(
    "State",
    (
        Column("node", least=4),
        Column("collector"),
        Column("state"),
        Column("every", True, 1),
        Column("missed", True),
        Column("lost", True),
        Column("age s", True),
        Column("written", True, 2),
        Column("reason", least=34),
    ),
    _collectors,
)
