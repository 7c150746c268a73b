"""Serves metrics of a run that is being written, in Prometheus' formats. Only this module needs prometheus-client.

Names follow Prometheus' convention: base units, ``_total`` for counters. Labels are ``node``, ``rank``, ``nic`` and
``cause``, so that the number of series is bounded by the job. A number that was not recorded has no sample. Records are
read when somebody asks, so that metrics that nobody reads cost nothing.

``python -m ringtap.analysis.live.metrics RUN NODE DESCRIPTOR PARENT`` is what ``ringtap run --metrics`` starts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST, generate_latest

from ringtap.analysis.live.bounded_http_server import TEXT, ListeningHttpServer, QuietHandler
from ringtap.analysis.live.build_snapshot import PORT_DROPS, nic_logs, port_logs, sum_known
from ringtap.analysis.live.follow_run import NodeLog, RunFollower, lower_priority
from ringtap.analysis.live.iterations import MAX_KEPT, RankSteps, quantile
from ringtap.analysis.live.recent_counters import RecentWideLog
from ringtap.analysis.live.repeated_diagnosis import RepeatedDiagnosis
from ringtap.analysis.live.snapshot import Diagnosis
from ringtap.analysis.runs.growing_files import Document
from ringtap.core.errors import error_message
from ringtap.core.http_listen_address import METRICS_PATH
from ringtap.core.run_directory_schema import RUN, RUN_JSON

QUANTILES = (0.5, 0.99)
_MAX_NICS = 64
FRESH_S = 0.5  # however many read them, records are read twice a second at most

# part of the name, help, and the attribute of a rank's `PassTimes`
_RANK_COUNTERS = (
    ("communication", "DDP: from the first to the last collective of an iteration", "communication_s"),
    ("exposed_communication", "DDP: communication after the last gradient was ready", "exposed_s"),
)
# name, help, column of an interface's counters, counters of an RDMA port
_NIC_COUNTERS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("ringtap_nic_transmit_bytes", "Bytes sent", ("tx_bytes",), ("port_xmit_data",)),
    ("ringtap_nic_receive_bytes", "Bytes received", ("rx_bytes",), ("port_rcv_data",)),
    ("ringtap_nic_drops", "Packets dropped in sending and receiving", ("tx_drops", "rx_drops"), PORT_DROPS),
)
_TRAFFIC: dict[str, str] = {"training": "training traffic", "cross": "cross traffic"}
_SOCKET_COUNTERS = (
    ("transmit_bytes", "Payload that sockets of {} sent", "sent_bytes"),
    ("receive_bytes", "Payload that sockets of {} received", "received_bytes"),
    ("retransmitted_segments", "TCP segments that sockets of {} sent again", "retransmissions"),
)


class RunMetrics:
    """Collector of a run's metrics, as prometheus-client wants it.

    Args:
        path: the run directory.
        node: the only node to read; all if empty.
    """

    def __init__(self, path: Path, node: str = "") -> None:
        self._follower = RunFollower(path, node, is_metered=True)
        self._diagnosis = None if node else RepeatedDiagnosis(self._follower)
        self._run = Document(path / RUN_JSON, RUN)
        self._polled_s = float("-inf")
        self._lock = threading.Lock()

    def is_running(self) -> bool:
        """Return True unless run.json says that the run has ended."""
        self._run.poll()
        return str(self._run.item.get("status", "running")) == "running"

    def collect(self) -> Iterator[Metric]:
        """Read what was added to the logs, and yield the metrics."""
        with self._lock:
            if time.monotonic() - self._polled_s >= FRESH_S:
                self._follower.poll()
                self._polled_s = time.monotonic()
            nodes = [self._follower.nodes[name] for name in sorted(self._follower.nodes)]
            families = [*_of_ranks(self._follower.ranks), *_of_nics(nodes), *_of_nodes(nodes)]
            if self._diagnosis is not None:
                families += _of_diagnosis(self._diagnosis.look())
        yield from families
        cpu = CounterMetricFamily("ringtap_exporter_cpu_seconds", "Processor time of this exporter")
        cpu.add_metric([], time.process_time())
        yield cpu


def _of_ranks(files: list[RankSteps]) -> Iterator[Metric]:
    """Yield the metrics of the newest process of each rank."""
    newest = {(file.node, file.rank): file for file in sorted(files, key=lambda file: file.generation) if file.counts}
    times = Metric(
        "ringtap_iteration_seconds",
        f"Time between the ends of a rank's optimizer steps; quantiles are of the last {MAX_KEPT}",
        "summary",
        "seconds",
    )
    for (node, rank), steps in sorted(newest.items()):
        labels = {"node": node, "rank": str(rank)}
        ordered = sorted(steps.steps_s)
        for share in QUANTILES if ordered else ():
            times.add_sample(times.name, labels | {"quantile": str(share)}, quantile(ordered, share))
        times.add_sample(f"{times.name}_count", labels, steps.timed_steps)
        times.add_sample(f"{times.name}_sum", labels, steps.timed_s)
    yield times
    for what, about, name in _RANK_COUNTERS:
        family = CounterMetricFamily(f"ringtap_{what}_seconds", about, labels=("node", "rank"))
        for (node, rank), steps in sorted(newest.items()):
            _add(family, [node, str(rank)], getattr(steps.passes, name))
        yield family


def _of_nics(nodes: list[NodeLog]) -> Iterator[Metric]:
    """Yield the counters of interfaces and RDMA ports as the kernel and the driver count them."""
    logs = [(node.name, list(nic_logs(node).items())[:_MAX_NICS], port_logs(node)) for node in nodes]
    for name, about, columns, port_columns in _NIC_COUNTERS:
        family = CounterMetricFamily(name, about, labels=("node", "nic"))
        for node, nics, ports in logs:
            for nic, log in nics:
                _add(family, [node, nic], _sum(log, [f"{nic}.{column}" for column in columns]))
            for port, log in ports.items():
                _add(family, [node, port], _sum(log, port_columns))
        yield family


def _of_nodes(nodes: list[NodeLog]) -> Iterator[Metric]:
    """Yield the totals over each node's sockets, TCP's retransmissions, and the time of the newest record."""
    totals = {node.name: node.totals.by_traffic() for node in nodes if node.totals}
    for traffic, words in _TRAFFIC.items():
        for suffix, about, name in _SOCKET_COUNTERS:
            family = CounterMetricFamily(
                f"ringtap_{words.replace(' ', '_')}_{suffix}", about.format(words), labels=["node"]
            )
            for node_name, by_traffic in totals.items():
                _add(family, [node_name], getattr(by_traffic.get(traffic), name, None))
            yield family
    again = CounterMetricFamily(
        "ringtap_tcp_retransmitted_segments", "TCP segments that the node sent again", labels=["node"]
    )
    newest = GaugeMetricFamily("ringtap_newest_record_timestamp_seconds", "Time of the newest record", labels=["node"])
    for node in nodes:
        host = node.wide.get(("host", "host"))
        _add(again, [node.name], host.value("tcp.segments_retransmitted") if host else None)
        _add(newest, [node.name], node.t_ns / 1e9 or None)
    yield again
    yield newest


def _of_diagnosis(diagnosis: Diagnosis) -> Iterator[Metric]:
    """Yield whether the causes are known, and what each of those that go on costs."""
    if not diagnosis.lines:
        return
    about = "1 if the records tell what slows an iteration"
    yield GaugeMetricFamily("ringtap_causes_known", about, value=diagnosis.is_known)
    names = ("cause", "node", "rank", "nic")
    cost = GaugeMetricFamily("ringtap_cause_seconds", "Seconds of an iteration that a cause costs now", labels=names)
    for cause in diagnosis.causes:
        where = ("" if cause[name] is None else str(cause[name]) for name in names[1:])
        cost.add_metric([cause["name"], *where], cause["seconds"])
    yield cost


def _add(family: Any, labels: list[str], value: float | None) -> None:
    """Add a sample, unless its value is not known."""
    if value is not None:
        family.add_metric(labels, value)


def _sum(log: RecentWideLog, columns: Iterable[str]) -> float | None:
    """Return the sum of the known counters; None if none is known."""
    return sum_known(
        None if (value := log.value(column)) is None else value * log.file.column(column).octets for column in columns
    )


class MetricsHttpServer(ListeningHttpServer):
    """HTTP server of a run's metrics.

    Args:
        metrics: the collector.
        listener: the listening socket.
    """

    def __init__(self, metrics: RunMetrics, listener: socket.socket) -> None:
        super().__init__(listener, _Handler)
        self.registry = CollectorRegistry()
        self.registry.register(metrics)


class _Handler(QuietHandler):
    server: MetricsHttpServer

    def do_GET(self) -> None:  # noqa: N802
        """Answer with the metrics, in the format that the client asks for."""
        if self.path.partition("?")[0] != METRICS_PATH:
            self.answer(404, TEXT, f"The metrics are at {METRICS_PATH}\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        if content_type.startswith("application/openmetrics-text"):
            # the names hold nothing to escape, so they need not be checked letter by letter at each scrape
            encode, content_type = partial(generate_latest, escaping=ALLOWUTF8), CONTENT_TYPE_LATEST
        try:
            body = encode(self.server.registry)
        except Exception as error:  # such as a run directory that is being deleted
            self.answer(500, TEXT, f"The records cannot be read: {error_message(error)}\n".encode())
        else:
            self.answer(200, content_type, body)


def main(run: str, node: str, descriptor: str, parent: str) -> None:
    """Serve a node's metrics on a socket that listens already, until the parent process has ended."""
    lower_priority()
    server = MetricsHttpServer(RunMetrics(Path(run), node), socket.socket(fileno=int(descriptor)))
    server.serve_while(lambda: os.getppid() == int(parent))


if __name__ == "__main__":
    main(*sys.argv[1:])
