"""Sweeps over ssh that are not alone: other sweeps on the same servers, other people's traffic, a link that is cut."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path

import pytest

import ringtap
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.testbed_options import SWITCH
from tests.testbed.sshd import SshServers
from tests.testbed.sweeps import one_sentence, status, wait_for
from tests.testbed.test_ssh_sweep import MARKS, SPEC, Desk
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.alone(1), pytest.mark.usefixtures("unchanged_machine")]
QUICK = {'compute = "50ms"\nlayers = 8': f"command = {json.dumps(MARKS)}"}
SHORT = {"loads = [0, 0.7]": "loads = [0]", 'min_time = "2500ms"': 'min_time = "500ms"'}
# on a busy machine, a fault takes seconds to begin
LONGER = {"loads = [0, 0.7]": "loads = [0.1]", 'min_time = "2500ms"': 'min_time = "7s"'}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with RunningTestbed(SPEC, verify=False), SshServers(folder / "servers", SPEC) as servers:
        yield Desk(folder, servers)


def test_two_sweeps_at_once_are_refused_and_a_killed_ones_hosts_are_free(desk: Desk, tmp_path: Path) -> None:
    endless = {'min_time = "2500ms"': 'min_time = "90s"', '"10s"': '"90s"'}
    plan, out = desk.plan("endless", QUICK | endless), tmp_path / "first"
    with ended(desk.start("sweep", plan, "-o", out)) as first:
        wait_for((out / "run.json").exists, first)
        second = desk.run("sweep", plan, "-o", tmp_path / "second")
        assert second.returncode == 2
        words = one_sentence(second.stderr)
        assert f"S0, S1, S2, S3 in use by {getuser()}'s sweep, process {first.pid} on " in words
        assert ", since 2" in words
        assert ", expected to end at 2" in words
        assert not (tmp_path / "second").exists()
        again = desk.run("sweep", plan, "-o", out, "--resume")
        assert again.returncode == 2
        assert f"{out} is being measured by {getuser()}'s sweep, process {first.pid} on " in one_sentence(again.stderr)
        assert status(out) == ("running", "")
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
    done = desk.run("sweep", desk.plan("short", QUICK | SHORT), "-o", tmp_path / "third")
    assert done.returncode == 0, done.stderr


# before all others, as traffic from elsewhere does not depend on this machine
OTHERS = """
import contextlib, glob, os, socket, sys, time
with contextlib.suppress(PermissionError):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
to, bytes_per_s, begin_s, sent = (sys.argv[1], 9), float(sys.argv[2]), time.monotonic(), 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    print("sends", flush=True)
    while time.monotonic() < begin_s + 300 and not (sys.argv[3] and glob.glob(sys.argv[3])):
        for _ in range(20):
            while sent < bytes_per_s * (time.monotonic() - begin_s):
                sent += sender.sendto(bytes(1400), to)
            time.sleep(0.002)
"""


@contextmanager
def others_send(bps: float, until: str = "") -> Iterator[None]:
    """Other people's traffic from S1 to S0, of so much payload, until there is a file, at most until the block ends."""
    inside = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", SPEC.name, "S1"]
    sender = [sys.executable, "-c", OTHERS, SPEC.training_ip("S0"), str(bps / 8), until]
    with ended(subprocess.Popen([*inside, *sender], stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sends\n"
        yield
        process.terminate()
        process.wait(60)


def test_other_traffic_is_seen_before_the_sweep_and_in_its_windows(desk: Desk, tmp_path: Path) -> None:
    plan = desk.plan("others", SHORT)
    with others_send(50e6):
        refused = desk.run("sweep", plan, "-o", tmp_path / "refused")
        assert refused.returncode == 1
        assert "S0 took in " in (words := one_sentence(refused.stderr)), words
        assert "others use the links while the sweep does not yet" in words
        forced = desk.run("sweep", plan, "-o", tmp_path / "forced", "--force")
    assert forced.returncode == 0, forced.stderr
    assert "warning: small-iperf: S0 took in " in forced.stderr
    (noted,) = read_json_lines(tmp_path / "forced" / "points.jsonl")[0]
    assert noted["other_bps"] == pytest.approx(51.5e6, rel=0.1), "50 Mbit/s of payload, and headers"
    assert any(words.startswith("S1 sent ") for words in noted["others"])
    assert not read_json_lines(tmp_path / "forced" / "rejected.jsonl")[0]
    report = desk.run("report", tmp_path / "forced")
    assert report.returncode == 0, report.stderr
    checks = json.loads((tmp_path / "forced" / "report" / "report.json").read_text())["checks"]
    (alone,) = [
        check for check in checks if check["expected"] == "the links were up and carried only the sweep's traffic"
    ]
    assert not alone["ok"]
    assert alone["found"].startswith("1 of 1 points disturbed: S0 took in ")
    assert "Disturbed, the point at " in (tmp_path / "forced" / "report" / "report.html").read_text()
    (point,) = ringtap.open_run(tmp_path / "forced").points.to_dict("records")
    assert point["unscaled_training_bps"] == pytest.approx(
        point["unscaled_total_bps"] - point["unscaled_cross_bps"] - noted["other_bps"]
    )


def rank_of(run: Path, node: str) -> int:
    """The pid of the rank whose steps are recorded at a node."""
    (log,) = (path for path in (run / "nodes" / node / "steps").glob("rank*.rec") if path.suffixes == [".rec"])
    return int(log.stem.rpartition("-")[2])


# log of the cross traffic of a try on the host that sends it, where it begins with the try: it comes here later
TRY = "disk of S2/small-iperf-1-*/nodes/S2/sent/{}.log"


def test_a_window_with_a_cut_link_a_stall_or_other_traffic_is_measured_again(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ended(desk.start("sweep", desk.plan("cut", LONGER), "-o", out)) as sweep:
        wait_for(lambda: list(desk.folder.glob(TRY.format("000"))), sweep)
        before = desk.sent_bytes()
        wait_for(lambda: desk.sent_bytes() > before + 1_000_000, sweep)
        time.sleep(1.5)  # the window is open, and stays open while a rank stands still
        rank = rank_of(out / "series" / "small-iperf-1", "S1")
        desk.servers.run("S1", "kill", "-STOP", str(rank))
        stop_s = before_s = time.monotonic()
        desk.servers.run(SWITCH, "ip", "link", "set", "to-S1", "down")
        down_s = time.monotonic()
        time.sleep(1.0)
        least_s = time.monotonic() - down_s
        desk.servers.run(SWITCH, "ip", "link", "set", "to-S1", "up")
        most_s = time.monotonic() - before_s
        time.sleep(max(0.0, stop_s + 3.0 - time.monotonic()))
        stopped_s = time.monotonic() - stop_s
        desk.servers.run("S1", "kill", "-CONT", str(rank))
        wait_for(lambda: list(desk.folder.glob(TRY.format("000-1"))), sweep)
        with others_send(50e6, until=f"{desk.folder}/{TRY.format('000-2')}"):
            wait_for(lambda: list(desk.folder.glob(TRY.format("000-2"))), sweep)
        errors = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 0, errors
    cut, others = read_json_lines(out / "rejected.jsonl")[0]
    found = re.match(r"eth0 of S1 had no link for ([\d.]+) s; ", cut["why"])
    assert found, cut
    assert least_s - 0.2 <= float(found[1]) <= most_s + 0.2, "samples of counters are some 10 ms apart, the words 0.1 s"
    stall = re.search(r"; an iteration took ([\d.]+) s, usually 0\.\d* s, with the bottleneck \d+% used", cut["why"])
    assert stall, cut
    assert stopped_s - 0.1 <= float(stall[1]) < stopped_s + 7
    assert cut["why"] in errors
    assert [words[:8] for words in others["others"]] == ["S0 took ", "S1 sent "], others
    assert others["cut"] == []
    (point,) = read_json_lines(out / "points.jsonl")[0]
    assert point["cut"] == point["others"] == []
    assert point["other_bps"] < 0.02 * 250e6
    (shown,) = ringtap.open_run(out).points.to_dict("records")
    assert shown["disturbed"] == ""
    (generator,) = json.loads((out / "run.json").read_text())["precheck"]
    assert generator["judged_by"] == "acknowledged bytes"
    assert generator["reached_bps"] == pytest.approx(generator["total_bps"], rel=0.05)
    assert generator["others"] == []
