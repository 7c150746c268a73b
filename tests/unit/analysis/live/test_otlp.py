"""Metrics sent by OTLP: what a Collector parses equals what Prometheus scrapes; failures are told, and end nothing."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.semconv._incubating.attributes import network_attributes
from opentelemetry.semconv._incubating.metrics import process_metrics, system_metrics
from opentelemetry.semconv.attributes import service_attributes

import ringtap
from ringtap.analysis.live import otlp
from ringtap.analysis.live.metrics import RunMetrics
from ringtap.cli import main
from ringtap.core.http_listen_address import listener_or_url
from tests.unit.agent_processes import RINGTAP, ended, gone
from tests.unit.live_run import RunWriter, second_of_training

pytestmark = pytest.mark.shares

Values = dict[tuple[str, frozenset[tuple[str, str]]], Any]
REJECTED = ExportMetricsServiceResponse(
    partial_success=ExportMetricsPartialSuccess(rejected_data_points=3, error_message="too\nold")
)
OF_RANK = frozenset({("node", "S0"), ("rank", "0")})


def values_of(body: bytes) -> Values:
    """Return the values of a request by name and attributes."""
    request = ExportMetricsServiceRequest.FromString(body)
    found: Values = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        assert metric.description
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            assert point.time_unix_nano > 1e18
            labels = frozenset((one.key, one.value.string_value) for one in point.attributes)
            assert (metric.name, labels) not in found
            found[metric.name, labels] = point
    return found


def resource_of(body: bytes) -> dict[str, str]:
    request = ExportMetricsServiceRequest.FromString(body)
    return {one.key: one.value.string_value for one in request.resource_metrics[0].resource.attributes}


@contextmanager
def collector(status: int = 200, answer: bytes = b"") -> Iterator[tuple[str, list[tuple[str, Any, bytes]]]]:
    """A server that takes OTLP: its address, and the paths, headers and bodies that came."""
    taken: list[tuple[str, Any, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append((self.path, self.headers, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("Content-Type", "text/plain" if status != 200 else "application/x-protobuf")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def request_of(path: Path, node: str = "") -> bytes:
    families = RunMetrics(path, node).collect()
    return otlp.request_of(families, path.name, node, 1_800_000_000 * 10**9).SerializeToString()


def test_values_are_those_of_the_records_under_the_names_of_the_conventions(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        for second in range(1, 6):
            second_of_training(run, second)
        found, of_one = values_of(request_of(run.path)), request_of(run.path, "S1")
    times = found["ringtap.iteration", OF_RANK]
    assert (times.count, times.sum) == (19, pytest.approx(19 * 0.25))
    assert [(one.quantile, one.value) for one in times.quantile_values] == [(0.5, 0.25), (0.99, pytest.approx(0.25))]
    nic = {("node", "S0"), (network_attributes.NETWORK_INTERFACE_NAME, "eth0")}
    sent, received = (
        found[system_metrics.SYSTEM_NETWORK_IO, frozenset(nic | {(network_attributes.NETWORK_IO_DIRECTION, way)})]
        for way in ("transmit", "receive")
    )
    scraped = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in RunMetrics(run.path).collect()
        for sample in family.samples
    }
    nic_labels = frozenset({("node", "S0"), ("nic", "eth0")})
    assert sent.as_double == scraped["ringtap_nic_transmit_bytes_total", nic_labels] > 0
    assert received.as_double == scraped["ringtap_nic_receive_bytes_total", nic_labels]
    assert (process_metrics.PROCESS_CPU_TIME, frozenset()) in found
    again = found["ringtap.tcp_retransmitted_segments", frozenset({("node", "S0")})]
    assert again.as_double == scraped["ringtap_tcp_retransmitted_segments_total", frozenset({("node", "S0")})]
    # as many values as Prometheus has; those of a summary are one here
    in_summaries = [name for name, _ in scraped if name.startswith("ringtap_iteration_seconds")]
    assert len(found) == len(scraped) - len(in_summaries) + 2
    assert resource_of(of_one) == {
        service_attributes.SERVICE_NAME: "ringtap",
        service_attributes.SERVICE_VERSION: ringtap.__version__,
        "service.instance.id": "run",
        "host.name": "S1",
    }
    assert {dict(labels).get("node", "S1") for _, labels in values_of(of_one)} == {"S1"}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("ringtap_exposed_communication_seconds", "s"),
        ("ringtap_training_traffic_transmit_bytes", "By"),
        ("ringtap_cross_traffic_retransmitted_segments", ""),
        ("ringtap_cause_seconds", "s"),
        ("ringtap_causes_known", ""),
    ],
)
def test_prometheus_makes_its_usual_names_of_the_others(name: str, unit: str) -> None:
    found = otlp._name_of(name)
    suffix = {"s": "_seconds", "By": "_bytes", "": ""}[unit]
    assert (found.name.replace(".", "_") + suffix, found.unit) == (name, unit)
    assert found.name.startswith("ringtap.")


def test_a_run_is_sent_until_it_ends_with_its_last_iterations(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = "import ringtap, time\nfor _ in range(30):\n    ringtap.step()\n    time.sleep(0.02)"
    with collector() as (url, taken):
        options = ("-o", str(run), "--node", "here", "--collect", "nic,steps", "--metrics", url)
        command = [*RINGTAP, "run", *options, "--", sys.executable, "-c", job]
        variables = {otlp.HEADERS_VARIABLE: "authorization=Bearer%20x, tenant=lab", otlp.EVERY_MS_VARIABLE: "300"}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=os.environ | variables, timeout=120
        )
        assert done.returncode == 0
        assert f"ringtap: metrics to {url}/v1/metrics\n" in done.stderr
        gone(run)
        path, headers, body = taken[-1]
        assert len(taken) > 1
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/x-protobuf"
    assert (headers["Authorization"], headers["Tenant"]) == ("Bearer x", "lab")
    steps = ringtap.open_job(run).rank_iterations["iteration_s"].dropna()
    times = values_of(body)["ringtap.iteration", frozenset({("node", "here"), ("rank", "0")})]
    assert (times.count, times.sum) == (29, pytest.approx(steps.sum(), rel=1e-9))


def test_live_sends_those_of_all_nodes_until_the_run_ends(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run, collector() as (url, taken):
        second_of_training(run, 1)
        command = [*RINGTAP, "live", str(run.path), "--metrics", f"{url}/other/path"]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
            assert process.stdout and process.stdout.readline() == f"Metrics to {url}/other/path every 10 s\n"
            run.finish()
            assert process.wait(60) == 0
            assert process.stderr and "The run has ended. Next: ringtap analyze" in process.stderr.read()
    assert {path for path, *_ in taken} == {"/other/path"}
    nodes = {dict(labels).get("node") for _, labels in values_of(taken[-1][-1])}
    assert {"S0", "S1"} <= nodes


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (200, b"", ""),
        (200, b"{}", ""),
        (200, b"\xff\xff not protobuf", ""),
        (200, ExportMetricsServiceResponse().SerializeToString(), ""),
        (200, REJECTED.SerializeToString(), "3 values are rejected, too\\nold"),
        (401, b"no token\n", "HTTP 401 Unauthorized, no token"),
        (503, b"", "HTTP 503 Service Unavailable"),
    ],
)
def test_what_a_collector_refuses_is_told_once(
    tmp_path: Path, status: int, answer: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path / "run", "S0") as run, collector(status, answer) as (url, taken):
        second_of_training(run, 1)
        sender = otlp.OtlpSender(RunMetrics(run.path), run.path, "", url)
        sender.send()
        sender.send()
    assert len(taken) == 2
    lines = [f"ringtap: metrics are not taken by {url}: {why}; the next ones are sent all the same"] if why else []
    assert capsys.readouterr().err.splitlines() == lines


def test_a_collector_that_is_not_there_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    with collector() as (url, _):
        pass
    run = tmp_path / "run"
    command = [*RINGTAP, "run", "-o", str(run), "--collect", "nic", "--metrics", url, "--", "sleep", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    gone(run)
    assert done.returncode == 0
    assert done.stderr.count(f"metrics are not taken by {url}/v1/metrics: Connection refused; the next") == 1


@pytest.mark.parametrize(
    "address",
    ["http://", "http://:4318", "http://localhost:x", "https://[::1", "http://a b:1", "http://me:secret@host"],
)
def test_wrong_addresses_are_refused_before_the_job(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-o", str(tmp_path / "run"), "--metrics", address, "--", "touch", str(tmp_path / "began")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a Collector has an address such as http://localhost:4318" in said
    assert not list(tmp_path.iterdir())


def test_addresses() -> None:
    for address, url in (
        ("http://localhost:4318", "http://localhost:4318/v1/metrics"),
        ("https://otel.example/", "https://otel.example/v1/metrics"),
        ("http://[::1]:9090/api/v1/otlp/v1/metrics", "http://[::1]:9090/api/v1/otlp/v1/metrics"),
    ):
        assert listener_or_url(address, False) == url
