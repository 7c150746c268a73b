"""Communication patterns that ``ringtap structure`` names from packets alone, against those that the jobs have.

python benchmarks/patterns.py FOLDER [--workers N,...] [--models NAME,...] [--patterns NAME,...] [--recorded]

Each job runs on hosts of a virtual testbed, in random order, and tcpdump records the packets of each host. What is in
the folder is not recorded again; with --recorded, nothing is. All jobs take about an hour on two cores, and root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap

from ringtap.agents.testbed.launch import RunningTestbed, own_name
from ringtap.agents.testbed.topology import TestbedSpec

JOB = Path(__file__).with_name("_pattern_job.py")
WORKERS, MODELS = (4, 6, 8), ("resnet50", "vgg16")
RATE_BPS, ITERATIONS, SNAPLEN, PORT = 250_000_000, 20, 96, 29_500
# collective and its counts, by pattern
COLLECTIVES: dict[str, tuple[str, dict[str, int]]] = {
    "ring": ("ring", {}),
    "halving-doubling": ("halving-doubling", {}),
    "tree": ("tree", {}),
    "double-tree": ("double-tree", {"pieces": 2}),
    "hierarchical": ("hierarchical", {"group": 2}),
    "parameter-server": ("parameter-server", {}),
    "sharded-server": ("parameter-server", {"shards": 2}),
    "in-network": ("in-network", {"pieces": 4}),
    "gloo": ("gloo", {}),
    "fsdp": ("fsdp", {}),
    "all-to-all": ("all-to-all", {}),
    "pipeline": ("pipeline", {}),
}


# name that ringtap structure should give
NAMES = {
    "ring": "ring", "halving-doubling": "recursive halving and doubling", "tree": "tree",
    "double-tree": "double binary tree", "hierarchical": "hierarchical", "parameter-server": "star",
    "sharded-server": "sharded parameter server", "in-network": "star", "gloo": "ring",
    "fsdp": "ring in both directions", "all-to-all": "all-to-all", "pipeline": "pipeline",
}  # fmt: skip


def servers_of(pattern: str) -> int:
    """Return the number of hosts beside the workers."""
    collective, counts = COLLECTIVES[pattern]
    return {"parameter-server": counts.get("shards", 1), "in-network": 1}.get(collective, 0)


def record(testbed: RunningTestbed, pattern: str, workers: int, model: str, folder: Path) -> None:
    """Run a job and record the packets of its hosts."""
    collective, counts = COLLECTIVES[pattern]
    servers = servers_of(pattern)
    hosts = random.Random(f"{pattern} {workers} {model}").sample(testbed.hosts, workers + servers)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"MASTER_ADDR": testbed.address(hosts[0]), "MASTER_PORT": str(PORT)}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(workers)}
    environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    options = [text for name, count in counts.items() for text in (f"--{name}", str(count))]
    with ExitStack() as stack:

        def start(host: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                testbed.command(host, *words), env=environment | more, stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((partial / f"{host}.txt").open("ab")),
            )  # fmt: skip
            stack.callback(stop, process)
            return process

        for host in hosts:
            start(host, "tcpdump", "-i", "eth0", "-s", str(SNAPLEN), "-U", "-w", str(partial / f"{host}.pcap"))
        ranks = [
            start(
                host, sys.executable, str(JOB), collective, model, str(ITERATIONS), json.dumps(counts), RANK=str(rank)
            )
            for rank, host in enumerate(hosts[:workers])
        ]
        for number, host in enumerate(hosts[workers:]):
            server = [sys.executable, "-m", "ringtap.workload.gradient_exchange", "--collective", collective]
            start(host, *server, *options, "--workers", str(workers), "--number", str(number))
        codes = [rank.wait(600) for rank in ranks]
    if any(codes):
        sys.exit(f"{pattern} of {workers} workers failed: see {partial}")
    (partial / "hosts.json").write_text(json.dumps([testbed.address(host) for host in hosts]))
    partial.rename(folder)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process."""
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def named(folder: Path) -> dict[str, Any]:
    """Return what ``ringtap structure`` says of the captures in a folder."""
    captures = sorted(map(str, folder.glob("*.pcap")))
    done = subprocess.run(
        [sys.executable, "-m", "ringtap", "structure", *captures, "--json", "--no-cache"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"error": done.stderr.strip()}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Record the jobs that are missing, and print what each one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--patterns", default=",".join(COLLECTIVES))
    parser.add_argument("--recorded", action="store_true", help="only what is in the folder")
    options = parser.parse_args()
    cases = [
        (pattern, workers, model)
        for workers in map(int, options.workers.split(","))
        for pattern in options.patterns.split(",")
        for model in options.models.split(",")
        if pattern != "halving-doubling" or not workers & (workers - 1)
    ]
    missing = [case for case in cases if not folder_of(options.folder, *case).exists()]
    if options.recorded:
        cases, missing = [case for case in cases if case not in missing], []
    if missing:
        most = max(workers + servers_of(pattern) for pattern, workers, _ in missing)
        spec = TestbedSpec(own_name("pt"), tuple(f"S{number}" for number in range(most)), RATE_BPS)
        with RunningTestbed(spec, verify=False) as testbed:
            for case in missing:
                begin_s = time.monotonic()
                record(testbed, *case, folder_of(options.folder, *case))
                print(f"{' '.join(map(str, case))}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    print("| pattern | workers | model | named | right | most off | iterations | verdict |")
    print("|---|---|---|---|---|---|---|---|")
    right = 0
    for pattern, workers, model in cases:
        name, facts, is_right = judged(pattern, workers, folder_of(options.folder, pattern, workers, model))
        right += is_right
        yes = "yes" if is_right else "no"
        print(f"| {pattern} | {workers} | {model} | {name} | {yes} | {facts} |", flush=True)
    print(f"\n{right} of {len(cases)} right")


def judged(pattern: str, workers: int, folder: Path) -> tuple[str, str, bool]:
    """Return the name of a job's pattern, further facts, and True if name, workers, servers and groups are right."""
    found = named(folder)
    if "error" in found:
        return found["error"], " | | ", False
    shape = found["shape"]
    addresses = json.loads((folder / "hosts.json").read_text())
    servers, group = set(addresses[workers:]), COLLECTIVES[pattern][1].get("group", 0)
    is_right = (shape["name"], set(shape["servers"]), shape["group"]) == (NAMES[pattern], servers, group)
    is_right = is_right and shape["workers"] == workers
    if pattern in ("ring", "gloo", "pipeline", "hierarchical"):
        is_right = is_right and in_order(shape["hosts"], addresses, pattern)
    if pattern == "tree":
        is_right = is_right and shape["root"] == addresses[0]
    off = "-" if shape["error"] is None else f"{shape['error']:.2%}"
    return shape["name"], f"{off} | {found['period']['iterations']} | {found['period']['verdict']}", is_right


def in_order(hosts: list[str], addresses: list[str], pattern: str) -> bool:
    """True if hosts are in the order of ranks: around the ring from any host, from the first stage, or by groups."""
    if pattern == "pipeline":
        return hosts == addresses
    if pattern == "hierarchical":
        return {tuple(hosts[at : at + 2]) for at in range(0, len(hosts), 2)} == {
            tuple(addresses[at : at + 2]) for at in range(0, len(addresses), 2)
        }
    ranks = addresses[::-1] if pattern == "gloo" else addresses  # gloo's ring goes from each rank to the one before
    first = ranks.index(hosts[0])
    return hosts == ranks[first:] + ranks[:first]


def folder_of(folder: Path, pattern: str, workers: int, model: str) -> Path:
    """Return the folder of a job's captures."""
    return folder / f"{pattern}-{workers}-{model}"


if __name__ == "__main__":
    main()
