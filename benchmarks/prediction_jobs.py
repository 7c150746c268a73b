"""Iteration times of six jobs, predicted from a profile of two ranks by simulation, against the jobs themselves.

python benchmarks/prediction_jobs.py FOLDER [--kinds NAME,...] [--ranks N,...] [--slower N] [-o FILE]

Each job is profiled with two ranks on this machine, its workload is scaled to more ranks, and the job runs on the
virtual testbed, a rank per host. With --slower N, computation takes N times as long and links have an Nth of the rate.
The six jobs with 3 and 4 ranks take 5 minutes, and root or user namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _prediction_job import KINDS
from _result import write_result

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.ethernet import ETHERNET_MTU, payload_share

RATE_BPS, COMPUTE_S, PORT = 200_000_000, 0.1, 29_711
PAYLOAD_SHARE = payload_share(ETHERNET_MTU)
PROFILED, ITERATIONS, WARM_UP = 30, 16, 3
LIMIT_S = 300
JOB = Path(__file__).with_name("_prediction_job.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(*words: object) -> str:
    """Run ringtap, and return what it prints."""
    command = [sys.executable, "-m", "ringtap", *map(str, words)]
    environment = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def profiled(kind: str, slower: float, folder: Path) -> Path:
    """Return the workload of the job of two ranks, as it computes and communicates on this machine."""
    workload, recorded = folder / f"{kind}-2", folder / f"{kind}-profile"
    if workload.exists():
        return workload
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    job = ["--nproc-per-node", 2, JOB, kind, "--compute-s", slower * COMPUTE_S, "--iterations", PROFILED]
    run("run", "--profile", "-o", recorded, "--", *launcher, *job)
    run("workload", "new", "--run", recorded, "-o", workload)
    return workload


def simulated_s(workload: Path, ranks: int, slower: float, folder: Path) -> float:
    """Return the simulated iteration time of a workload with more ranks."""
    scaled = folder / f"{workload.name}-{ranks}"
    if not scaled.exists():
        run("workload", "scale", workload, "--workers", ranks, "-o", scaled)
    rate = f"{round(RATE_BPS / slower * PAYLOAD_SHARE)}bit"
    found = json.loads(run("workload", "simulate", scaled, "--capacity", rate, "--json"))
    return float(found["points"][0]["iteration_s"])


def measured_s(kind: str, ranks: int, slower: float, spec: TestbedSpec, folder: Path) -> list[float]:
    """Return the iteration times of the job on the testbed."""
    times = folder / f"{kind}-{ranks}.json"
    jobs = []
    for rank in range(ranks):
        enter = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", spec.name, spec.hosts[rank]]
        command = [*enter, sys.executable, JOB, kind, "--compute-s", slower * COMPUTE_S]
        command += ["--iterations", ITERATIONS, "--times", times]
        world = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": spec.training_ip(spec.hosts[0]), "MASTER_PORT": PORT}
        more = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "eth0"} | {name: str(value) for name, value in world.items()}
        jobs.append(subprocess.Popen(list(map(str, command)), env=os.environ | more, stderr=subprocess.DEVNULL))
    try:
        for job in jobs:
            job.wait(LIMIT_S * slower)
    finally:
        for job in jobs:
            job.terminate()
    ends = json.loads(times.read_text())[WARM_UP:]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for profiles and workloads; kept")
    parser.add_argument("--kinds", default=",".join(KINDS), help="jobs, with commas between")
    parser.add_argument("--ranks", default="3,4", help="numbers of ranks, with commas between")
    parser.add_argument("--slower", type=float, default=1, metavar="N", help="factor of every time")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    ranks = list(map(int, options.ranks.split(",")))
    workloads = {kind: profiled(kind, options.slower, options.folder) for kind in options.kinds.split(",")}
    spec = TestbedSpec("predict", tuple(f"S{number}" for number in range(max(ranks))), round(RATE_BPS / options.slower))
    rows: list[dict[str, Any]] = []
    print("| job | ranks | job, ms | simulated, ms | error |\n|---|---|---|---|---|")
    with RunningTestbed(spec):
        for kind, workload in workloads.items():
            for count in ranks:
                times_s = measured_s(kind, count, options.slower, spec, options.folder)
                mean_s, error_s = statistics.fmean(times_s), statistics.stdev(times_s) / len(times_s) ** 0.5
                found_s = simulated_s(workload, count, options.slower, options.folder)
                row = {"job": kind, "ranks": count, "job_s": mean_s, "job_error_s": error_s, "simulated_s": found_s}
                rows.append(row | {"error": found_s / mean_s - 1})
                job_ms = f"{1e3 * mean_s:.1f} ± {1e3 * error_s:.1f}"
                cells = kind, count, job_ms, f"{1e3 * found_s:.1f}", f"{rows[-1]['error']:+.1%}"
                print("", *cells, "", sep=" | ", flush=True)
    write_result({"points": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
