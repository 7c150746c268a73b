"""Jobs that share a host which is reached by ssh, on hosts whose clocks differ: kept at a shift all the same."""

import json
import os
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.analysis.runs.read_binary_records import read_records
from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.analysis.sweeps.sharing import sharing_points
from tests.testbed.sshd import SshServers
from tests.testbed.sweeps import run

pytestmark = [
    pytest.mark.shares,
    pytest.mark.together("sweeps"),
    pytest.mark.usefixtures("unchanged_machine"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build clocks that differ"),
]
# of all processes of a host, also the kernel's stamps of what they receive
SHIM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
static void shift(struct timespec *now) {
    long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + atoll(getenv("CLOCK_AHEAD_NS"));
    now->tv_sec = ns / 1000000000LL;
    now->tv_nsec = ns % 1000000000LL;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && clock == CLOCK_REALTIME) shift(now);
    return result;
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t (*real)(int, struct msghdr *, int) = dlsym(RTLD_NEXT, "recvmsg");
    ssize_t result = real(fd, message, flags);
    if (result < 0) return result;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part))
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(part), sizeof at);
            shift(&at);
            memcpy(CMSG_DATA(part), &at, sizeof at);
        }
    return result;
}
"""
AHEAD_NS = {"S0": 0, "S1": 37_000_000, "S2": -61_000_000}
SPEC = TestbedSpec(name=f"sshj{os.getpid() % 10**6}", hosts=("desk", *AHEAD_NS), rate_bps=200_000_000)
PLAN = """\
[sweep]
name = "sharing"
capacity = "200mbit"
offsets = ["20ms"]

[window]
warmup_iterations = 3
settle = "100ms"
min_time = "1s"
min_iterations = 15
retries = 0

[cluster]
reach = "ssh"
"""
HOST = """
[[hosts]]
name = "{name}"
ssh = "{name}.lab"
training = "{address}"
workdir = "{folder}/disk of {name}"
"""
JOB = """
[[jobs]]
name = "{name}"
model = "own"
parameters = 1
command = ["{{python}}", "{script}"]
workers = ["{first}", "{second}"]
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[SshServers]:
    """Servers with clocks and boots of their own."""
    (tmp_path / "shim.c").write_text(SHIM)
    library = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"], check=True, timeout=60)
    with RunningTestbed(SPEC, verify=False), SshServers(tmp_path / "servers", SPEC) as found:
        for number, (host, ahead_ns) in enumerate(AHEAD_NS.items()):
            found.kill(host)
            boot = tmp_path / f"boot of {host}"
            boot.write_text(f"00000000-0000-0000-0000-{number:012d}\n")
            mount = f"mount --bind {shlex.quote(str(boot))} /proc/sys/kernel/random/boot_id"
            found.start(host, mount, f"LD_PRELOAD={library} CLOCK_AHEAD_NS={ahead_ns}")
        yield found


def grid_ns(node: Path, period_ns: int) -> float:
    """Place of a rank's grid within the period, by the true time: where its pauses ended."""
    (path,) = node.glob("steps/rank*.rec")
    table = read_records(path)[0]
    ends_ns = (table["end_ns"] + table["pause_ns"])[table["pause_ns"] > 0] - AHEAD_NS[node.name]
    origin_ns = int(ends_ns.iloc[0])
    half_ns = period_ns // 2
    return (origin_ns + statistics.median((ends_ns - origin_ns + half_ns) % period_ns - half_ns)) % period_ns


@pytest.mark.alone(1)
def test_jobs_are_kept_at_a_shift_by_clocks_that_differ(servers: SshServers, tmp_path: Path) -> None:
    script, out = Path(__file__).with_name("sharing_rank.py"), tmp_path / "run"
    hosts = [HOST.format(name=name, address=SPEC.training_ip(name), folder=tmp_path) for name in AHEAD_NS]
    pairs = {"a": ("S0", "S1"), "b": ("S1", "S2")}
    jobs = [JOB.format(name=name, script=script, first=two[0], second=two[1]) for name, two in pairs.items()]
    (tmp_path / "plan.toml").write_text(PLAN + "".join((*hosts, *jobs)))
    ssh = shlex.join([str(servers.folder / "bin" / "ssh"), "-F", str(servers.config)])
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {ssh} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("sweep", tmp_path / "plan.toml", "-o", out, environment=path)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in (out / "shared.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == ["alone", "alone", "20ms"]
    assert lines[2]["ports"] == [{"node": "S1", "nic": "eth0", "direction": way} for way in ("rx", "tx")]
    for host, ahead_ns in AHEAD_NS.items():
        clock = lines[2]["clocks"][host]
        assert abs(clock["offset_ns"] - ahead_ns) <= clock["error_ns"]
    a, b = lines[2]["jobs"]
    assert (a["shift_s"], b["shift_s"], a["period_s"]) == (0.0, 0.02, b["period_s"])
    period_ns = round(a["period_s"] * 1e9)
    first_ns = grid_ns(out / a["directory"] / "nodes" / "S0", period_ns)
    for job, host, shift_ns in ((a, "S1", 0), (b, "S1", 20_000_000), (b, "S2", 20_000_000)):
        away_ns = (grid_ns(out / job["directory"] / "nodes" / host, period_ns) - first_ns - shift_ns) % period_ns
        # a sleep ends late by less than a millisecond, on a busy machine by some
        assert min(away_ns, period_ns - away_ns) < 5e6, (job["name"], host)
    # the job without the reference host has its clock all the same, so that the phases of both are by one clock
    assert (out / b["directory"] / "nodes" / "S0" / "clock" / "clock.json").is_file()
    points = sharing_points(found) if isinstance(found := read_run(out), SweepRun) else []
    # 40 ms of computation, and 500 kB at 200 Mbit/s, of which the token bucket lets 64 KiB pass at once
    assert 0.055 <= points[0].jobs[0].mean_s <= 0.12
