"""A real Prometheus scrapes a recorded job: values equal the records, and the shipped rules and panels evaluate."""

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringtap.core.append_only_logs import open_records
from tests.unit.agent_processes import RINGTAP, ended, wait_for

pytestmark = [
    pytest.mark.shares,
    pytest.mark.together,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Prometheus"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT = 120
# steps begin once Prometheus scrapes, so that it sees most of them come
JOB = """
import os, time, ringtap
while not os.path.exists({begin!r}):
    time.sleep(0.05)
for number in range({count}):
    ringtap.step()
    time.sleep(1 if number in (60, 61) else 0.1)
time.sleep(300)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    def is_up(self) -> bool:
        try:
            return bool(self.get("targets"))
        except OSError:
            return False

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        return [(item["metric"], float(item["value"][1])) for item in self.get("query", query=expression)["result"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Prometheus]]:
    """A job whose metrics Prometheus has scraped to the last step, and which still runs."""
    folder = tmp_path_factory.mktemp("prometheus")
    run, port = folder / "run", free_port()
    config = yaml.safe_load((EXAMPLES / "metrics-prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(EXAMPLES / "metrics-rules.yml")]
    (target,) = config["scrape_configs"][0]["static_configs"]
    assert target["targets"] == ["127.0.0.1:9464"]
    target["targets"] = [f"127.0.0.1:{port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    job = [*RINGTAP, "run", "-o", str(run), "--node", "here", "--metrics", f":{port}"]
    job += ["--", sys.executable, "-c", JOB.format(begin=str(folder / "begin"), count=COUNT)]
    served = Prometheus(free_port())
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{served.port}", "--log.level=error"]
    with (
        ended(subprocess.Popen(job, stderr=subprocess.DEVNULL)) as wrapped,
        ended(subprocess.Popen(command)),
    ):
        wait_for(lambda: served.is_up() and served.values("ringtap_newest_record_timestamp_seconds"), 60)
        (folder / "begin").touch()
        counted = "ringtap_iteration_seconds_count"
        whole = [({**LABELS, "__name__": counted, "instance": f"127.0.0.1:{port}"}, COUNT - 1)]
        wait_for(lambda: served.values(counted) == whole, 90)
        yield run, served
        wrapped.terminate()
        wrapped.wait(30)


LABELS = {"job": "ringtap", "node": "here", "rank": "0"}


def test_what_prometheus_stores_equals_the_records(recorded: tuple[Path, Prometheus]) -> None:
    run, prometheus = recorded
    (log,) = (run / "nodes/here/steps").glob("rank0-*.rec")
    ends = [row[5] for row in open_records(log).tail()]
    steps = sorted((after - before) / 1e9 for before, after in pairwise(ends))
    assert prometheus.values('ringtap_iteration_seconds{quantile="0.99"}')[0][1] == steps[-2]
    assert prometheus.values('ringtap_iteration_seconds{quantile="0.5"}')[0][1] == steps[len(steps) // 2]
    assert prometheus.values("ringtap_iteration_seconds_sum")[0][1] == pytest.approx(sum(steps), rel=1e-12)
    stored = prometheus.values('ringtap_nic_transmit_bytes_total{nic="lo"}')[0][1]
    counters = open_records(run / "nodes/here/nic/nic.rec")  # after the question, as more is scraped meanwhile
    column = [field.name for field in counters.fields].index("lo.tx_bytes")
    assert stored in {row[column] for row in counters.tail()}


def test_the_shipped_rules_and_panels_evaluate(recorded: tuple[Path, Prometheus]) -> None:
    _, prometheus = recorded
    rules = [rule for group in wait_for(lambda: prometheus.get("rules")["groups"]) for rule in group["rules"]]
    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules_of(prometheus)), 60)
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in rules_of(prometheus)} == {
        (rule["name"], "ok", "") for rule in rules
    }
    (mean,) = wait_for(lambda: prometheus.values("rank:ringtap_iteration_seconds:mean1m"))
    # no step is shorter, and those of a busy machine are longer
    assert 0.1 <= mean[1] < 1
    (tail,) = wait_for(lambda: prometheus.values('ALERTS{alertname="RingtapIterationTail"}'))
    assert tail[0]["rank"] == "0"
    dashboard = json.loads((EXAMPLES / "metrics-dashboard.json").read_text())
    named = set(prometheus.get("label/__name__/values")) | WITHOUT_SAMPLES
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "4s").replace("$node", ".*")
            assert "$" not in expression
            assert set(re.findall(r"ringtap_\w+", expression)) <= named
            prometheus.get("query", query=expression)


def rules_of(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]


# this job has no DDP, no cross traffic, and no connections
WITHOUT_SAMPLES = {
    "ringtap_exposed_communication_seconds_total",
    *(
        f"ringtap_{kind}_traffic_{what}_total"
        for kind in ("training", "cross")
        for what in ("transmit_bytes", "receive_bytes", "retransmitted_segments")
    ),
}


@pytest.mark.parametrize(
    "command", [("check", "rules", "metrics-rules.yml"), ("check", "config", "metrics-prometheus.yml")]
)
def test_promtool_finds_nothing(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_in_the_metrics(recorded: tuple[Path, Prometheus]) -> None:
    _, prometheus = recorded
    url = prometheus.get("targets")["activeTargets"][0]["scrapeUrl"]
    with urllib.request.urlopen(url, timeout=20) as answer:
        done = subprocess.run(["promtool", "check", "metrics"], input=answer.read(), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
