"""Metrics of a run: values, names, labels; at any pace of looking; addresses; the process that serves them."""

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pandas as pd
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import ringtap
from ringtap.agents.hook.ringtap_hook import settings as hook_settings
from ringtap.agents.job import environment
from ringtap.analysis.job import iterations_of_ranks
from ringtap.analysis.live.flows import Owners, SocketTotals
from ringtap.analysis.live.iterations import PassTimes
from ringtap.analysis.live.metrics import MetricsHttpServer, RunMetrics
from ringtap.cli import main
from ringtap.core import http_listen_address
from ringtap.core.append_only_logs import Field, RecordFile
from ringtap.core.errors import UsageError
from tests.unit.agent_processes import RINGTAP, ended, gone, run_item, wait_for
from tests.unit.live_run import DDP, GRADIENTS, SOCKETS, RunWriter, T, second_of_training

pytestmark = pytest.mark.shares

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
# marks of ringtap.step(); then it lives until the test has looked
JOB = """
import os, time
import ringtap
for _ in range({count}):
    ringtap.step()
    time.sleep(0.02)
while not os.path.exists({end!r}):
    time.sleep(0.02)
"""


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def look(metrics: RunMetrics) -> Samples:
    metrics._polled_s = float("-inf")
    for node in metrics._follower.nodes.values():
        node._look_s = 0.0
    registry = CollectorRegistry()
    registry.register(metrics)
    return samples_of(generate_latest(registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"ringtap_{name}", frozenset(labels.items())))


def test_values_are_those_of_the_records(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        metrics = RunMetrics(run.path)
        assert set(look(metrics)) == {("ringtap_exporter_cpu_seconds_total", frozenset())}
        for second in range(1, 6):
            second_of_training(run, second)
            found = look(metrics)
    for rank, node in (("0", "S0"), ("1", "S1")):
        of = {"node": node, "rank": rank}
        for share in ("0.5", "0.99"):
            assert value(found, "iteration_seconds", quantile=share, **of) == pytest.approx(0.25)
        assert value(found, "iteration_seconds_count", **of) == 19
        assert value(found, "iteration_seconds_sum", **of) == pytest.approx(19 * 0.25)
        sent = round(GRADIENTS * 5 / 0.25)
        assert value(found, "nic_transmit_bytes_total", node=node, nic="eth0") == sent
        assert value(found, "nic_receive_bytes_total", node=node, nic="lo") == 7
        assert value(found, "tcp_retransmitted_segments_total", node=node) == 15
        # the first sample's bytes were sent before the recording
        assert value(found, "training_traffic_transmit_bytes_total", node=node) == sent - round(GRADIENTS * 0.1 / 0.25)
    assert value(found, "cross_traffic_receive_bytes_total", node="S0") == 5e6 * 49
    assert value(found, "cross_traffic_receive_bytes_total", node="S1") is None
    assert {name for _, labels in found for name, _ in labels} == {"node", "rank", "nic", "quantile"}


def test_only_one_node_is_read_where_it_is_named(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        second_of_training(run, 1)
        found = look(RunMetrics(run.path, "S1"))
    assert {dict(labels)["node"] for _, labels in found if labels} == {"S1"}


def test_sockets_of_a_log_that_starts_late_count_from_their_first_byte(tmp_path: Path) -> None:
    for number, (begin, expected) in enumerate([(0.5, 2e6), (8, 5e6)]):
        with RunWriter(tmp_path / str(number), "S0") as run:
            node = run.nodes["S0"]
            node.node(status="running", agent={"began_ns": node.t(0)[0]})
            ends = ("10.77.0.1", 5201, "10.77.0.3", 50001)
            for at, received in ((begin, 3_000_000), (begin + 0.1, 5_000_000)):
                node.socket(at, 7, ends, bytes_received=received, inode=0)
            assert value(look(RunMetrics(run.path)), "cross_traffic_receive_bytes_total", node="S0") == expected


def test_ports_of_rdma_devices_count_octets(tmp_path: Path) -> None:
    fields = [
        *T,
        Field("port_xmit_data", "<u8", "4 octets", "counter", 64),
        Field("port_xmit_discards", "<u8", "", "counter", 64),
    ]
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        node.records("infiniband/mlx5_0-1.rec", fields, (*node.t(1), 1000, 3), device="mlx5_0", port=1)
        found = look(RunMetrics(run.path))
    of = {"node": "S0", "nic": "mlx5_0:1"}
    assert value(found, "nic_transmit_bytes_total", **of) == 4000
    assert value(found, "nic_drops_total", **of) == 3
    assert value(found, "nic_receive_bytes_total", **of) is None


MOMENT = st.integers(0, 40)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[MOMENT] * 9), max_size=12), st.integers(0, 12))
def test_exposed_communication_is_that_of_analyze(rows: list[tuple[int, ...]], cut: int) -> None:
    names = [field.name for field in DDP]
    table = pd.DataFrame([(number, 0, *row) for number, row in enumerate(rows)], columns=names)
    kept = table.drop_duplicates(names[1:7])
    # a repeated sample that is not the last one does not occur in a log
    if len(kept) < len(table):
        return
    times, layout = PassTimes(lambda t_ns, _: t_ns), header_of(DDP)
    for batch in (table[:cut], table[cut:]):
        times.feed(layout, list(batch.itertuples(index=False, name=None)))
    assert (times.exposed_s is None) == (not rows)
    if rows:
        columns = {name: table[name].to_numpy() for name in names} | {
            "process": table["module"],
            "place": table["iteration"],
        }
        expected = iterations_of_ranks._by_iteration(columns | {"bytes": table["module"] * 1.0})
        assert times.exposed_s == pytest.approx(expected["exposed_s"].sum(), abs=1e-15)
        assert times.communication_s == pytest.approx(expected["communication_s"].sum(), abs=1e-15)


def header_of(fields: list[Field]) -> RecordFile:
    return RecordFile(Path("a.rec"), tuple(fields), {}, 0, 0, 0, 0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 30),
)
def test_sockets_add_up_at_any_pace(events: list[tuple[int, int, bool]], size: int) -> None:
    """Sockets that open and close: each byte after the first sample counts once."""
    layout, rows, sent, generation = header_of(SOCKETS), [], {}, 0
    at, expected, first = layout.index, 0, None
    for number, (slot, grown, closes) in enumerate(events):
        cookie = slot + 10 * generation
        known = sent.get(cookie, 0)
        sent[cookie] = known + grown
        row = [0] * len(SOCKETS)
        row[at["mono_ns"]], row[at["cookie"]], row[at["bytes_acked"]] = number, cookie, sent[cookie]
        row[at["sport"]], row[at["dport"]] = b"\x00\x16", (5201).to_bytes(2, "big")
        row[at["state"]] = 0 if closes else 1
        rows.append(tuple(row))
        first = cookie if first is None else first
        expected += 0 if number == 0 else grown
        if closes:
            generation += 1
            sent.clear()
    totals = SocketTotals(Owners())
    for begin in range(0, len(rows), size):
        totals.feed(layout, rows[begin : begin + size], is_begun=False)
        totals.by_traffic()
    found = totals.by_traffic()
    assert found["cross"].sent_bytes == expected
    assert set(found) == {"cross"}


@pytest.mark.parametrize(("before", "after", "retransmissions"), [(1, 7, 6), (2**32 - 2, 3, 5)], ids=["growth", "wrap"])
def test_a_counter_of_sockets_wraps_and_a_reset_one_is_not_known(before: int, after: int, retransmissions: int) -> None:
    fields = [Field(one.name, one.type, "", "counter", 32) if one.name == "total_retrans" else one for one in SOCKETS]
    layout, totals = header_of(fields), SocketTotals(Owners())
    values = [{"total_retrans": before, "bytes_acked": 10**6}, {"total_retrans": after, "bytes_acked": 4}]
    rows = [{"mono_ns": number, "cookie": 7, "state": 1, "sport": b"\x00\x16", "dport": b"\x14\x51", **value}
            for number, value in enumerate(values)]  # fmt: skip
    totals.feed(layout, [tuple(row.get(field.name, 0) for field in fields) for row in rows], is_begun=True)
    found = totals.by_traffic()["cross"]
    assert (found.retransmissions, found.received_bytes, found.sent_bytes) == (retransmissions, 0, None)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("9464", "an address is :PORT or HOST:PORT"),
        (":", "an address is :PORT"),
        (":70000", "an address is :PORT"),
        ("0.0.0.0:0", "add --metrics-public, or give :0"),
        ("[::]:0", "add --metrics-public"),
        ("203.0.113.7:0", "add --metrics-public"),
        ("no such host:0", "cannot be used: "),
    ],
)
def test_wrong_addresses_are_refused_in_one_sentence(
    address: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["run", "-o", str(tmp_path / "run"), "--metrics", address, "--", "touch", str(tmp_path / "began")],
        ["live", str(tmp_path), "--metrics", address],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"ringtap: --metrics {address}") and said.count("\n") == 1
        assert words in said
    assert not list(tmp_path.iterdir())


def test_addresses() -> None:
    for address, is_public, host in (
        (":0", False, "127.0.0.1"),
        ("localhost:0", False, "127.0.0.1"),
        ("0.0.0.0:0", True, "0.0.0.0"),
    ):
        with http_listen_address.listener_or_url(address, is_public) as listener:
            port = listener.getsockname()[1]
            assert (
                http_listen_address.url_of(listener, http_listen_address.METRICS_PATH)
                == f"http://{host}:{port}/metrics"
            )
            with pytest.raises(UsageError, match=f":{port} cannot be used: Address already in use"):
                http_listen_address.listener_or_url(f":{port}", False)


def test_a_missing_package_is_said_before_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ringtap.core.installation.find_spec", lambda _: None)
    assert main(["run", "--metrics", ":0", "--", "touch", str(tmp_path / "began")]) == 2
    assert re.search(r"--metrics needs prometheus_client, not installed here: .*\[metrics\]", capsys.readouterr().err)
    assert main(["run", "--metrics", "http://localhost:4318", "--", "touch", str(tmp_path / "began")]) == 2
    assert "--metrics needs prometheus_client and opentelemetry.proto, not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def get(url: str, accept: str = "application/openmetrics-text; version=1.0.0") -> tuple[str, str]:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=20) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def exporter_of(run: Path) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        if {str(run), "ringtap.analysis.live.metrics"} <= set(process.info["cmdline"] or ()):
            return process
    return None


def start(run: Path, count: int) -> tuple["subprocess.Popen[str]", str]:
    job = JOB.format(count=count, end=str(run.with_name("end")))
    options = ("-o", str(run), "--node", "here", "--collect", "nic,host,sockets,steps", "--metrics", ":0")
    process = subprocess.Popen(
        [*RINGTAP, "run", *options, "--", sys.executable, "-c", job], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    for line in process.stderr:
        if "metrics at" in line:
            return process, line.split()[-1]
    raise AssertionError("no metrics")


def test_a_job_is_served_and_equals_its_analysis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, count = tmp_path / "run", 30
    process, url = start(run, count)
    of = {"node": "here", "rank": "0"}
    with ended(process):

        def whole() -> Samples | None:
            found = samples_of(get(url)[0])
            return found if value(found, "iteration_seconds_count", **of) == count - 1 else None

        found = wait_for(whole, 60)
        assert "text/plain" in get(url, "")[1]
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            get(url.removesuffix("metrics"))
        refused.value.close()
        began = tmp_path / "began"
        assert main(["run", "--metrics", url.split("/")[2], "--", "touch", str(began)]) == 2
        assert "cannot be used: Address already in use" in capsys.readouterr().err
        assert not began.exists()
        run.with_name("end").touch()
        wait_for(lambda: process.poll() is not None, 60)
        assert process.stderr and "analyze" in process.stderr.read()
    assert process.returncode == 0
    gone(run)
    assert exporter_of(run) is None
    steps = ringtap.open_job(run).rank_iterations["iteration_s"].dropna()
    assert value(found, "iteration_seconds_sum", **of) == pytest.approx(steps.sum(), rel=1e-9)
    assert value(found, "iteration_seconds", quantile="0.5", **of) == pytest.approx(steps.median(), rel=1e-9)
    assert value(found, "iteration_seconds", quantile="0.99", **of) == pytest.approx(steps.max(), rel=1e-9)


def test_a_killed_exporter_leaves_the_job_alone_and_a_killed_supervisor_ends_it(tmp_path: Path) -> None:
    process, _ = start(tmp_path / "a", 1)
    with ended(process):
        exporter = wait_for(lambda: exporter_of(tmp_path / "a"))
        exporter.kill()
        assert (
            process.stderr
            and "the metrics are not served or sent any more; the job goes on" in process.stderr.readline()
        )
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
    assert run_item(tmp_path / "a")["status"] == "complete"
    (tmp_path / "end").unlink()
    process, _ = start(tmp_path / "b", 1)
    with ended(process):
        wait_for(lambda: exporter_of(tmp_path / "b"))
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: exporter_of(tmp_path / "b") is None, 60)
        (tmp_path / "end").touch()
    gone(tmp_path / "b")


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1:0", 403), ("0.0.0.0:0", 200)])
def test_a_loopback_address_answers_only_those_who_name_this_machine(tmp_path: Path, address: str, status: int) -> None:
    """As the page does: a browser may have been led here by a name of another site (DNS rebinding)."""
    is_wanted = True
    with RunWriter(tmp_path / "run", "S0") as run, http_listen_address.listener_or_url(address, True) as listener:
        second_of_training(run, 1)
        server = MetricsHttpServer(RunMetrics(run.path), listener)
        server.timeout = 0.05
        thread = threading.Thread(target=server.serve_while, args=(lambda: is_wanted,))
        thread.start()
        port = listener.getsockname()[1]
        try:
            for host, expected in ((f"evil.example:{port}", status), (f"localhost:{port}", 200), ("127.0.0.1", 200)):
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                    connection.request("GET", "/metrics", headers={"Host": host})
                    found = connection.getresponse()
                    assert (found.status, b"ringtap_" in found.read()) == (expected, expected == 200)
            with contextlib.ExitStack() as idle:
                for _ in range(90):
                    idle.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                assert get(f"http://127.0.0.1:{port}/metrics")[0], "idle connections make room"
        finally:
            is_wanted = False
            thread.join()


def test_live_serves_all_nodes_until_the_run_ends(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        second_of_training(run, 1)
        command = [*RINGTAP, "live", str(run.path), "--metrics", ":0"]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout
            found = samples_of(get(process.stdout.readline().split()[-1])[0])
            assert [value(found, "iteration_seconds_count", node=f"S{rank}", rank=str(rank)) for rank in (0, 1)] == [
                3,
                3,
            ]
            run.finish()
            assert process.wait(60) == 0
    assert main(["live", str(run.path), "--metrics", ":0", "--plain"]) == 2


def test_nothing_is_imported_when_off() -> None:
    code = (
        "import sys, ringtap.agents.commands, ringtap.agents.job.supervisor; "
        "sys.exit(any(name in sys.modules for name in ('prometheus_client', 'ringtap.core.http_listen_address')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"SLURM_LOCALID": "0"}, True),
        ({"SLURM_LOCALID": "1"}, False),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "2"}, True),
    ],
)
def test_the_first_rank_of_a_node_serves_it(variables: dict[str, str], is_first: bool) -> None:
    assert environment.is_first_on_node(variables) == is_first
    assert environment._LOCAL_RANK == hook_settings._LOCAL_RANK
