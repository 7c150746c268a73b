"""Defines the table pages of the live view: items, columns, order and colours. Independent of textual."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from ringtap.analysis.live.snapshot import Host, Nic, NodeState, Snapshot
from ringtap.core.units import format_duration, format_size

WARNING, BAD, DIM, HEADER = "yellow", "red", "dim", "bold"
_BLOCKS = "▁▂▃▄▅▆▇█"
_CORE_BLOCKS = 32
_FULL = 0.95
_MARKS = 5
_TRAFFIC_STYLE = {"training": "", "cross": "cyan", "other": DIM}
_MIN_WIDTH = 8
FAILED = ("partial", "failed")
_PERCENT, _TENTHS = "{:.0%}".format, "{:.1f}".format
_NO_HOST = Host("", (), None, None, None)


def gbps(bps: float) -> str:
    """Format a rate in Gbit/s, with about four digits."""
    value = bps / 1e9
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def count(value: float) -> str:
    """Format a number of things, or of things per second, in few characters."""
    if 0 < value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:.{1 if value < 100 * size else 0}f}{unit}"
    return f"{value:.0f}"


def milliseconds(seconds: float) -> str:
    """Format a short time in milliseconds, without the unit, which the column's head names."""
    value = seconds * 1e3
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def core_bars(shares: Sequence[float], most: int = _CORE_BLOCKS) -> str:
    """Draw each core's busy share as one block; if they do not fit, neighbours share a block and the busiest counts."""
    each = -(-len(shares) // most) or 1
    groups = [max(shares[start : start + each]) for start in range(0, len(shares), each)]
    return "".join(_BLOCKS[max(1, min(8, round(share * 8))) - 1] for share in groups)


@dataclass(frozen=True)
class Column:
    """A column of a table. A page lists its columns by importance: the last ones are left out if they do not fit.

    Attributes:
        title: its head, with the unit.
        value: field of an item, or function that returns the value; the rows are sorted by it.
        show: function that formats a value other than None, which is shown as ``-``; None for text, aligned left.
        share: share of the width that a text may take; longer texts are cut.
    """

    title: str
    value: str | Callable[[Any], Any]
    show: Callable[[Any], str] | None = None
    share: float = 0.2

    def of(self, item: Any) -> Any:
        """Return the value of an item."""
        return attrgetter(self.value)(item) if isinstance(self.value, str) else self.value(item)

    def text(self, item: Any) -> str:
        """Return the text of an item."""
        value = self.of(item)
        return "-" if value is None else str(value) if self.show is None else self.show(value)

    def key(self, item: Any) -> Any:
        """Return the value to sort by: of several values (cores) the largest, None without any."""
        value = self.of(item)
        return max(value, default=None) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Page:
    """A table page.

    Attributes:
        title: its name.
        items: function that returns the items of a snapshot, one per row.
        columns: its columns.
        style: function that returns the rich style of an item's row.
        sort: number of the initial sort column; None keeps the order of the items.
        descending: True for an initial order of largest first.
        collector: the collector that provides its data, named if the page is empty.
        nothing: sentence for an empty page without a collector.
        from_end: True if its last rows are shown first.
    """

    title: str
    items: Callable[[Snapshot], Iterable[Any]]
    columns: tuple[Column, ...]
    style: Callable[[Any, Snapshot], str] = lambda _item, _run: ""
    sort: int | None = None
    descending: bool = True
    collector: str = ""
    nothing: str = "Nothing yet."
    from_end: bool = False

    def select(self, run: Snapshot, words: str, column: int | None, descending: bool) -> list[Any]:
        """Return the items with every one of the words in some cell, in order; those without a value come last."""
        wanted, items = words.lower().split(), list(self.items(run))
        if wanted:
            texts = [" ".join(column.text(item) for column in self.columns).lower() for item in items]
            items = [item for item, text in zip(items, texts, strict=True) if all(word in text for word in wanted)]
        if column is None:
            return items
        keyed = [(self.columns[column].key(item), item) for item in items]
        known = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=descending)
        return [item for _, item in known] + [item for key, item in keyed if key is None]

    def reason(self, run: Snapshot, words: str) -> str:
        """Return the reason why there is nothing to show."""
        if words:
            return "Nothing matches the filter."
        states = [item for item in run.collectors if item.name == self.collector and item.health != "good"]
        if states:
            return f"{self.collector} on {states[0].node}: {states[0].state}. {states[0].reason}".strip()
        return f"Nothing yet ({self.collector})." if self.collector else self.nothing

    def lay_out(self, rows: list[list[str]], width: int, keep: int | None = None) -> list[list[str]]:
        """Cut and pad the texts of rows to columns of equal width, and leave out the columns that do not fit.

        Args:
            rows: rows of one text per column, the first with the heads.
            width: cells of a row.
            keep: number of a column that is never left out.
        """
        columns: dict[int, list[str]] = {}
        remaining = width
        for number in sorted(range(len(self.columns)), key=lambda number: number != keep):
            column, texts = self.columns[number], [row[number] for row in rows]
            column_width = max(cell_len(text) for text in texts)
            if column.show is None:
                column_width = min(column_width, max(_MIN_WIDTH, int(column.share * width)))
                column_width = remaining if _MIN_WIDTH <= remaining < column_width else column_width
            if column_width > remaining:
                break
            columns[number] = [cell(text, column_width, column.show is not None) for text in texts]
            remaining -= column_width + 1
        return [[columns[number][row] for number in sorted(columns)] for row in range(len(rows))]


def cell(text: str, width: int, right: bool = False) -> str:
    """Cut or pad a text to a width, and add a space between columns; an ellipsis marks a cut."""
    text = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
    space = " " * (width - cell_len(text))
    return f"{space}{text} " if right else f"{text}{space} "


def busiest(run: Snapshot) -> Snapshot:
    """Return a snapshot for the overview: the busiest interfaces first; queues with backlog or drops.

    Loopback is last, unless the training is over it.
    """
    nics = sorted(run.nics, key=lambda nic: (_is_aside(nic, run), -max(nic.tx_bps or 0, nic.rx_bps or 0)))
    queues = tuple(queue for queue in run.queues if queue.backlog_bytes or queue.drops_total)
    return dataclasses.replace(run, nics=tuple(nics), queues=queues)


def of_node(run: Snapshot, node: str) -> Snapshot:
    """Return the part of a snapshot for one node; all of it if ``node`` is empty. Iterations stay those of the job."""
    if not node:
        return run
    parts = ("nics", "queues", "hosts", "processes", "gpus", "collectors", "ranks")
    kept: dict[str, Any] = {name: tuple(item for item in getattr(run, name) if item.node == node) for name in parts}
    ends = [(flow.source.rpartition(":")[0], flow.destination.rpartition(":")[0]) for flow in run.flows]
    flows = tuple(flow for flow, hosts in zip(run.flows, ends, strict=True) if node in hosts)
    own = tuple(line for line in run.output if line.startswith(f"{node}: "))
    return dataclasses.replace(
        run,
        **kept,
        flows=flows if len(run.nodes) > 1 else run.flows,
        nodes=tuple(item for item in run.nodes if item.name == node),
        output=own or run.output,
    )


def _load(nic: Nic) -> float | None:
    rates = [rate for rate in (nic.tx_bps, nic.rx_bps) if rate is not None]
    return max(rates) / nic.speed_bps if rates and nic.speed_bps else None


def _is_aside(nic: Nic, run: Snapshot) -> bool:
    return nic.name == "lo" and not run.is_over_loopback


def _nic_style(nic: Nic, run: Snapshot) -> str:
    if nic.drops_per_s:
        return BAD
    return WARNING if (_load(nic) or 0) > _FULL else DIM if _is_aside(nic, run) else ""


class _NodeRow(NamedTuple):
    node: NodeState
    host: Host


def _nodes(run: Snapshot) -> Iterable[_NodeRow]:
    hosts = {host.node: host for host in run.hosts}
    return [_NodeRow(node, hosts.get(node.name, _NO_HOST)) for node in run.nodes]


def _busy(row: _NodeRow) -> float | None:
    return sum(row.host.cores) / len(row.host.cores) if row.host.cores else None


def _node_style(row: _NodeRow, _run: Snapshot) -> str:
    return BAD if row.node.status in FAILED else WARNING if (_busy(row) or 0) > _FULL else ""


def _log(run: Snapshot) -> Iterable[str]:
    clocks = [time.strftime("%H:%M:%S", time.localtime(mark.t_ns / 1e9)) for mark in run.marks[-_MARKS:]]
    return [*run.output, *(f"{clock} ▾ {mark.text}" for clock, mark in zip(clocks, run.marks[-_MARKS:], strict=True))]


def _columns(*columns: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in columns)


FLOWS = Page(
    "Flows", lambda run: run.flows, sort=3, collector="sockets",
    style=lambda flow, _: WARNING if flow.retransmissions_per_s else _TRAFFIC_STYLE[flow.traffic],
    columns=_columns(
        ("traffic", "traffic"), ("from", "source", None, 0.27), ("to", "destination", None, 0.27),
        ("Gbit/s", "rate_bps", gbps), ("retr/s", "retransmissions_per_s", count), ("RTT ms", "rtt_s", milliseconds),
        ("cwnd", "cwnd_segments", str), ("rank", "rank", str), ("delivery", "delivery_bps", gbps),
        ("unsent", "queued_bytes", format_size), ("command", "command", None, 0.5),
    ),
)  # fmt: skip
NICS = Page(
    "NICs", lambda run: run.nics, style=_nic_style, collector="nic",
    columns=_columns(
        ("node", "node"), ("interface", "name"), ("tx Gbit/s", "tx_bps", gbps), ("rx Gbit/s", "rx_bps", gbps),
        ("link", _load, _PERCENT), ("drops/s", "drops_per_s", count), ("drops", "drops_total", count),
        ("errors", "errors_total", count), ("tx pkt/s", "tx_packets_per_s", count),
        ("rx pkt/s", "rx_packets_per_s", count), ("pause/s", "pauses_per_s", count), ("ECN/s", "marks_per_s", count),
    ),
)  # fmt: skip
QUEUES = Page(
    "Queues", lambda run: run.queues, collector="qdisc",
    style=lambda queue, _: BAD if queue.drops_per_s else WARNING if queue.backlog_bytes else "",
    columns=_columns(
        ("node", "node"), ("interface", "interface"), ("kind", "kind"), ("Gbit/s", "rate_bps", gbps),
        ("backlog", "backlog_bytes", format_size), ("drops/s", "drops_per_s", count), ("drops", "drops_total", count),
        ("packets", "backlog_packets", count), ("handle", "handle"), ("overlim/s", "overlimits_per_s", count),
    ),
)  # fmt: skip
RANKS = Page(
    "Ranks", lambda run: run.ranks, sort=0, descending=False, collector="steps",
    style=lambda rank, run: WARNING if rank.rank in [cause["rank"] for cause in run.diagnosis.causes] else "",
    columns=_columns(
        ("rank", "rank", str), ("node", "node"), ("step", "step", str), ("step ms", "step_s", milliseconds),
        ("behind", "behind_s", milliseconds), ("forward", "forward_s", milliseconds),
        ("backward", "backward_s", milliseconds), ("comm", "comm_s", milliseconds),
        ("overlap", "overlap_s", milliseconds), ("age s", "age_s", _TENTHS), ("pid", "pid", str),
    ),
)  # fmt: skip
NODES = Page(
    "Nodes", _nodes, style=_node_style,
    columns=_columns(
        ("node", "node.name"), ("state", "node.status"), ("CPU", _busy, _PERCENT),
        ("mem", "host.memory_used_share", _PERCENT), ("retr/s", "host.retransmissions_per_s", count),
        ("retr", "host.retransmissions_total", count), ("age s", "node.age_s", _TENTHS),
        ("cores", "host.cores", core_bars), ("clock µs", "node.clock_offset_s", _microseconds),
        ("± µs", "node.clock_error_s", _microseconds), ("why", "node.why", None, 0.4),
    ),
)  # fmt: skip
PROCESSES = Page(
    "Procs", lambda run: run.processes, sort=3, collector="host",
    columns=_columns(
        ("node", "node"), ("pid", "pid", str), ("rank", "rank", str), ("CPU", "cpu_share", _PERCENT),
        ("memory", "rss_bytes", format_size), ("threads", "threads", str), ("command", "command", None, 0.5),
    ),
)  # fmt: skip
GPUS = Page(
    "GPUs", lambda run: run.gpus, collector="gpu",
    columns=_columns(
        ("node", "node"), ("GPU", "name"), ("busy", "utilization_share", _PERCENT),
        ("memory", "memory_used_bytes", format_size), ("W", "power_w", "{:.0f}".format),
        ("PCIe tx", "pcie_tx_bps", gbps), ("PCIe rx", "pcie_rx_bps", gbps),
        ("NVLink tx", "nvlink_tx_bps", gbps), ("NVLink rx", "nvlink_rx_bps", gbps),
    ),
)  # fmt: skip
COLLECTORS = Page(
    "State", lambda run: run.collectors,
    style=lambda item, _: BAD if item.health == "bad" else WARNING if item.lost or item.health == "warning" else "",
    columns=_columns(
        ("node", "node"), ("collector", "name"), ("state", "state"), ("missed", "missed", str), ("lost", "lost", str),
        ("age s", "age_s", _TENTHS), ("reason", "reason", None, 0.45),
        ("every", lambda item: item.every_s or None, format_duration), ("written", "bytes", format_size),
    ),
)  # fmt: skip
LOG = Page(
    "Log", _log, from_end=True, columns=_columns(("output of the job, and marks", str, None, 1.0)),
    nothing="The job's output goes to its own terminal (ringtap run --live keeps it here).",
)  # fmt: skip
TABLES = (FLOWS, NICS, QUEUES, RANKS, NODES, PROCESSES, GPUS, COLLECTORS, LOG)
OVERVIEW = (NICS, FLOWS, QUEUES, NODES)
