"""Recording of jobs on a GPU, against CUDA events, NVML's own program and the jobs' own output."""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.analysis.process_traces.kineto import read_kineto
from ringtap.cli import main
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.gpu import GpuCollector
from ringtap.core.append_only_logs import open_records
from tests.frameworks.ranks import launch
from tests.gpu.conftest import HERE, JOB, ROOT, Recorded, run_ranks

pytestmark = pytest.mark.shares

Record = Callable[..., Recorded]
# The clocks of host and device are compared at begin and end, within the 20 us or so that an event and the wait for it
# take; in between, their rate is taken as constant.
CLOCKS_NS = 100_000
MS = 1_000_000


def module(path: Path) -> Any:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found
    assert found.loader
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def check_steps(recorded: Recorded, device: str, waits: bool = True) -> None:
    """A step is over on the host before its work is over on the device, and after that of the one before it.

    If the host waits for the device in each iteration, both see the same time from step to step.
    """
    steps, ends_ns = recorded.rows(), recorded.printed["ends_ns"]
    assert [row["step"] for row in steps] == list(range(len(ends_ns)))
    for row, end_ns in zip(steps, ends_ns, strict=True):
        assert row["start_ns"] <= row["end_ns"] <= end_ns + CLOCKS_NS * (device == "cuda")
    if waits:
        for row, before_ns in zip(steps[1:], ends_ns, strict=False):
            assert row["start_ns"] >= before_ns - CLOCKS_NS * (device == "cuda")
    by_hook, by_device = (
        [after - before for before, after in pairwise(times)] for times in ([row["end_ns"] for row in steps], ends_ns)
    )
    print(f"median from step to step: hook {statistics.median(by_hook) / 1e6:.3f} ms, "
          f"device {statistics.median(by_device) / 1e6:.3f} ms, {len(by_hook)} steps")  # fmt: skip
    if device == "cuda":
        assert statistics.median(by_hook) == pytest.approx(statistics.median(by_device), rel=0.02, abs=CLOCKS_NS)


def check_exchanges(recorded: Recorded, device: str) -> None:
    """DDP's log of the exchange holds what the job's communication hook saw of it."""
    logged = {row["iteration"]: row for row in recorded.rows(suffix=".ddp.rec")}
    own = recorded.printed["exchanges_ns"]
    # on a GPU, the log of an iteration is read in the next one
    assert logged.keys() == set(range(len(own) - (device == "cuda")))
    added = []
    for iteration, row in logged.items():
        begin_ns, end_ns = own[iteration]
        added.append(row["comm_ns"] - (end_ns - begin_ns))
        if device == "cpu":  # DDP looks at the clock before the first bucket is given to the hook, and after the last
            assert row["comm_start_ns"] <= begin_ns <= end_ns <= row["comm_end_ns"]
        assert 0 <= row["overlap_ns"] <= row["comm_ns"]
    print(f"DDP's time of an exchange less that of the hook's marks: {sorted(added)[:3]} to {max(added)} ns, "
          f"median {statistics.median(added)} of {statistics.median(end - begin for begin, end in own)}")  # fmt: skip
    if device == "cuda":
        # Events have a resolution of 0.5 us. DDP marks the begin right before the hook is called, and the end when the
        # host comes to it.
        assert -0.02 * MS <= statistics.median(added) <= 2 * MS
    rows = recorded.job.rank_iterations
    rows = rows[(rows["rank"] == 0) & rows["communication_s"].notna()]
    assert len(rows) >= len(logged) - 2
    for iteration, communication_s, exposed_s in rows[["iteration", "communication_s", "exposed_s"]].to_numpy():
        row = logged[int(iteration)]
        assert communication_s == pytest.approx(row["comm_ns"] / 1e9, abs=1e-9)
        if device == "cuda":  # the device's durations; the times are those at which work was queued
            assert row["backward_end_ns"] == 0
            assert exposed_s == pytest.approx((row["comm_ns"] - row["overlap_ns"]) / 1e9, abs=1e-9)


@pytest.mark.on_cpu
def test_ddp_against_the_devices_own_clock(record: Record, device: str) -> None:
    """On a GPU: NCCL with one rank."""
    recorded = record(str(JOB), "ddp", device, "30", collect="steps,ddp,nccl,gpu")
    check_steps(recorded, device)
    check_exchanges(recorded, device)
    if device == "cuda":
        (log,) = recorded.job.summary()["nccl"]
        print("NCCL", log)
        assert (log["rank"], log["ranks"]) == (0, 1)
        assert log["version"]
        (steps,) = (path for path in recorded.path.glob("nodes/*/steps/rank0-*.rec") if ".ddp" not in path.name)
        gpus = [open_records(path).about["uuid"] for path in recorded.path.glob("nodes/*/gpu/*.rec")]
        assert any(uuid.endswith(open_records(steps).about["gpu"]) for uuid in gpus), gpus


def test_two_ranks_share_a_gpu(record: Record, device: str) -> None:
    """Gloo, with CUDA tensors on a GPU: NCCL refuses two ranks on one."""
    recorded = record(str(JOB), "ddp", device, "30", collect="steps,ddp", ranks=2)
    check_steps(recorded, device)
    check_exchanges(recorded, device)
    assert len(recorded.rows(rank=1)) == 30


def test_a_host_that_runs_ahead(record: Record, device: str) -> None:
    recorded = record(str(JOB), "queued", device, "300", collect="steps")
    # CUDA takes about a thousand launches ahead: fewer than 20 iterations
    check_steps(recorded, device, waits=False)


def test_steps_that_mixed_precision_skips(record: Record, device: str) -> None:
    recorded = record(str(JOB), "amp", device, "8", collect="steps")
    assert [row["kind"] for row in recorded.rows()] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert recorded.printed["scale"] == 64  # halved twice


def test_compiled_graphs_are_the_same(record: Record, device: str) -> None:
    command = [str(JOB), "compiled", device, "10"]
    recorded = record(*command, collect="steps,ddp")
    plain = json.loads(run_ranks(launch(1, sys.executable, *command)).splitlines()[-1])
    assert recorded.printed["graphs"] == plain["graphs"] > 0
    check_steps(recorded, device)


@pytest.mark.parametrize("kind", ["fsdp", "fully_shard"])
def test_sharded_models(record: Record, device: str, kind: str) -> None:
    recorded = record(str(JOB), kind, device, "10", collect="steps,ddp")
    check_steps(recorded, device)
    assert not list(recorded.path.glob("nodes/*/steps/*.ddp.rec"))


@pytest.mark.on_cpu
def test_the_profilers_trace_is_merged(record: Record, device: str, tmp_path: Path) -> None:
    recorded = record(str(JOB), "profiled", device, "15", collect="steps,ddp", TRACES=str(tmp_path))
    path = tmp_path / "rank0.json.gz"
    trace = read_kineto(path)
    own = sorted(
        (begin_ns, begin_ns + length_ns)
        for begin_ns, length_ns, name, track in zip(
            *(each.tolist() for each in (trace.begin_ns, trace.length_ns, trace.name, trace.track)), strict=True
        )
        if trace.names[name].startswith("Optimizer.step#") and trace.tracks[track].startswith("thread")
    )
    steps = [(row["start_ns"], row["end_ns"]) for row in recorded.rows()][5:]
    apart_ns = [max(abs(one[0] - other[0]), abs(one[1] - other[1])) for one, other in zip(own, steps, strict=True)]
    print(
        f"begins and ends of steps by the profiler and by the hook are {statistics.median(apart_ns) / 1e3:.0f} us apart"
    )
    assert statistics.median(apart_ns) < 5 * MS  # on a busy machine
    out = tmp_path / "job.pftrace.gz"
    assert main(["export", str(recorded.path), "--to", "perfetto", "-o", str(out), "--kineto", str(path)]) == 0
    tracks = module(ROOT / "scripts" / "draw_trace.py").read_trace(out)
    merged = {track.path[-1]: track.slices for track in tracks if f"torch.profiler {path.name}" in track.path}
    assert any(name.startswith("thread ") for name in merged)
    if device == "cuda":
        on_gpu = [one for name, slices in merged.items() if name.startswith("GPU 0 stream") for one in slices]
        # the last kernel of an iteration ends right before the host, which the profiler slows down, comes to the event
        apart_ns = [
            min(abs(end_ns - one[1]) for one in on_gpu if one[1] <= end_ns + CLOCKS_NS)
            for end_ns in recorded.printed["ends_ns"][5:]
        ]
        print(f"from the last kernel to the event: {sorted(apart_ns)} ns")
        assert statistics.median(apart_ns) <= MS


def test_wide_resnet_and_its_epochs(record: Record, device: str, tmp_path: Path) -> None:
    sizes = {
        "cuda": ["--images", "12000", "--batch", "128"],
        "cpu": ["--images", "300", "--depth", "10", "--width", "1"],
    }
    options = ["--epochs", "3", "--target-accuracy", "2", *sizes[device]]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    recorded = record("-m", "ringtap.examples.wide_resnet", *options, collect="steps,ddp", **hidden)
    output = tmp_path / "job.out"
    output.write_text(recorded.output)
    print(recorded.output)
    epochs = ringtap.open_job(recorded.path, output=output).epochs
    assert epochs["epoch"].tolist() == [1, 2, 3]
    assert f"ranks on {device}" in recorded.output
    steps = recorded.rows()
    per_epoch = len(steps) // 3
    assert len(steps) == 3 * per_epoch
    # an epoch lasts longer than its steps, and less than from the last step before it to the first one after it
    for number, epoch_s in list(enumerate(epochs["epoch_s"]))[1:]:
        own = steps[number * per_epoch : (number + 1) * per_epoch]
        assert epoch_s > (own[-1]["end_ns"] - own[0]["start_ns"]) / 1e9
        if number < 2:
            around = steps[(number + 1) * per_epoch]["start_ns"] - steps[number * per_epoch - 1]["end_ns"]
            assert epoch_s < around / 1e9


def test_parameters_of_resnet_50() -> None:
    import torch

    with torch.device("meta"):
        model = module(HERE / "resnet50.py").resnet50()
    assert sum(one.numel() for one in model.parameters()) == 25_557_032  # as torchvision's


def test_overhead_on_resnet_50(record: Record, device: str) -> None:
    pairs = {"cuda": 30, "cpu": 5}[device]
    recorded = record(str(HERE / "overhead_job.py"), device, str(pairs))
    printed = recorded.printed
    assert len(recorded.rows()) == printed["recorded"]
    sys.path.append(str(ROOT / "benchmarks"))
    from _overhead_pairs import interval

    mean, low, high = interval(printed["pairs"], "mean_s")
    without_s = statistics.median(pair["without"]["mean_s"] for pair in printed["pairs"])
    print(f"{pairs} pairs of blocks, {1e3 * without_s:.2f} ms per iteration without recording")
    print(f"recording adds {mean:.2f} %, 95 % interval {low:.2f} to {high:.2f}")
    if device == "cuda":
        assert high <= 1


LOAD = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
held = torch.empty(2 * 1024**3, dtype=torch.uint8, device="cuda")
for number in range(10**9):
    b = a @ a
    if number % 20 == 19:
        torch.cuda.synchronize()
    if number == 99:
        print("ready", flush=True)
"""
QUERY = "index,uuid,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm,driver_version"


def nvidia_smi() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return [dict(zip(QUERY.split(","), map(str.strip, row), strict=True)) for row in csv.reader(said.splitlines())]


@pytest.mark.needs_gpu
def test_nvml_beside_nvidia_smi(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) as load:
        try:
            assert load.stdout
            assert load.stdout.readline() == "ready\n"
            time.sleep(2)  # power and utilisation are means over the last second
            collector = GpuCollector(Context(tmp_path, 1.0))
            assert collector.check().state == "ok"
            collector.start()
            said = []
            for _ in range(8):
                said.append(nvidia_smi())
                collector.sample()
                time.sleep(0.3)
            facts = collector.stop()
        finally:
            load.kill()
    print(facts, said[-1])
    assert facts["gpus"] >= len(said[0])
    assert facts["failed_readings"] == 0
    for place, gpu in enumerate(said[0]):
        log = open_records(tmp_path / "gpu" / f"gpu{gpu['index']}.rec")
        rows = [dict(zip((field.name for field in log.fields), row, strict=True)) for row in log.tail()]
        print(log.about, rows[-1])
        assert (log.about["uuid"], log.about["name"], log.about["driver"]) == (
            gpu["uuid"], gpu["name"], gpu["driver_version"]
        )  # fmt: skip
        # nvidia-smi asked between a sample and the next; it shows MiB
        for (before, after), each in zip(pairwise(rows), said, strict=False):
            smi = each[place]
            for column, name, scale, tolerance in (
                ("utilization_pct", "utilization.gpu", 1, 10),  # of the last 1/6 to 1 s
                ("memory_used_bytes", "memory.used", 2**20, 2**20),
                ("memory_total_bytes", "memory.total", 2**20, 2**20),
                ("power_mw", "power.draw", 1000, 30_000),  # a mean over 1 s, under a steady load
                ("temperature_c", "temperature.gpu", 1, 2),
                ("sm_clock_mhz", "clocks.sm", 1, 400),  # which the limit of power moves up and down
            ):
                low, high = sorted((before[column], after[column]))
                assert low - tolerance <= float(smi[name]) * scale <= high + tolerance, column
        if place == 0:
            assert min(row["utilization_pct"] for row in rows) >= 80
            assert min(row["memory_used_bytes"] for row in rows) > 2 * 1024**3
