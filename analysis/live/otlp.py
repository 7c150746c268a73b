"""Sends metrics of a run that is being written to an OpenTelemetry Collector, by OTLP over HTTP.

The metrics are those that `ringtap.analysis.live.metrics` serves. Those that have a name in OpenTelemetry's semantic
conventions have this one; the names of the others are such that Prometheus, which may receive OTLP, has its usual ones.

``python -m ringtap.analysis.live.otlp RUN NODE URL PARENT`` is what ``ringtap run --metrics URL`` starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from prometheus_client.core import Metric

import ringtap
from ringtap.analysis.live.follow_run import lower_priority
from ringtap.analysis.live.metrics import FRESH_S, RunMetrics
from ringtap.core.errors import error_message
from ringtap.core.terminal_escaping import as_command, one_line

EVERY_S = 10.0
# OpenTelemetry's own variables
EVERY_MS_VARIABLE, HEADERS_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_HEADERS"
_TIMEOUT_S = 3.0
_TICK_S = 0.5
_MOST_SHOWN = 200
_PROTOBUF = "application/x-protobuf"
_CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By"}


class _Name(NamedTuple):
    """Name of a metric, its unit, and the attributes that it adds."""

    name: str
    unit: str
    attributes: Mapping[str, str] = {}


# of the semantic conventions
_CONVENTIONS = {
    "ringtap_nic_transmit_bytes": _Name("system.network.io", "By", {"network.io.direction": "transmit"}),
    "ringtap_nic_receive_bytes": _Name("system.network.io", "By", {"network.io.direction": "receive"}),
    "ringtap_nic_drops": _Name("system.network.packet.dropped", "{packet}"),
    "ringtap_exporter_cpu_seconds": _Name("process.cpu.time", "s"),
}
_ATTRIBUTES = {"nic": "network.interface.name"}


def request_of(families: Iterable[Metric], run: str, node: str, now_ns: int) -> ExportMetricsServiceRequest:
    """Return metrics as OTLP's request.

    Args:
        families: the metrics.
        run: name of the run.
        node: the node whose metrics these are; empty if they are of several.
        now_ns: time of the values.
    """
    resource = {"service.name": "ringtap", "service.version": ringtap.__version__, "service.instance.id": run}
    resource |= {"host.name": node} if node else {}
    metrics: dict[str, dict[str, Any]] = {}
    for family in families:
        for metric in _metrics(family, now_ns):
            known = metrics.setdefault(metric["name"], metric)
            if known is not metric:  # a convention has one name where Prometheus has two
                known["sum"]["dataPoints"] += metric["sum"]["dataPoints"]
    scope = {"scope": {"name": "ringtap", "version": ringtap.__version__}, "metrics": list(metrics.values())}
    own = {"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scope]}
    request = ExportMetricsServiceRequest()
    ParseDict({"resourceMetrics": [own]}, request)
    return request


def _metrics(family: Metric, now_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a metric; nothing if it has no sample."""
    name = _CONVENTIONS.get(family.name) or _name_of(family.name)
    points: dict[str, dict[str, Any]] = {}
    for sample in family.samples:
        labels = {_ATTRIBUTES.get(label, label): text for label, text in sample.labels.items() if text}
        quantile = labels.pop("quantile", None)
        about = _attributes({**labels, **name.attributes})
        point = points.setdefault(json.dumps(about), {"attributes": about, "timeUnixNano": now_ns})
        if family.type != "summary":
            point["asDouble"] = sample.value
        elif quantile is not None:
            point.setdefault("quantileValues", []).append({"quantile": float(quantile), "value": sample.value})
        elif sample.name.endswith("_count"):
            point["count"] = int(sample.value)
        else:
            point["sum"] = sample.value
    kind = {"counter": "sum", "gauge": "gauge", "summary": "summary"}[family.type]
    data: dict[str, Any] = {"dataPoints": list(points.values())}
    if kind == "sum":
        data |= {"aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
    if points:
        yield {"name": name.name, "description": family.documentation, "unit": name.unit, kind: data}


def _name_of(name: str) -> _Name:
    """Return the name without Prometheus' suffix for the unit, which it adds to that of OTLP."""
    first, _, rest = name.partition("_")
    stem, _, last = rest.rpartition("_")
    return _Name(f"{first}.{stem}", _UNITS[last]) if last in _UNITS else _Name(f"{first}.{rest}", "")


def _attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": text}} for name, text in values.items()]


class OtlpSender:
    """Sends a run's metrics again and again.

    Args:
        metrics: the collector of the metrics.
        run: the run directory.
        node: the only node whose metrics these are; empty: all.
        url: the address to which they are sent, with a path.
    """

    def __init__(self, metrics: RunMetrics, run: Path, node: str, url: str) -> None:
        self._metrics, self._run, self._node, self._url = metrics, run, node, url
        self._headers = {"Content-Type": _PROTOBUF, "User-Agent": f"ringtap/{ringtap.__version__}"}
        for pair in filter(None, os.environ.get(HEADERS_VARIABLE, "").split(",")):
            name, _, value = pair.partition("=")
            self._headers[unquote(name.strip())] = unquote(value.strip())
        text = os.environ.get(EVERY_MS_VARIABLE, "")
        self.every_s = int(text) / 1e3 if text.isascii() and text.isdigit() and int(text) > 0 else EVERY_S
        self._why = ""

    def send(self) -> None:
        """Send the metrics once; a failure is printed unless the one before had the same reason."""
        why = self._send()
        if why and why != self._why:
            text = f"ringtap: metrics are not taken by {self._url}: {why}; the next ones are sent all the same"
            with contextlib.suppress(OSError):  # a closed terminal is ignored
                print(text, file=sys.stderr, flush=True)
        self._why = why

    def send_until(self, is_over: Callable[[], bool]) -> None:
        """Send until something is over, and once more then."""
        due_s = 0.0
        while not is_over():
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self.every_s
                self.send()
            time.sleep(_TICK_S)
        time.sleep(FRESH_S)  # the records are read no sooner again
        self.send()

    def _send(self) -> str:
        """Return why the metrics were not taken; empty if they were."""
        try:
            request = request_of(self._metrics.collect(), self._run.name, self._node, time.time_ns())
            message = urllib.request.Request(self._url, request.SerializeToString(), self._headers)
            with urllib.request.urlopen(message, timeout=_TIMEOUT_S) as answer:
                answered = answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            with error:
                is_text = error.headers.get_content_maintype() == "text"
                text = one_line(error.read(_MOST_SHOWN).decode(errors="replace").strip()) if is_text else ""
            return f"HTTP {error.code} {error.reason}{f', {text}' if text else ''}"
        except Exception as error:  # such as a run directory that is being deleted
            reason = getattr(error, "reason", None)
            return error_message(reason if isinstance(reason, Exception) else error)
        return _rejected(answered)


def _rejected(answered: bytes) -> str:
    """Return how many values a Collector rejected, and why; empty if none."""
    try:
        rejected = ExportMetricsServiceResponse.FromString(answered).partial_success
    except DecodeError:  # an answer in another format says that they were taken
        return ""
    count, about = rejected.rejected_data_points, one_line(rejected.error_message)[:_MOST_SHOWN]
    return f"{count} values are rejected{f', {about}' if about else ''}" if count else ""


def main() -> int:
    """Send a node's metrics until the parent process has ended, or asks for the end."""
    run, node, url, parent = sys.argv[1:]
    lower_priority()
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    sender = OtlpSender(RunMetrics(Path(run), node), Path(run), node, url)
    sender.send_until(lambda: end.is_set() or os.getppid() != int(parent))
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
