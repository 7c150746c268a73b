"""Sweeps over ssh: real sshds on the hosts of a testbed, whose own limits are the links."""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import ringtap
from ringtap.agents.lab.topology import LabSpec
from ringtap.agents.lab.up import Lab
from ringtap.records import open_records, read_json_lines
from ringtap.trafficgen.calibration import Calibration, save, this_host
from tests.testbed import sweeps
from tests.testbed.sshd import SshServers
from tests.testbed.sweeps import SMALL, one_sentence, status, wait_for

pytestmark = pytest.mark.usefixtures("unchanged_machine")
NAMES = ("S0", "S1", "S2", "S3")
SPEC = LabSpec(name=f"sshs{os.getpid() % 10**6}", hosts=("desk", *NAMES), rate_bps=250_000_000)
# the cluster of the example, with the names and addresses of these servers
EXAMPLE = (Path(__file__).resolve().parents[2] / "examples" / "lab-servers.toml").read_text()
CLUSTER = EXAMPLE[EXAMPLE.index("[cluster]") : EXAMPLE.index("[[models]]")].replace("21gbit", "200mbit")
PLENTY = Calibration(
    host=this_host(),
    measured_unix_s=0.0,
    method="send",
    ceiling_bps=1e10,
    methods_bps={"send": 1e10},
    kept_flows_per_s=1e4,
    new_flows_per_s=1e4,
    spin_ns=50_000,
    sleep_p50_us=50.0,
    sleep_p99_us=200.0,
    lateness_p50_us=5.0,
    lateness_p99_us=50.0,
    lateness_busy_p50_us=20.0,
    lateness_busy_p99_us=2000.0,
)


class Desk:
    """A machine from which the servers are reached by ssh."""

    def __init__(self, folder: Path, servers: SshServers) -> None:
        self.folder, self.servers = folder, servers
        (folder / "bin").mkdir()
        inner = shlex.join([str(servers.folder / "bin" / "ssh"), "-F", str(servers.config)])
        (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {inner} "$@"\n')
        (folder / "bin" / "ssh").chmod(0o755)
        self._path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        for name in NAMES:  # what a host can send is not the question here, and takes 10 s to find out
            place = servers.home(name) / ".cache" / "ringtap"
            save(replace(PLENTY, host=PLENTY.host | {"name": name}), place / f"calibration-{name}.json")

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        return sweeps.run(*arguments, environment=self._path)

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        return sweeps.start(*arguments, environment=self._path)

    def plan(self, name: str, changes: Mapping[str, str] = {}) -> Path:
        """The small sweep over ssh, with some words changed."""
        text = SMALL.format(capacity="250mbit") + CLUSTER
        for number, host in enumerate(NAMES):
            own = f'training = "{SPEC.training_ip(host)}"\ncross = "{SPEC.cross_ip(host)}"\n'
            text = text.replace(f'"s{number}.lab"', f'"{host}.lab"')
            text = text.replace(f'training = "10.0.0.1{number}"', f'{own}workdir = "{self.folder}/disk of {host}"')
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    def sent_bytes(self) -> int:
        """What S2 has sent by its interface of cross traffic."""
        rows = (line.split() for line in self.servers.run("S2", "cat", "/proc/net/dev").splitlines())
        return next(int(row[9]) for row in rows if row[0] == "cross0:")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with Lab(SPEC, verify=False), SshServers(folder / "servers", SPEC) as servers:
        yield Desk(folder, servers)


def test_the_same_result_as_on_the_testbed_although_a_host_was_lost(desk: Desk, testbed_sweep: Path) -> None:
    plan, out = desk.plan("small"), desk.folder / "by ssh"
    host_lost_while_measuring(desk, plan, out)
    done = desk.run("sweep", plan, "-o", out, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"] == 2
    assert status(out) == ("complete", "")
    report = desk.run("report", out)
    assert report.returncode == 0, report.stderr
    checks = json.loads((out / "report" / "report.json").read_text())["checks"]
    (generator,) = [check for check in checks if check["subject"] == "iperf traffic"]
    assert generator["ok"], "at the highest load of the plan: a real link is not loaded any further"
    empty, loaded = (ringtap.open_run(path).points.to_dict("records") for path in (out, testbed_sweep))
    for by_ssh, here in zip(empty, loaded, strict=True):
        assert by_ssh["requested_bps"] == here["requested_bps"]
        # windows of 2.5 s were seen to differ by 10 % on one testbed; on a busy machine by more
        assert by_ssh["mean_s"] == pytest.approx(here["mean_s"], rel=0.25)
        assert by_ssh["cross_bps"] == pytest.approx(here["cross_bps"], rel=0.15, abs=1e5)
        assert by_ssh["total_bps"] == pytest.approx(here["total_bps"], rel=0.25)
    assert empty[1]["mean_s"] > 1.5 * empty[0]["mean_s"]
    assert not list(desk.folder.glob("disk of S[012]/*")), "nothing stays on the hosts"


def host_lost_while_measuring(desk: Desk, plan: Path, out: Path) -> None:
    process = desk.start("sweep", plan, "-o", out)
    wait_for(lambda: read_json_lines(out / "points.jsonl")[0], process)
    wait_for(lambda: list(out.glob("series/small-iperf-1/nodes/S2/sent/001.log")), process)
    begin_s = time.monotonic()
    desk.servers.kill("S3")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1, errors
    assert time.monotonic() - begin_s < 25
    assert "host S3 was lost" in one_sentence(errors)
    assert "--resume" in errors
    before = desk.sent_bytes()
    time.sleep(0.3)
    assert desk.sent_bytes() - before < 10_000, "the cross traffic has ended with the job"
    assert status(out)[0] == "partial"
    assert "host S3 was lost" in status(out)[1]
    nodes = out / "series" / "small-iperf-1" / "nodes"
    for name in ("S0", "S1", "S2"):
        assert (nodes / name / "DONE").exists(), name
        assert open_records(nodes / name / "nic" / "nic.rec").count > 100
    assert not (nodes / "S3" / "DONE").exists()
    # up to its last second: it was there for the whole of the first window
    (point,) = read_json_lines(out / "points.jsonl")[0]
    assert open_records(nodes / "S3" / "nic" / "nic.rec").tail()[-1][0] >= point["window_end_ns"]
    desk.servers.start("S3")


def test_cross_traffic_ends_when_its_controller_is_killed(desk: Desk) -> None:
    out = desk.folder / "killed"
    second = SPEC.cross_ip("S2") + "3"  # another address of the same interface, with a label as of old
    desk.servers.run("S2", "ip", "address", "add", f"{second}/24", "dev", "cross0", "label", "cross0:1")
    plan = desk.plan("flows", {'["iperf"]': '["consistent"]', SPEC.cross_ip("S2"): second})
    process = desk.start("sweep", plan, "-o", out)
    wait_for(lambda: list(out.glob("series/precheck-*/nodes/S2/sent/full.rec")), process)
    before = desk.sent_bytes()
    time.sleep(0.3)
    assert desk.sent_bytes() > before + 1_000_000, "S2 sends"
    process.kill()
    process.communicate()
    end_s = time.monotonic() + 8  # it had been told to send for 14 s, of which some 2 are over
    while True:
        before = desk.sent_bytes()
        time.sleep(0.5)
        if desk.sent_bytes() == before:
            break
        assert time.monotonic() < end_s, "S2 sends on"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"S1.lab": "S9.lab", 'ssh = "S2.lab"': 'ssh = "S2.lab"\npython = "/no/python"'},
            "S1 cannot be used over ssh: .*S9.lab.*; S2 cannot be used over ssh: .*/no/python",
        ),
        (
            {SPEC.training_ip("S1"): "10.99.0.1", SPEC.cross_ip("S2"): "10.99.0.2"},
            r"S1 does not have its training address 10\.99\.0\.1: it has 10\..*S2 does not have its cross address 10",
        ),
        (
            {'"S3"]': '"S3", "S2"]', **{SPEC.cross_ip(name): SPEC.training_ip(name) for name in ("S0", "S2")}},
            "S2 and S0 both train, and by the interface that carries their cross traffic",
        ),
    ],
)
def test_a_host_that_cannot_take_part_is_named_before_anything_starts(
    desk: Desk, changes: dict[str, str], words: str
) -> None:
    done = desk.run("sweep", desk.plan("wrong", changes), "-o", desk.folder / "wrong")
    assert done.returncode == 2
    assert re.search(words, one_sentence(done.stderr)), done.stderr
    assert not (desk.folder / "wrong").exists()


def test_the_doctor_asks_every_host(desk: Desk) -> None:
    late = desk.folder / "late python"
    late.write_text(
        '#!/bin/sh\ncase $1 in -S) echo $(($(date +%s%N) - 5000000000));; *) exec python3 "$@";; esac\n'.replace(
            "python3", sweeps.RINGTAP[0]
        )
    )
    late.chmod(0o755)
    plan = desk.plan("doctor", {'ssh = "S1.lab"': f'ssh = "S1.lab"\npython = "{late}"'})
    done = desk.run("doctor", "--plan", plan, "--json")
    assert done.returncode == 1, done.stderr
    item = json.loads(done.stdout)
    assert [host["host"] for host in item["hosts"]] == list(NAMES)
    assert len(item["problems"]) == 1
    assert re.fullmatch(r"the clock of host S1 is (4\.9|5\.0) s behind this machine's: .*", item["problems"][0])
    assert item["recordable"] is False
    for host in item["hosts"]:
        assert host["recordable"] is True
        found = {check["name"]: check["reason"] for check in host["checks"]}
        assert "cross0" in found["network"]
        assert found["run directory"].startswith(str(desk.folder)), "where the host's workdir will be made"
