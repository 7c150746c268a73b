"""Runs whose clock is really set meanwhile: every process sees CLOCK_REALTIME stepped, CLOCK_MONOTONIC goes on."""

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import describe
from ringtap.analysis.runs.run import read_run
from ringtap.core.run_directory import read_json, write_json
from tests.unit.agent_processes import ROOT, ended, python, wrapped

pytestmark = [pytest.mark.shares, pytest.mark.together]

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int (*read_clock)(clockid_t, struct timespec *);
static long step(void) {
    const char *mark = getenv("CLOCK_SET"), *by = getenv("CLOCK_SET_BY_S");
    return mark && by && access(mark, F_OK) == 0 ? atol(by) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!read_clock) read_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int result = read_clock(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += step();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}
"""
ITERATIONS, SET_AT, BYTES = 60, 30, 200_000
# a loop that marks its iterations and sends as much in each, once sockets are sampled; the clock is set in one of them
JOB = f"""
import os, socket, threading, time
from pathlib import Path
import ringtap
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1])
sender = socket.create_connection(server.getsockname())
taken, _ = server.accept()
def drain():
    while taken.recv(1 << 16):
        pass
reader = threading.Thread(target=drain)
reader.start()
log = Path(os.environ["RINGTAP_RUN"], "nodes", os.environ["RINGTAP_NODE"], "sockets", "sockets.rec")
while not log.exists() or log.stat().st_size <= len(log.open("rb").readline()):
    time.sleep(0.01)
for number in range({ITERATIONS}):
    time.sleep(0.03)
    if number == {SET_AT}:
        Path(os.environ["CLOCK_SET"]).touch()
    time.sleep(0.03)
    sender.sendall(bytes({BYTES}))
    ringtap.step()
sender.close()
reader.join()
taken.close()
server.close()
"""
UNITS_S = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3}
OPTIONS = ("--collect", "nic,sockets,steps", "--every", "10ms")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a clock that can be set")
def test_iterations_and_bytes_are_the_same_when_the_clock_is_set(tmp_path: Path) -> None:
    library = tmp_path / "shim.so"
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"], check=True, timeout=60)
    for by_s in (1, -1, 3600, -3600):
        run = tmp_path / f"run{by_s:+d}"
        more = {"LD_PRELOAD": str(library), "CLOCK_SET": str(tmp_path / f"set{by_s:+d}"), "CLOCK_SET_BY_S": str(by_s)}
        environment = dict(os.environ) | more | {"PYTHONPATH": str(ROOT)}
        with ended(wrapped(run, *python(JOB), options=OPTIONS, env=environment)) as process:
            port, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        check(run, by_s, int(port))
        (run / "nodes" / "here" / "clock" / "clock.json").unlink()
        check(run, by_s, int(port))  # by what the agent itself has noted
        item = read_json(run / "nodes" / "here" / "node.json")
        write_json(run / "nodes" / "here" / "node.json", item | {"clock_steps": []})
        check_without_account(run, int(port))


def check_without_account(path: Path, port: int) -> None:
    """Without any account of the clock its iterations and samples go by the other clock, and the text says so."""
    steps, job = read_run(path).steps, open_job(path)
    true_s = [(end - start) / 1e9 for start, end in pairwise(steps["end_mono_ns"].tolist())]
    assert job.iterations["iteration_s"].tolist() == pytest.approx(true_s, abs=1e-6)
    (flow,) = job.flows[job.flows["destination_port"] == port].to_dict("records")
    assert flow["bytes_per_iteration"] == pytest.approx(BYTES, rel=0.15)
    text = "\n".join(describe(summarize(job)))
    assert "the clock of here was set during the run and clock/clock.json does not say when" in text


def check(path: Path, by_s: int, port: int) -> None:
    steps = read_run(path).steps
    jumps = np.diff(steps["end_ns"] - steps["end_mono_ns"])
    assert np.abs(jumps).max() == pytest.approx(abs(by_s) * 1e9, rel=0.2)  # the records are of a clock that was set
    true_s = [(end - start) / 1e9 for start, end in pairwise(steps["end_mono_ns"].tolist())]
    assert read_run(path).iterations["iteration_s"].tolist() == pytest.approx(true_s, abs=1e-6)
    job = open_job(path)
    assert job.iterations["iteration_s"].tolist() == pytest.approx(true_s, abs=1e-6)
    assert (job.iterations["iteration_s"] > 0).all()
    # each iteration sends as much; the samples at both ends may miss some
    assert job.iterations["other_bytes"].notna().mean() > 0.9
    (flow,) = job.flows[job.flows["destination_port"] == port].to_dict("records")
    assert flow["bytes_per_iteration"] == pytest.approx(BYTES, rel=0.15)
    data = summarize(job)
    assert data["nodes"][0]["clock_steps"] == 1
    text = "\n".join(describe(data))
    said = re.search(r"the clock of here was set during the run \(([+-])([^)]+)\)", text)
    assert said is not None, text
    size_s = sum(float(number) * UNITS_S[unit] for number, unit in re.findall(r"([\d.]+) (\w+)", said[2]))
    assert (said[1] == "-", size_s) == (by_s < 0, pytest.approx(abs(by_s), abs=0.5 if abs(by_s) < 60 else 1))
