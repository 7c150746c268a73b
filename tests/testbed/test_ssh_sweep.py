"""Sweeps over ssh: real sshds on the hosts of a testbed, whose own limits are the links."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.append_only_logs import open_records, read_json_lines
from ringtap.core.sent_flow_log import open_sent_log
from ringtap.trafficgen.calibrate_host_limits import Calibration, save, this_host
from ringtap.workload.workload import write_workload
from tests.testbed import sweeps
from tests.testbed.sshd import SshServers
from tests.testbed.sweeps import SMALL, WORKERS, one_sentence, small_messages, status, wait_for
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.together, pytest.mark.usefixtures("unchanged_machine")]
NAMES = ("S0", "S1", "S2", "S3")
SPEC = TestbedSpec(name=f"sshs{os.getpid() % 10**6}", hosts=("desk", *NAMES), rate_bps=250_000_000)
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


TRAIN = """\
import gc, os, sys, time
gc.disable()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
about = ["MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "MINE"]
address, port, gpus, mine = (os.environ.get(name, "all") for name in about)
said = f"rank {dist.get_rank()} of {dist.get_world_size()}, {address} port {port} gpus {gpus} {mine}"
os.write(1, f"{said} in {os.path.basename(os.getcwd())}\\n".encode())  # at once: the ranks share a file
weight = torch.nn.Parameter(torch.zeros(1000))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    weight.grad = torch.ones(1000)
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(0.05)
"""
# a job of iterations alone: it starts in no time
MARKS = ["{python}", "-c", "import ringtap, time\nwhile True: time.sleep(0.05); ringtap.step()"]


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

    def job_logs(self) -> list[Path]:
        """The output of the job of `OWN` on each worker that has begun, where it is written: it comes here later."""
        logs = "disk of {0}/mine-iperf-1-*/nodes/{0}/log/job.out"
        return [
            path for host in WORKERS for path in Path(f"{self.servers.root(host)}{self.folder}").glob(logs.format(host))
        ]

    def sent_bytes(self) -> int:
        """What S2 has sent by its interface of cross traffic."""
        rows = (line.split() for line in self.servers.run("S2", "cat", "/proc/net/dev").splitlines())
        return next(int(row[9]) for row in rows if row[0] == "cross0:")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with RunningTestbed(SPEC, verify=False), SshServers(folder / "servers", SPEC) as servers:
        yield Desk(folder, servers)


@pytest.mark.alone(2)
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
        assert by_ssh["unscaled_requested_bps"] == here["unscaled_requested_bps"]
        # windows of 2.5 s were seen to differ by 10 % on one testbed; on a busy machine by more
        assert by_ssh["mean_s"] == pytest.approx(here["mean_s"], rel=0.25)
        assert by_ssh["unscaled_cross_bps"] == pytest.approx(here["unscaled_cross_bps"], rel=0.15, abs=1e5)
        assert by_ssh["unscaled_total_bps"] == pytest.approx(here["unscaled_total_bps"], rel=0.25)
    assert empty[1]["mean_s"] > 1.5 * empty[0]["mean_s"]
    assert not list(desk.folder.glob("disk of S?/*")), "nothing stays on the hosts, nor on the one that was lost"


@pytest.mark.alone(2)
@pytest.mark.parametrize("kind", ["iperf", "consistent"])
def test_configuration_a_by_one_interface_of_each_server(desk: Desk, kind: str) -> None:
    # S0 trains and sends cross traffic to S3, which trains too; no interface carries cross traffic alone
    roles = {
        'workers = ["S0", "S1", "S3"]': 'workers = ["S0", "S1", "S3", "S2"]',
        'cross_from = "S2"': 'cross_from = "S0"',
        'cross_to = "S0"': 'cross_to = "S3"',
        'traffic = ["iperf"]': f'traffic = ["{kind}"]',
        # at 0.6, training leaves cross traffic less than was asked for: 79 % on average, 71 % now and then
        "loads = [0, 0.7]": "loads = [0, 0.1, 0.4]\ncapture = [0.4]",
        # of 24 iterations, a mean is uncertain by 3 %, which is too much for the comparisons below
        'min_time = "2500ms"': 'min_time = "5s"',
    }
    one_interface = {f'cross = "{SPEC.cross_ip(host)}"\n': "" for host in NAMES}
    plan, out = desk.plan(f"a-{kind}", roles | one_interface), desk.folder / f"a {kind}"
    with plan.open("a") as file:
        file.write("\n[capture]\niterations = 40\n")
    done = desk.run("sweep", plan, "-o", out)
    assert done.returncode == 0, done.stderr
    info = json.loads((out / "run.json").read_text())
    assert info["bottleneck"]["cross"] == "acknowledged"
    assert info["bottleneck"]["total"] == [{"node": "S0", "nic": "eth0", "direction": "tx"}]
    points = ringtap.open_sweep(out).points
    empty, light, heavy = points.to_dict("records")
    assert empty["unscaled_cross_bps"] == 0
    assert not [point for point in (empty, light, heavy) if point["disturbed"]]
    (reason,) = {point["reasons"] for point in (empty, light, heavy)}
    assert reason == (
        "standard deviation of the cross traffic: the sweep recorded only the mean of what the receiver acknowledged; "
        "samples/s: the plan has no batch for small"
    )
    for number, point in enumerate((light, heavy), 1):
        if kind == "iperf":
            # 5 % more than asked for are headers; what it catches up after a pause differs by some percent more
            assert point["unscaled_cross_bps"] == pytest.approx(point["unscaled_requested_bps"] * 1.045, rel=0.25)
        else:
            # what the sender's log says of each flow: those of 20 ms at either end of 5 s were not sent evenly
            window = read_json_lines(out / "points.jsonl")[0][number]
            sent_bps = logged_bps(out / "series/small-consistent-1/nodes/S0/sent", window)
            assert point["unscaled_cross_bps"] == pytest.approx(sent_bps * 1.045, rel=0.05)
            assert sent_bps < 1.25 * point["unscaled_requested_bps"]
        # what the port counted beside cross traffic is equation 3.1 with four workers, 1.5 times the gradient of
        # 25 million parameters / 100 in each iteration, with headers (5 %) and acknowledgements
        volume = point["unscaled_training_bps"] * point["mean_s"] / 8
        assert volume == pytest.approx(1.5 * 250_000 * 4 * 1.05, rel=0.06)
        assert point["unscaled_other_bps"] < 0.02 * 250e6
    assert heavy["unscaled_cross_bps"] > 1.25 * light["unscaled_cross_bps"]
    assert heavy["unscaled_total_bps"] > 1.15 * light["unscaled_total_bps"] > 1.15 * empty["unscaled_total_bps"]
    # this little cross traffic may delay iterations by less than what a busy machine changes of them
    assert heavy["mean_s"] > 0.95 * light["mean_s"]
    assert min(heavy["mean_s"], light["mean_s"]) > 0.95 * empty["mean_s"]
    assert desk.run("report", out).returncode == 0
    (packets,) = json.loads((out / "report" / "report.json").read_text())["packets"]
    assert packets["why"] == ""
    assert {(flow["role"], flow["source"], flow["captured_on"]) for flow in packets["flows"]} >= {
        ("cross traffic", "S0", "S0"),
        ("training beside cross traffic", "S0", "S0"),
    }
    counts = packets["bytes"]
    # the receiver's port alone tells cross traffic from training; gloo's headers are up to 2 % of so small a model
    assert counts["packets"] == pytest.approx(1.5 * 25_000_000 * 4, rel=0.025)
    # samples of 20 ms at both ends of some iterations
    assert counts["sockets"] == pytest.approx(counts["packets"], rel=0.03)
    assert counts["interfaces"] is None
    assert counts["reasons"]["interfaces"] == "S0: eth0 also carries the cross traffic that the worker sends"


def logged_bps(sent: Path, point: Mapping[str, Any]) -> float:
    """Rate in the window of a point by a sender's logs, with each flow sent evenly from its start to its end."""
    begin_ns, end_ns = point["window_start_ns"], point["window_end_ns"]
    sent_bytes = 0.0
    for flow in chain.from_iterable(open_sent_log(log).flows() for log in sent.glob("*.rec")):
        part_ns = min(flow.finish_ns, end_ns) - max(flow.first_byte_ns, begin_ns)
        if flow.first_byte_ns and part_ns > 0:
            sent_bytes += flow.acked_bytes * part_ns / (flow.finish_ns - flow.first_byte_ns)
    return 8e9 * sent_bytes / (end_ns - begin_ns)


def host_lost_while_measuring(desk: Desk, plan: Path, out: Path) -> None:
    with ended(desk.start("sweep", plan, "-o", out)) as process:
        wait_for(lambda: read_json_lines(out / "points.jsonl")[0], process)
        # where it is written: it comes here later
        wait_for(lambda: list(desk.folder.glob("disk of S2/small-iperf-1-*/nodes/S2/sent/001.log")), process)
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


@pytest.mark.alone(2)
def test_cross_traffic_ends_when_its_controller_is_killed(desk: Desk) -> None:
    out = desk.folder / "killed"
    second = SPEC.cross_ip("S2") + "3"  # another address of the same interface, with a label as of old
    desk.servers.run("S2", "ip", "address", "add", f"{second}/24", "dev", "cross0", "label", "cross0:1")
    plan = desk.plan("flows", {'["iperf"]': '["consistent"]', SPEC.cross_ip("S2"): second})
    with ended(desk.start("sweep", plan, "-o", out)) as process:
        wait_for(lambda: list(out.glob("series/precheck-*/nodes/S2/sent/full.rec")), process)
        before = desk.sent_bytes()
        wait_for(lambda: desk.sent_bytes() > before + 1_000_000, process)  # S2 sends
        process.kill()
    end_s = time.monotonic() + 8  # it had been told to send for 14 s, of which some 2 are over
    while True:
        before = desk.sent_bytes()
        time.sleep(0.5)
        if desk.sent_bytes() == before:
            break
        assert time.monotonic() < end_s, "S2 sends on"
    wait_until_clean(desk, plan)


def wait_until_clean(desk: Desk, plan: Path) -> None:
    """Remove what a killed sweep has left on its hosts, as soon as nothing of it runs there."""
    end_s = time.monotonic() + 30
    while [path for path in desk.folder.glob("disk of *") if list(path.glob("*"))]:
        done = desk.run("sweep", plan, "--clean", "--json")
        assert done.returncode == 0, done.stderr
        assert time.monotonic() < end_s


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
    ],
)
def test_a_host_that_cannot_take_part_is_named_before_anything_starts(
    desk: Desk, changes: dict[str, str], words: str
) -> None:
    done = desk.run("sweep", desk.plan("wrong", changes), "-o", desk.folder / "wrong")
    assert done.returncode == 2
    assert re.search(words, one_sentence(done.stderr)), done.stderr
    assert not (desk.folder / "wrong").exists()


OWN = '[[models]]\nname = "mine"\nparameters = 1\ncommand = {command}\n'
BEFORE = "[[models]]\nname"


def own_command(*command: str, more: str = "") -> dict[str, str]:
    """The change of a plan that makes a command its first model."""
    return {BEFORE: OWN.format(command=json.dumps(command)) + more + BEFORE}


def test_what_would_end_a_sweep_later_is_found_on_every_host_before_it(desk: Desk) -> None:
    """A full disk, a missing interpreter of the job, a missing script, a host that is not there: all in one answer."""
    disk = desk.folder / "disk of S2"
    disk.mkdir(exist_ok=True)
    desk.servers.kill("S2")
    desk.servers.start("S2", f"mount -t tmpfs -o size=1m tmpfs '{disk}'")
    changes = own_command("{python}", "no/train.py") | {"S3.lab": "S9.lab"}
    changes |= {'ssh = "S1.lab"': 'ssh = "S1.lab"\njob_python = "/no/conda/bin/python"'}
    try:
        done = desk.run("doctor", "--plan", desk.plan("ill", changes))
        sweep = desk.run("sweep", desk.plan("full"), "-o", desk.folder / "ill")
    finally:
        desk.servers.kill("S2")
        desk.servers.start("S2")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    problems = " ".join(lines[1:5])
    assert "host S1, model mine: the job's command begins with /no/conda/bin/python, which is not a program" in problems
    assert re.search(r"host S0, model mine: the job's script no/train\.py is not there", problems)
    assert re.search(rf"host S2: {re.escape(str(disk))} has 1\.0\d* MB left, and the sweep may write", problems)
    assert re.search(r"S3 cannot be used over ssh: .*S9\.lab", problems)
    assert lines[0] == "The plan cannot run: 4 things prevent it."
    answers = [line for line in lines if re.fullmatch(r"S\d(, S\d)*:", line)]
    hosts = sorted(host for line in answers for host in line[:-1].split(", "))
    assert hosts == ["S0", "S1", "S2"], "the hosts that can be reached answer for themselves"
    assert sweep.returncode == 2
    assert "S2: " in one_sentence(sweep.stderr)
    assert not (desk.folder / "ill").exists()


def test_connections_that_are_blocked_are_named_before_the_sweep(desk: Desk) -> None:
    """S3 cannot send to S1, as behind a firewall, and drops what comes in on a port of the plan."""
    address = SPEC.training_ip("S1")
    plan = desk.plan("blocked", {"i_may_load": 'ports = "21000-21009"\ni_may_load'})
    desk.servers.run("S3", "ip", "route", "add", "blackhole", f"{address}/32")
    try:
        done = desk.run("sweep", plan, "-o", desk.folder / "blocked")
    finally:
        desk.servers.run("S3", "ip", "route", "delete", "blackhole", f"{address}/32")
    said = one_sentence(done.stderr)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"S3 cannot reach S1 \({re.escape(address)}, TCP port \d+\) for training: ", said)
    assert re.search(
        r"S1 cannot reach S3 \(.*\) for training: no answer within 4 s, as where a firewall drops it", said
    )
    assert "the ports that the kernel picks (" in said
    assert "S0" not in said, "the others reach each other"
    assert not (desk.folder / "blocked").exists()
    done = desk.run("doctor", "--plan", plan)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == f"The plan can run. Next: ringtap sweep {shlex.quote(str(plan))}"


def run_until_late(desk: Desk, plan: Path, out: Path, is_ready: Callable[[], object]) -> tuple[int, str]:
    """Run a sweep whose job has 3 s to begin; returns its exit code and errors.

    It stands still until the job has come so far, as a busy machine may need longer.
    """
    with ended(desk.start("sweep", plan, "-o", out)) as process:
        wait_for(lambda: len(desk.job_logs()) == len(WORKERS), process)
        process.send_signal(signal.SIGSTOP)
        try:
            wait_for(is_ready, process)
        finally:
            process.send_signal(signal.SIGCONT)
        errors = process.communicate(timeout=120)[1]
    return process.returncode, errors


def test_a_failure_is_told_in_the_words_of_every_host_the_most_telling_first(desk: Desk) -> None:
    words = (
        'if [ {host} = S3 ]; then echo "OSError: [Errno 28] No space left on device"; else echo waiting; fi; sleep 60'
    )
    plan = desk.plan(
        "telling", {**own_command("sh", "-c", words), 'min_time = "2500ms"': 'min_time = "1s"', "[0, 0.7]": "[0]"}
    )
    plan.write_text(plan.read_text().replace("[window]", '[window]\nstart_timeout = "3s"'))
    out = desk.folder / "telling"
    code, errors = run_until_late(desk, plan, out, lambda: all(path.read_text() for path in desk.job_logs()))
    assert code == 1, errors
    said = one_sentence(errors)
    assert "(ranks that stepped an optimizer: S0 0 of 1, S1 0 of 1, S3 0 of 1)" in said
    assert re.search(r": S3: OSError: \[Errno 28\] No space left on device \(.*job\.out\); S0, S1: waiting \(", said)
    assert status(out)[0] == "failed"
    assert not [path for path in desk.folder.glob("disk of *") if list(path.glob("*"))], "nothing stays on the hosts"


def test_a_disk_that_fills_up_under_a_job_is_the_reason_that_is_told(desk: Desk) -> None:
    """S3 records nothing any more and cannot say so, as its words have no room either."""
    disk = desk.folder / "disk of S3"
    disk.mkdir(exist_ok=True)
    words = f"[ {{host}} = S3 ] && head -c 100000000 /dev/zero > '{disk}/fill'; sleep 60"
    plan = desk.plan("filling", {**own_command("sh", "-c", words), "[0, 0.7]": "[0]"})
    plan.write_text(plan.read_text().replace("[window]", '[window]\nstart_timeout = "3s"'))
    desk.servers.kill("S3")
    desk.servers.start("S3", f"mount -t tmpfs -o size=40m tmpfs '{disk}'")
    try:
        code, errors = run_until_late(
            desk,
            plan,
            desk.folder / "filling",
            lambda: os.statvfs(f"{desk.servers.root('S3')}{disk}").f_bavail == 0,
        )
    finally:
        desk.servers.kill("S3")
        desk.servers.start("S3")
    assert code == 1, errors
    said = one_sentence(errors)
    assert "does it step an optimizer" not in said
    assert re.search(rf"S3 0 of 1\): S3: {re.escape(str(disk))} has 0 B left", said)


def test_several_ranks_by_torchrun_with_variables_and_a_folder_of_their_own(desk: Desk) -> None:
    folder = desk.folder / "my job"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    launch = ["{python}", "-m", "torch.distributed.run", "--nnodes={hosts}", "--node-rank={host_rank}"]
    launch += ["--nproc-per-node={ranks}", "--master-addr={master_addr}", "--master-port={master_port}", "train.py"]
    more = f'launch = "host"\ndirectory = "{folder}"\nenvironment = {{ MINE = "a b", NCCL_DEBUG = "WARN" }}\n'
    changes = own_command(*launch, more=more) | {
        "[0, 0.7]": "[0]",
        'workers = ["S0", "S1", "S3"]': 'workers = ["S1", "S3"]',
    }
    changes |= {'ssh = "S1.lab"': 'ssh = "S1.lab"\ngpus = [2, 3]', 'ssh = "S3.lab"': 'ssh = "S3.lab"\nranks = 1'}
    changes |= {"i_may_load": 'ports = "22000-22009"\ni_may_load'}
    out = desk.folder / "torchrun"
    done = desk.run("sweep", desk.plan("torchrun", changes), "-o", out, "--series", "mine-iperf")
    assert done.returncode == 0, done.stderr
    (series,) = (out / "series").glob("mine-*")
    said = "".join(path.read_text() for path in series.glob("nodes/*/log/job*.out"))
    found = sorted(re.findall(r"rank (\d) of 3, (\S+) port (\d+) gpus (\S+) (.*)", said))
    master = SPEC.training_ip("S1")
    assert [one[0] for one in found] == ["0", "1", "2"], said
    assert {(one[1], one[4]) for one in found} == {(master, "a b in my job")}
    assert [one[3] for one in found] == ["2,3", "2,3", "all"]
    assert all(22000 <= int(one[2]) <= 22009 for one in found)
    assert len(list(series.glob("nodes/S1/steps/rank*.rec"))) == 2


def test_a_replay_goes_from_training_address_to_training_address(desk: Desk) -> None:
    write_workload(small_messages(), desk.folder / "messages")
    nodes = [word for host in WORKERS for word in ("--node", f"{SPEC.training_ip(host)}:5101")]
    kind = ("--kind", "workload", "--from", desk.folder / "messages", "--iterations", "1000")
    made = desk.run("traffic", "plan", *kind, *nodes, "-o", desk.folder / "replay.flows")
    assert made.returncode == 0, made.stderr
    command = ["env", "RINGTAP_TOKEN=test", "{python}", "-m", "ringtap", "traffic", "send"]
    command += [str(desk.folder / "replay.flows"), "--as", "{address}", "--receive"]
    plan, out = desk.plan("replay", own_command(*command) | {"[0, 0.7]": "[0]"}), desk.folder / "replay"
    done = desk.run("sweep", plan, "-o", out, "--series", "mine-iperf")
    assert done.returncode == 0, done.stderr
    (point,) = ringtap.open_sweep(out).points.to_dict("records")
    assert point["iterations"] >= 5
    # as on the testbed: what a worker sends of a million bytes, in frames with 5 % of headers
    assert point["unscaled_training_bps"] * point["mean_s"] / 8 == pytest.approx(4 / 3 * 1e6 * 1.05, rel=0.1)


def test_a_parameter_server_on_a_server_that_does_not_train(desk: Desk) -> None:
    changes = {
        "[0, 0.7]": '[0]\ncollective = ["parameter-server"]',
        'workers = ["S0", "S1", "S3"]': 'workers = ["S0", "S1", "S3"]\nservers = ["S2"]',
    }
    out = desk.folder / "server"
    done = desk.run("sweep", desk.plan("server", changes), "-o", out)
    assert done.returncode == 0, done.stderr
    (point,) = ringtap.open_sweep(out).points.to_dict("records")
    # S0 gets the parameters once, where a ring of three would bring 4/3 of them; in frames with 5 % of headers
    assert point["unscaled_training_bps"] * point["mean_s"] / 8 == pytest.approx(1e6 * 1.05, rel=0.06)
    # three workers push over the one link of S2: 3 MB of 250 Mbit/s, beside 50 ms of computing in part
    assert point["mean_s"] > 0.1


def as_version_0_1_wrote_it(path: Path) -> None:
    """Take from a run's plan the keys of later versions, and give clusters that version's number of retries."""
    info = json.loads(path.read_text())
    plan = info["plan"]
    for part, names in (
        (plan["topology"], ("ports", "environment")),
        *((one, ("job_python", "ranks", "gpus", "environment")) for one in plan["topology"]["machines"]),
        *((one, ("launch", "directory", "environment")) for one in plan["models"]),
    ):
        for name in names:
            del part[name]
    plan["window"]["retries"] = 0
    path.write_text(json.dumps(info))


def test_a_plan_corrected_where_nothing_was_measured_goes_on(desk: Desk) -> None:
    """The second model's interpreter is wrong: found after the first one's points, and mended."""
    broken = OWN.format(command='["sh", "-c", "exit 3"]')
    plan = desk.plan("corrected", {"[0, 0.7]": "[0]", 'compute = "50ms"\nlayers = 8': f"command = {json.dumps(MARKS)}"})
    good = plan.read_text()
    plan.write_text(good + broken)
    out = desk.folder / "corrected"
    done = desk.run("sweep", plan, "-o", out)
    assert done.returncode == 1, done.stderr
    assert re.search(r"mine on S\d ended with exit code 3 before its measurement did", one_sentence(done.stderr))
    assert len(read_json_lines(out / "points.jsonl")[0]) == 1
    standing = desk.run("status", out)
    assert standing.returncode == 0, standing.stderr
    assert re.search(r"small-iperf +1 of 1 points?, complete", standing.stdout)
    assert re.search(r"mine-iperf +0 of 1 points?, stopped: mine on S\d ended", standing.stdout)
    assert "--resume" in standing.stdout

    plan.write_text(good.replace("sleep(0.05)", "sleep(0.04)") + broken)
    done = desk.run("sweep", plan, "-o", out, "--resume")
    assert done.returncode == 2
    assert "measured with another plan (different: models.small.command)" in one_sentence(done.stderr)
    plan.write_text(good + broken.replace("exit 3", "exit 4"))
    as_version_0_1_wrote_it(out / "run.json")
    done = desk.run("sweep", plan, "-o", out, "--resume")
    words = "The plan has changed in what no measured point depends on: "
    (told,) = (line.removeprefix(words) for line in done.stderr.splitlines() if line.startswith(words))
    assert sorted(told.split(", ")) == ["models.mine.command", "window.retries"]
    assert "ended with exit code 4" in one_sentence(done.stderr)
    info = json.loads((out / "run.json").read_text())
    assert [sorted(one["keys"]) for one in info["plan_changes"]] == [["models.mine.command", "window.retries"]]
    assert len(read_json_lines(out / "points.jsonl")[0]) == 1, "what was measured is kept and not measured again"
    assert info["plan"]["models"][1]["command"] == ["sh", "-c", "exit 4"]


def test_what_a_killed_sweep_left_on_hosts_is_removed_by_a_command(desk: Desk) -> None:
    # the window lasts until the sweep is killed, which a busy machine does late
    longer = {'min_time = "2500ms"': 'min_time = "100s"', 'max_time = "10s"': 'max_time = "100s"'}
    plan, out = desk.plan("left", longer | {"[0, 0.7]": "[0]"}), desk.folder / "left"
    with ended(desk.start("sweep", plan, "-o", out)) as process:
        wait_for(lambda: list(out.glob("series/small-*/nodes/S1/nic/nic.rec")), process)
        # the hosts share a folder of sockets, which may have those of agents that other tests killed
        removed: set[str] = set()
        assert removed_folders(desk, plan) == removed
        assert desk.run("status", out).stdout.startswith(f"{out}: running: 0 of 1 point")
        process.kill()
    assert desk.run("status", out).stdout.startswith(f"{out}: partial: 0 of 1 point; it was ended before it could say")
    end_s = time.monotonic() + 30
    while removed < {"S0", "S1", "S3"}:
        removed |= removed_folders(desk, plan)
        assert time.monotonic() < end_s
    assert not [path for path in desk.folder.glob("disk of *") if list(path.glob("*"))]


def removed_folders(desk: Desk, plan: Path) -> set[str]:
    """Hosts from which ``--clean`` removes a folder now."""
    done = desk.run("sweep", plan, "--clean", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["not_reached"] == {}
    return {one["host"] for one in found["removed"] if not one["path"].endswith(".lock")}


@pytest.mark.alone(2)
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
