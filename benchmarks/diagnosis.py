"""Faults injected into real jobs on the testbed, and what ``ringtap analyze`` and ``ringtap live`` say of them.

python benchmarks/diagnosis.py FOLDER [--quick] [--seeds FIRST:LAST] [--only KIND,...] [--times horovod|none] [-o FILE]

Each seed is a round of jobs, a third of them healthy, with a model, sizes and times of its own. A fault begins in the
middle of a job, or is there throughout; then the healthy job of the same model says what an iteration takes without it.
The first table has precision and recall by kind, and how often the intervals of the begin and the end hold the truth.
The second one is of the live view: how long after the beginning of a fault it names it, and how long after the end it
takes it back. The last line is one JSON object. --quick is a job of each kind, in 5 minutes. Loss needs nft.

With --times horovod, Horovod exchanges the gradients. With --times none, DDP does, and the ranks are not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _result import write_result

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import SWITCH_NIC, TestbedSpec
from ringtap.core.testbed_options import SWITCH

JOB = Path(__file__).with_name("_diagnosis_job.py")
HOROVOD_RANK = Path(__file__).resolve().parents[1] / "examples" / "horovod_rank.py"
RATE_BPS, PORT, LIMIT_S, WARM_UP = 200_000_000, 29_811, 90, 3
HOSTS = ("S0", "S1", "S2")
RINGTAP = [sys.executable, "-m", "ringtap"]
RUN_ON = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "eth0"}
# parameters, layers, bucket size and compute time: bound by computation, by bandwidth, and by many small messages
MODELS = {
    "compute": (60_000, 8, 100_000, 0.08),
    "bandwidth": (400_000, 8, 400_000, 0.05),
    "messages": (100_000, 40, 10_000, 0.03),
}
# settings of a host's kernel, and the key of a fault with the value
SETTINGS = {
    "small buffers": ("net.ipv4.tcp_rmem", "bytes"),
    "congestion control": ("net.ipv4.tcp_congestion_control", "name"),
}
# the causes that each kind of fault may be called
EXPECTED = {
    "slow rank": {"slow rank"},
    "stalls": {"stalls"},
    "pauses": {"stalls", "slow rank"},
    "slow link": {"slow link", "slower network"},
    "loss": {"loss"},
    "other traffic": {"other traffic"},
    "two at once": {"slow rank", "other traffic"},
    "small buffers": {"socket buffers"},
    "congestion control": {"slower network"},
    "busy node": {"busy processors"},
    "checkpoints": {"stalls"},
    "slow within": {"slower network"},
    "slower of two": {"unused interface"},
}
# what a cause is called if only the length of iterations is known
OF_WHOLE = dict.fromkeys(("slow rank", "busy processors", "slower network"), "slower iterations")
OF_WHOLE |= {"stalls": "stalled iterations"}
# another program for the processor of the rank that computes
BUSY = """
import os, time
os.sched_setaffinity(0, {{max(os.sched_getaffinity(0))}})
os.nice({nice})
end_s = time.monotonic() + 60
while time.monotonic() < end_s:
    pass
"""


def is_right(cause: str, rank: int | None, item: dict[str, Any]) -> bool:
    """Return True if this is the cause of the job's fault, and its rank."""
    fault = item["fault"]
    if item["times"] == "none":
        return cause in {OF_WHOLE.get(name, name) for name in EXPECTED.get(fault["kind"], ())}
    is_place = cause == "other traffic" or fault.get("rank", rank) == rank
    return is_place and cause in EXPECTED.get(fault["kind"], ())


def jobs_of(seed: int) -> Iterator[dict[str, Any]]:
    """Yield a round of jobs: a healthy and an uneven one of each model, and faults of all kinds."""
    chance = random.Random(seed)
    shapes = {}
    usual = {"iterations": 80, "uneven": 0.0, "affected": (0, 0), "fault": {"kind": "healthy"}, "seed": seed}
    for name, (parameters, layers, bucket_bytes, compute_s) in MODELS.items():
        size, pace = chance.uniform(0.7, 1.4), chance.uniform(0.7, 1.4)
        own = {"parameters": round(parameters * size), "layers": layers, "bucket_bytes": bucket_bytes}
        shapes[name] = own | {"compute_s": round(compute_s * pace, 4)} | usual
    for name, shape in shapes.items():
        yield shape | {"model": name}
        yield shape | {"model": name, "uneven": chance.uniform(0.02, 0.15)}
    rank = chance.randrange(len(HOSTS))
    faults: list[dict[str, Any]] = [
        {"kind": "stalls", "rank": rank, "every": 9, "seconds": chance.uniform(0.1, 0.6)},
        {"kind": "stalls", "every": 11, "seconds": chance.uniform(0.1, 0.6)},
        {"kind": "pauses", "rank": rank, "often": 0.08, "seconds": chance.uniform(0.1, 0.4)},
        {"kind": "slow link", "host": HOSTS[rank], "rate_share": chance.choice((0.9, 0.7, 0.4))},
        {"kind": "loss", "host": HOSTS[rank], "loss_pct": chance.choice((0.1, 1.0))},
        {"kind": "slow rank", "rank": rank, "share": chance.choice((0.05, 0.2, 0.5))},
        {"kind": "other traffic", "host": HOSTS[rank], "load_share": chance.uniform(0.2, 0.8)},
    ]
    # with what each of the two costs alone, in jobs like this one, the cost of each is known
    faults += [faults[-2] | faults[-1] | {"kind": "two at once"}]
    for fault in faults:
        if fault["kind"] not in ("other traffic", "two at once"):
            model, is_throughout = chance.choice(list(MODELS)), chance.random() < 0.5
        # without a fault, a job of many small messages takes 50 to 60 ms one time, 55 to 65 ms the next
        affected, iterations = ((0, 80), 80) if is_throughout and model != "messages" else ((25, 75), 130)
        yield shapes[model] | {"model": model, "fault": fault, "affected": affected, "iterations": iterations}
    # one bucket is exchanged after the whole backward pass
    yield shapes["bandwidth"] | {"model": "one bucket", "bucket_bytes": 4_000_000}
    # a connection keeps the congestion control and the buffers that it began with
    fault = {"kind": "congestion control", "host": HOSTS[rank], "name": "reno"}
    if seed % 2:
        fault = {"kind": "small buffers", "host": HOSTS[rank], "bytes": chance.choice((5_000, 10_000, 20_000))}
    yield shapes["bandwidth"] | {"model": "bandwidth", "fault": fault, "affected": (0, 80)}
    fault = {"kind": "busy node", "rank": rank, "host": HOSTS[rank], "nice": chance.choice((0, 5, 10))}
    some = {"affected": (25, 75), "iterations": 130}
    yield shapes["compute"] | {"model": "compute", "fault": fault} | some
    # the first rank writes a file, while the others wait in the next exchange
    fault = {"kind": "checkpoints", "rank": 0, "every": 12, "bytes": round(1e6 * chance.uniform(20, 80))}
    yield shapes["compute"] | {"model": "compute", "fault": fault} | some
    # no interface of a host shows it
    fault = {"kind": "slow within", "host": HOSTS[rank], "rate_share": chance.choice((0.7, 0.4))}
    yield shapes["bandwidth"] | {"model": "bandwidth", "fault": fault} | some
    # the job uses eth0 of each host, and could use eth1
    fault = {"kind": "slower of two", "rate_share": chance.choice((0.7, 0.4))}
    yield shapes["bandwidth"] | {"model": "bandwidth", "fault": fault, "affected": (0, 80)}


def first_with(item: dict[str, Any]) -> int:
    """Return the first iteration that has a job's fault: stalls are in some of the affected ones."""
    fault, (begin, end) = item["fault"], item["affected"]
    numbers = range(begin, end)
    if "often" in fault:  # as the rank draws them
        chance = random.Random(1000 * item["seed"] + fault["rank"])
        draws = [chance.random() for _ in range(2 * end - begin)]
        return next((number for number in numbers if draws[2 * number - begin + 1] < fault["often"]), end)
    return next(number for number in numbers if number % fault.get("every", 1) == 0)


def on(spec: TestbedSpec, host: str, *words: str) -> str:
    """Run a command on a host and return what it prints."""
    command = [*RUN_ON, spec.name, host, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()


def set_rate(spec: TestbedSpec, host: str, nic: str, share: float = 1.0) -> None:
    """Limit what an interface sends to a share of the usual rate."""
    limit = ["rate", f"{round(share * RATE_BPS)}bit", "burst", "65500b", "latency", "13.4ms"]
    on(spec, host, "tc", "qdisc", "replace", "dev", nic, "root", "tbf", *limit)


def add_second_interfaces(spec: TestbedSpec) -> None:
    """Give each host an interface in a second network, as fast as the first one."""
    for number, host in enumerate(HOSTS, 1):
        on(spec, host, *f"ip link add eth1 type veth peer name second{number} netns {SWITCH}".split())
        on(spec, host, *f"ip addr add 10.99.0.{number}/24 dev eth1".split())
        on(spec, host, "ip", "link", "set", "eth1", "up")
        on(spec, SWITCH, *f"ip link set second{number} master {SWITCH_NIC} up".split())
        set_rate(spec, host, "eth1")


class Case:
    """One job on the testbed, with its fault.

    Attributes:
        live: what the live view named as the cause, and when (CLOCK_MONOTONIC).
        begin_s, end_s: when the fault was told to begin and to end, by the same clock; 0: it was not.
        done_s: when these commands had ended.
        ends_s: when the iterations ended.
    """

    def __init__(self, testbed: RunningTestbed, spec: TestbedSpec, item: dict[str, Any], folder: Path) -> None:
        self._testbed, self._spec, self._item, self.folder = testbed, spec, item, folder
        self._times = folder / "times.txt"
        self.ends_s: list[float] = []
        self.done_s: list[float] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self.live: list[tuple[float, str]] = []
        self.begin_s = self.end_s = 0.0
        self._usual = ""

    def run(self) -> list[float]:
        """Run the job and return the lengths of its iterations."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._times.touch()
        begin, end = self._item["affected"]
        jobs = []
        if begin == 0:
            self._fault(True)
        view = self._watch()
        try:
            jobs = [self._rank(rank) for rank in range(len(HOSTS))]
            for until, is_on in ((begin, True), (end, False)):
                if 0 < until < self._item["iterations"]:
                    self._wait(until, jobs)
                    self.begin_s, self.end_s = (time.monotonic(), 0.0) if is_on else (self.begin_s, time.monotonic())
                    self._fault(is_on)
                    self.done_s.append(time.monotonic())
            for job in jobs:
                if job.wait(LIMIT_S):
                    sys.exit(f"{self.folder}: a rank ended with {job.returncode}")
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
            self._fault(False)
            view.terminate()
            view.wait()
        self.ends_s = [float(line) for line in self._times.read_text().split()]
        return [after - before for before, after in pairwise(self.ends_s)]

    def _rank(self, rank: int) -> subprocess.Popen[bytes]:
        host, world = HOSTS[rank], len(HOSTS)
        record = [*RINGTAP, "run", "--every", "20ms", "--join", self.folder / "run", "--node", host]
        record += ["--collect", "nic,sockets,qdisc,host,steps"] if self._item["times"] == "none" else []
        starter = [sys.executable, HOROVOD_RANK] if self._item["times"] == "horovod" else []
        command = [*record, "--", *starter, sys.executable, JOB, json.dumps(self._item), self._times]
        own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
        environment = os.environ | ENVIRONMENT | {name: str(value) for name, value in own.items()}
        environment["HOROVOD_FUSION_THRESHOLD"] = str(self._item["bucket_bytes"])
        environment["MASTER_ADDR"] = self._spec.training_ip(HOSTS[0])
        with (self.folder / f"{host}.txt").open("w") as output:
            words = self._testbed.command(host, *map(str, command))
            return subprocess.Popen(words, stdout=output, stderr=output, env=environment)

    def _watch(self) -> subprocess.Popen[str]:
        """Start the live view, and note what it names."""
        command = [*RINGTAP, "live", "--plain", str(self.folder / "run")]
        view = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

        def note() -> None:
            for line in view.stdout or ():
                values = dict(word.split("=", 1) for word in line.split() if "=" in word)
                if values["status"] == "running":
                    self.live.append((time.monotonic(), values["cause"]))

        threading.Thread(target=note, daemon=True).start()
        return view

    def _wait(self, iteration: int, jobs: list[subprocess.Popen[bytes]]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while self._times.read_text().count("\n") < iteration and time.monotonic() < deadline_s:
            if any(job.poll() for job in jobs):
                return
            time.sleep(0.005)

    def _fault(self, is_on: bool) -> None:
        """Begin or end a fault of the network."""
        fault = self._item["fault"]
        kind, host = fault["kind"], fault.get("host", "")
        if "rate_share" in fault:
            within = [(SWITCH, self._spec.port(host))] if kind == "slow within" else []
            for at, nic in within or [(one, "eth0") for one in ([host] if host else HOSTS)]:
                set_rate(self._spec, at, nic, fault["rate_share"] if is_on else 1.0)
        if kind == "loss":
            lose = f'meta iifname "eth0" numgen random mod 1000 < {round(10 * fault["loss_pct"])} drop;'
            rules = f"table inet lose {{ chain in {{ type filter hook prerouting priority -300; {lose} }}; }}"
            on(self._spec, host, "nft", rules if is_on else "add table inet lose; delete table inet lose")
        if kind in SETTINGS:
            name, key = SETTINGS[kind]
            self._usual = self._usual or on(self._spec, host, "sysctl", "-n", name)
            value = " ".join([str(fault[key])] * len(self._usual.split())) if is_on else self._usual
            on(self._spec, host, "sysctl", "-w", f"{name}={value}")
        if kind in ("other traffic", "two at once") and is_on:
            self._send(host, round(fault["load_share"] * RATE_BPS))
        if kind == "busy node" and is_on:
            words = self._testbed.command(host, sys.executable, "-c", BUSY.format(nice=fault["nice"]))
            self._others.append(subprocess.Popen(words))
        if not is_on:
            ended = [process.args for process in self._others if process.poll() is not None]
            for process in self._others:
                process.terminate()
                process.wait()
            self._others = []
            if ended:
                sys.exit(f"{self.folder}: a fault ended before its time: {ended}")

    def _send(self, host: str, load_bps: int) -> None:
        to = HOSTS[(HOSTS.index(host) + 1) % len(HOSTS)]
        end = f"{self._spec.cross_ip(to)}:5001"
        plan = self.folder / "plan"
        words = ["--kind", "consistent", "--load", f"{load_bps}bit", "--duration", "60s", "--scale", "100", "--to", end]
        subprocess.run([*RINGTAP, "traffic", "plan", *words, "-o", plan], check=True, capture_output=True)
        environment = os.environ | {"RINGTAP_TOKEN": "t"}
        for name, command in ((to, ["serve", "--bind", end]), (host, ["send", plan])):
            if name == host:
                command += ["--source", self._spec.cross_ip(host)]
                deadline_s = time.monotonic() + LIMIT_S
                while not on(self._spec, to, "ss", "-Htln", "sport = :5001") and time.monotonic() < deadline_s:
                    time.sleep(0.02)
            words = self._testbed.command(name, *RINGTAP, "traffic", *map(str, command))
            self._others.append(
                subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )


def judged(
    item: dict[str, Any], seconds: list[float], usual_s: float | None, alone_s: dict[str, float], found: dict[str, Any]
) -> dict[str, Any]:
    """Compare a diagnosis with what the fault really cost; ``alone_s`` has what each of two cost alone."""
    from ringtap.analysis.job.verdict import named

    begin, end = item["affected"]
    kind, measured = item["fault"]["kind"], range(WARM_UP, len(seconds))
    cost_s, error_s, mean_s = 0.0, 0.0, statistics.fmean(seconds[number] for number in measured)
    affected_s = [seconds[number] for number in measured if begin <= number + 1 < end]
    while_s = statistics.fmean(affected_s) if kind != "healthy" else mean_s
    if kind != "healthy":
        without = [seconds[number] for number in measured if not begin <= number + 1 < end]
        cost_s = mean_s - (statistics.fmean(without) if without else usual_s or mean_s)
        error_s = len(affected_s) / len(measured) * math.hypot(standard_error(affected_s), standard_error(without))
    causes = [] if found["why"] else named(found)
    right = [cause for cause in causes if is_right(cause["name"], cause["rank"], item)]
    # the exchange of many small messages takes longer or shorter by itself
    is_known = cost_s > 2 * error_s or item["model"] != "messages" or "host" not in item["fault"]
    faults = [(cost_s, right)]
    if kind == "two at once":
        other_s = {"slow rank": alone_s["other traffic"], "other traffic": alone_s["slow rank"]}
        faults = [(cost_s - own_s, [one for one in right if one["name"] == name]) for name, own_s in other_s.items()]
    about = {"kind": kind, "model": item["model"], "fault": item["fault"], "why": found["why"]}
    return about | {
        "is_throughout": item["affected"] == (0, item["iterations"]),
        "mean_s": mean_s,
        "cost_s": cost_s,
        "share": cost_s / mean_s,
        "affected_s": while_s,
        "affected_share": cost_s * len(measured) / len(affected_s) / while_s if affected_s else 0.0,
        "is_known": is_known,
        "faults": [(own_s, own_s / mean_s, sum(cause["seconds"] for cause in mine)) for own_s, mine in faults],
        "right": [cause["name"] for cause in right],
        "wrong": [cause["name"] for cause in causes if cause not in right],
        "found_s": sum(cause["seconds"] for cause in right),
        "unknown": [unknown["cause"] for unknown in found["unknown"]],
    }


def standard_error(seconds: list[float]) -> float:
    """Return the standard error of the mean of iterations that depend on their neighbours, 0 for too few."""
    means = [statistics.fmean(seconds[begin : begin + 10]) for begin in range(0, len(seconds) - 9, 10)]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def judged_when(item: dict[str, Any], case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return whether each interval of when a single fault's cause began or ended holds the truth, and its width."""
    from ringtap.analysis.job.verdict import named

    right = [cause for cause in named(found) if is_right(cause["name"], cause["rank"], item)] if case.begin_s else []
    if item["fault"].keys() & {"load_share", "nice"}:  # another program begins some time after its command
        right = []
    rows: list[tuple[bool, float]] = []
    for cause in right if len(right) == 1 else ():
        start_s = found["start_ns"] / 1e9 - (time.time() - time.monotonic())
        # a rank's own fault begins with an iteration, others while a command runs
        own_s = [case.ends_s[number - 1] for number in item["affected"]]
        began_s, done_s = ((case.begin_s, case.end_s), case.done_s) if "host" in item["fault"] else (own_s, own_s)
        for end, least_s, most_s in zip(("from", "to"), began_s, done_s, strict=True):
            low_s, high_s = cause[f"{end}_low_s"], cause[f"{end}_high_s"]
            if low_s is not None:
                is_within = low_s <= most_s - start_s and least_s - start_s <= high_s
                rows.append((is_within, (high_s - low_s) / found["iteration_s"]))
    return {"is_within": [row[0] for row in rows], "widths": [row[1] for row in rows]}


def judged_live(item: dict[str, Any], case: Case) -> dict[str, Any]:
    """Compare what the live view named, line by line, with the fault.

    Returns:
        ``live_named_s``, how long after the beginning of the fault it is named, None if it is there throughout;
        ``live_over_s``, how long after the end it is taken back, None if the job ends before; ``live_wrong``, other
        causes.
    """
    named_s, over_s, wrong = None, None, set()
    begin_s = case.begin_s and max(case.begin_s, case.ends_s[first_with(item) - 1])
    for at_s, cause in case.live:
        name, _, where = cause.partition(":")
        if name in ("-", "none"):
            if named_s is not None and over_s is None and 0 < case.end_s < at_s:
                over_s = at_s - case.end_s
            continue
        rank = where.split(":")[0]
        if not is_right(name.replace("_", " "), int(rank) if rank.isdigit() else None, item) or at_s < begin_s:
            wrong.add(name.replace("_", " "))
        elif begin_s:
            named_s, over_s = at_s - begin_s if named_s is None else named_s, None
    return {"live_named_s": named_s, "live_over_s": over_s, "live_wrong": sorted(wrong)}


def main() -> int:
    """Print a line per job, a table per kind and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for the runs; only those with a wrong verdict are kept")
    parser.add_argument("--quick", action="store_true", help="one job of each kind of fault")
    parser.add_argument("--seeds", default="1:5", metavar="FIRST:LAST", help="rounds (default 1:5)")
    parser.add_argument("--only", metavar="KIND,...", help="kinds of faults, beside the healthy jobs")
    parser.add_argument("--times", choices=("ddp", "horovod", "none"), default="ddp", help="what times the ranks")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    from ringtap.analysis.job.run import open_job

    first, last = (1, 1) if options.quick else map(int, options.seeds.split(":"))
    rows: list[dict[str, Any]] = []
    only = set((options.only or "").split(","))
    only |= {"slow rank", "other traffic"} if "two at once" in only else set()
    spec = TestbedSpec("diagnose", HOSTS, RATE_BPS)
    with RunningTestbed(spec, verify=False) as testbed:
        add_second_interfaces(spec)
        for seed in range(first, last + 1):
            usual_s: dict[str, float] = {}
            alone_s: dict[str, float] = {}
            for number, item in enumerate(jobs_of(seed)):
                kind = item["fault"]["kind"]
                if options.only and kind != "healthy" and kind not in only:
                    continue
                is_usual = not item["uneven"] and item["model"] in MODELS
                if options.quick and not (is_usual if kind == "healthy" else kind not in {row["kind"] for row in rows}):
                    continue
                folder = options.folder / f"{seed}-{number}"
                item["times"] = options.times
                if options.quick and item["iterations"] > 100:
                    item |= {"affected": (25, 65), "iterations": 100}
                case = Case(testbed, spec, item, folder)
                seconds = case.run()
                if kind == "healthy" and not item["uneven"]:
                    usual_s[item["model"]] = statistics.fmean(seconds[WARM_UP:])
                job = open_job(folder / "run")
                found = job.diagnosed | {"start_ns": job.logs.window_ns[0]}
                row = judged(item, seconds, usual_s.get(item["model"]), alone_s, found) | {"folder": str(folder)}
                alone_s[kind] = row["cost_s"]
                row |= judged_when(item, case, found) | judged_live(item, case)
                rows.append(row)
                told = f"right: {row['right']}, wrong: {row['wrong']}, unknown: {row['unknown']} {row['why']}"
                told += f"; begin and end in intervals of {row['widths']} iterations: {row['is_within']}"
                told += f"; live after {row['live_named_s']}, until {row['live_over_s']} s, wrong: {row['live_wrong']}"
                cost = f"costs {1e3 * row['cost_s']:.1f} ms ({row['share']:.0%}), found {1e3 * row['found_s']:.1f} ms"
                about = f"{seed}-{number} {kind} {row['model']} of {1e3 * row['mean_s']:.0f} ms"
                print(f"{about}: {cost}; {told}", flush=True)
    print(f"{table(rows)}\n\n{live_table(rows)}")
    write_result({"rows": rows}, options.output)
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Return precision and recall by kind as a Markdown table."""
    heads = ["kind", "jobs", "named of ≥ 10 %", "named of 3 to 10 %", "no cost beyond chance", "cannot tell", "wrong"]
    heads += ["error of the cost (median)", "begin or end in its interval", "iterations of an interval (median)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    wrong = Counter(name for row in rows for name in row["wrong"])
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        faults, cells = [fault for row in mine if row["is_known"] for fault in row["faults"]], []
        for least, most in ((0.1, 9.0), (0.03, 0.1)):
            some = [found_s > 0 for _, share, found_s in faults if least <= share < most]
            cells.append(f"{sum(some)} of {len(some)}" if some else "-")
        errors = [abs(found_s / cost_s - 1) for cost_s, share, found_s in faults if found_s and share >= 0.03]
        error = f"{statistics.median(errors):.0%}" if errors else "-"
        false = sum(bool(row["wrong"]) for row in mine)
        open_ = sum(not row["right"] and (kind in row["unknown"] or bool(row["why"])) for row in mine)
        within, widths = ([one for row in mine for one in row.get(name, ())] for name in ("is_within", "widths"))
        when = f"{sum(within)} of {len(within)} | {statistics.median(widths):.1f}" if widths else "- | -"
        cells.append(str(sum(not row["is_known"] for row in mine)))
        lines.append(f"| {kind} | {len(mine)} | {' | '.join(cells)} | {open_} | {false} | {error} | {when} |")
    return "\n".join([*lines, f"wrong: {dict(wrong)}"])


def live_table(rows: list[dict[str, Any]]) -> str:
    """Return how soon the live view names faults that begin in mid-job and cost 10 %; the wrong names are of all."""
    heads = ["kind", "jobs", "named", "within 5 s or 10 iterations", "after: median, last"]
    heads += ["taken back before the job ended", "after: median, last", "wrong"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        every = [row for row in rows if row["kind"] == kind]
        # while a fault is there, its share is larger than that of the whole job
        mine = [row for row in every if not row["is_throughout"] and row["affected_share"] >= 0.1 and row["is_known"]]
        named_s = [row["live_named_s"] for row in mine if row["live_named_s"] is not None]
        over_s = [row["live_over_s"] for row in mine if row["live_over_s"] is not None]
        soon = sum((row["live_named_s"] or 1e9) <= max(5.0, 10 * row["affected_s"]) for row in mine)
        cells = [str(len(mine)), str(len(named_s)), str(soon), _spread(named_s), str(len(over_s)), _spread(over_s)]
        wrong = sum(bool(row["live_wrong"]) for row in every)
        lines.append(f"| {kind} | {' | '.join(cells)} | {wrong} of {len(every)} |")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
