"""Simulated times, run time and memory beside ASTRA-sim and LogGOPSim (docs/commands/workload.md).

python benchmarks/other_simulators.py --astra-sim PROGRAM [--astra-sim PROGRAM] --loggopsim PROGRAM [-o FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _checkout import ROOT
from _machine import CpuTimes, describe
from _result import write_result

from ringtap.workload.astra_sim import CONFIGURATION
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulated_iterations import simulate
from ringtap.workload.simulator_programs import run_simulator
from ringtap.workload.topologies import Topology, ring, star, torus
from ringtap.workload.workload import Workload, check_workload, read_workload

RATE_BPS, LATENCY_S, SIZE_BYTES = 25e9, 1e-5, 2**20
RINGTAP = [sys.executable, "-m", "ringtap"]
OPTIONS = ["--workload-configuration=rank", *(f"--{name}-configuration={file}" for name, file in CONFIGURATION.items())]
PAIRS = 3  # runs of each program, one after the other


# a program's peak memory is at least that of what starts it: a small Python, 9 MB
START = """
import os, resource, sys
os.chdir(sys.argv[1])
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


def run(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a program, and return its time in s and its peak memory in MB."""
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-ISc", START, str(folder), *command],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    return time.perf_counter() - begin_s, int(done.stdout) / 1024


def costs(ranks: int, astra: Path, loggopsim: Path, folder: Path) -> dict[str, Any]:
    """Return the least time and the most memory of two iterations of VGG-16 here, and of one elsewhere."""
    run([*RINGTAP, "workload", "new", "--model", "vgg16", "--workers", str(ranks), "-o", "vgg"], folder)
    run([*RINGTAP, "workload", "export", "vgg", "--to", "chakra", "-o", "astra"], folder)
    export = run([*RINGTAP, "workload", "export", "vgg", "--to", "goal", "-o", "vgg.goal"], folder)
    convert = [str(loggopsim.with_name("txt2bin")), "-i", "vgg.goal", "-o", "vgg.bin"]
    run(convert, folder)
    programs = {
        "ringtap, 2 iterations": ([*RINGTAP, "workload", "simulate", "vgg", "--iterations", "2"], folder),
        "ASTRA-sim, 1": ([str(astra), *OPTIONS], folder / "astra"),
        "LogGOPSim, 1": (
            [
                str(loggopsim),
                "-f",
                "vgg.bin",
                "-L",
                "0",
                "-G",
                "320",
                "-o",
                "0",
                "-g",
                "0",
                "-O",
                "0",
                "-S",
                "2147483647",
            ],
            folder,
        ),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(PAIRS):
        for name, (command, where) in programs.items():
            runs[name].append(run(command, where))
    found = {name: (min(s for s, _ in each), max(mb for _, mb in each)) for name, each in runs.items()}
    return {"ranks": ranks} | found | {"goal": (*export, (folder / "vgg.goal").stat().st_size / 1e6)}


def one(kind: Collective, ranks: int) -> Workload:
    """Return a workload of one collective."""
    attributes = {"comm_type": int(kind), "comm_size": SIZE_BYTES}
    found = Workload([[Node(1, "c", NodeType.COMM_COLL, attributes=dict(attributes))] for _ in range(ranks)])
    check_workload(found)
    return found


def model(name: str, ranks: int, folder: Path) -> Workload:
    """Return an iteration of a model."""
    run([*RINGTAP, "workload", "new", "--model", name, "--workers", str(ranks), "-o", name], folder)
    return read_workload(folder / name)


def pipeline(ranks: int) -> Workload:
    """Return a workload in which each rank computes, and sends to the next one."""
    traces = []
    for rank in range(ranks):
        message = {"is_cpu_op": False, "comm_size": SIZE_BYTES, "comm_tag": 0}
        trace = [Node(2, "compute", NodeType.COMP, [1] if rank else [], duration_us=500)]
        if rank:
            attributes = message | {"comm_src": rank - 1, "comm_dst": rank}
            trace.insert(0, Node(1, "receive", NodeType.COMM_RECV, attributes=attributes))
        if rank < ranks - 1:
            attributes = message | {"comm_src": rank, "comm_dst": rank + 1}
            trace.append(Node(3, "send", NodeType.COMM_SEND, [2], attributes=attributes))
        traces.append(trace)
    found = Workload(traces)
    check_workload(found)
    return found


def workloads(folder: Path) -> list[tuple[str, Workload, Topology, str]]:
    """Return the name of each workload, the workload, its network and the algorithm of all-reduce."""
    kinds, around = Collective, star(8, RATE_BPS)
    lowered = lower(one(kinds.ALL_REDUCE, 8), Algorithms())
    check_workload(lowered)
    return [
        ("ring all-reduce of 1 MiB, 4 ranks on a star", one(kinds.ALL_REDUCE, 4), star(4, RATE_BPS), "ring"),
        ("the same with 8 ranks", one(kinds.ALL_REDUCE, 8), around, "ring"),
        ("the same on a ring", one(kinds.ALL_REDUCE, 8), ring(8, RATE_BPS), "ring"),
        ("the same on `torus --sides 2x4`", one(kinds.ALL_REDUCE, 8), torus((2, 4), RATE_BPS), "ring"),
        ("the same as sends and receives", lowered, around, "ring"),
        ("`halving-doubling`, 8 ranks on a star", one(kinds.ALL_REDUCE, 8), around, "halving-doubling"),
        ("`double-tree`, 8 ranks on a star", one(kinds.ALL_REDUCE, 8), around, "double-tree"),
        ("all-gather of 1 MiB each, 8 ranks on a star", one(kinds.ALL_GATHER, 8), around, "ring"),
        ("reduce-scatter of 1 MiB, 8 ranks on a star", one(kinds.REDUCE_SCATTER, 8), around, "ring"),
        ("all-to-all of 1 MiB, 4 ranks on a star", one(kinds.ALL_TO_ALL, 4), star(4, RATE_BPS), "ring"),
        ("a pipeline of 4 ranks on a star", pipeline(4), star(4, RATE_BPS), "ring"),
        ("VGG-16, 4 ranks on a star", model("vgg16", 4, folder), star(4, RATE_BPS), "ring"),
        ("ResNet-50, 8 ranks on a star", model("resnet50", 8, folder), around, "ring"),
    ]


def times_s(programs: list[tuple[str, Path]], case: tuple[str, Workload, Topology, str]) -> list[float | None]:
    """Return the time of one iteration here and in other simulators; None where they cannot run it."""
    _, workload, network, all_reduce = case
    job = workload, network, Algorithms(all_reduce)
    found: list[float | None] = [simulate(*job, latency_s=LATENCY_S).iteration_s]
    for name, program in programs:
        if name == "loggopsim" and network.name != "star":
            found.append(None)
            continue
        cycles = run_simulator(name, program, *job, LATENCY_S, 600.0).cycles
        found.append(None if cycles is None else cycles / 1e9)
    return found


def main() -> int:
    """Print two tables and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--astra-sim", action="append", required=True, type=Path, metavar="PROGRAM")
    parser.add_argument("--loggopsim", required=True, type=Path, metavar="PROGRAM", help="with txt2bin beside it")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 256, 1000], metavar="N")
    options = parser.parse_args()
    before, found, lines = CpuTimes.now(), [], []
    with TemporaryDirectory(prefix="ringtap-") as temporary:
        folder = Path(temporary)
        programs = [("astra-sim", path.resolve()) for path in options.astra_sim]
        programs.append(("loggopsim", options.loggopsim.resolve()))
        print(f"| workload | ringtap |{' ASTRA-sim |' * len(options.astra_sim)} LogGOPSim |")
        print(f"|---|---|{'---|' * len(programs)}")
        for case in workloads(folder):
            here_s, *others_s = times_s(programs, case)
            lines.append({"what": case[0], "ringtap_s": here_s, "others_s": others_s})
            assert here_s is not None
            cells = ["" if each is None else f"{1e3 * each:.4g} ms ({each / here_s - 1:+.2%})" for each in others_s]
            print(f"| {case[0]} | {1e3 * here_s:.4g} ms | {' | '.join(cells)} |", flush=True)
        print("\n| ranks | program | time, s | peak memory, MB |\n|---|---|---|---|")
        for ranks in options.ranks:
            with TemporaryDirectory(prefix="ringtap-") as own:
                found.append(costs(ranks, *(program for _, program in programs[-2:]), Path(own)))
            for name, values in found[-1].items():
                if name != "ranks":
                    print(f"| {ranks} | {name} | {values[0]:.2f} | {values[1]:.0f} |", flush=True)
    about = describe() | {"others_pct": before.others_pct_since()}
    write_result({"about": about, "times": lines, "costs": found}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
