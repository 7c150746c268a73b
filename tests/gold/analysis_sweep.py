"""A made-up sweep in the documented format, through the real writers, with known iteration times and traffic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.thesis_neural_networks import PROFILES

SCALE, CAPACITY_BPS = 100.0, 250_000_000
START_NS = 1_700_000_000_123_456_789
WORKERS = ["S0", "S1", "S3"]
STEP_FIELDS = [
    Field("step", "<u4", "", "index"),
    Field("optimizer", "<u4", "", "index"),
    Field("start_ns", "<i8", "ns", "time"),
    Field("end_ns", "<i8", "ns", "time"),
    Field("start_mono_ns", "<i8", "ns", "time"),
    Field("end_mono_ns", "<i8", "ns", "time"),
]
# time in s at a load in full-size Gbit/s
CURVES = {
    ("vgg16", "consistent"): lambda load: 0.126 * np.exp(5.5 / np.sqrt(25 - load)),
    ("vgg16", "burst"): lambda load: 0.120 * np.exp(5.7 / np.sqrt(25 - load)),
    ("vgg16", "iperf"): lambda load: 0.25 * np.exp(9.8 / (25 - load)),
    ("resnet50", "consistent"): lambda load: np.maximum(0.158, 0.0645 * np.exp(3.311 / np.sqrt(25 - load))),
    ("resnet50", "burst"): lambda load: np.maximum(0.158, 0.07 * np.exp(3.5 / np.sqrt(25 - load))),
    ("resnet50", "iperf"): lambda load: np.maximum(0.158, 0.075 * np.exp(2.9 / np.sqrt(25 - load))),
    ("bert-large", "iperf"): lambda load: 0.618 * np.exp(7.6 / (25 - load)),
    ("bert-large", "consistent"): lambda load: 0.22 * np.exp(6.8 / np.sqrt(25 - load)),
    ("bert-large", "burst"): lambda load: 0.215 * np.exp(7.1 / np.sqrt(25 - load)),
    ("densenet161", "iperf"): lambda load: np.maximum(0.38, 0.16 * np.exp(2.9 / np.sqrt(25 - load))),
    ("densenet161", "consistent"): lambda load: np.maximum(0.38, 0.14 * np.exp(3.4 / np.sqrt(25 - load))),
    ("densenet161", "burst"): lambda load: np.maximum(0.38, 0.15 * np.exp(3.4 / np.sqrt(25 - load))),
}
LOADS_GBPS = (0.0, 7.5, 12.5, 15.0, 17.5, 20.0)
TWELVE_LOADS_GBPS = (0.0, 3.75, 7.5, 11.25, 13.75, 15.5, 17.0, 18.5, 20.0, 21.25, 22.5, 23.5)


def counter_fields(nics):
    kinds = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_drops", "tx_drops")
    times = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    return times + [Field(f"{nic}.{kind}", "<u8", kind[3:], "counter", 64) for nic in nics for kind in kinds]


def packed(fields, columns):
    """Columns of numbers as the bytes of a record file."""
    records = np.empty(len(columns[0]), np.dtype([(field.name, field.type) for field in fields]))
    for field, column in zip(fields, columns, strict=True):
        records[field.name] = column
    return records.tobytes()


def write_job(path, iteration_s, schedule, period_s=0.05, ranks=3):
    """A job whose iterations take the given times; ``schedule`` is [(until_s, cross_bps, training_bps)]."""
    job = RunDirectory.create(path, "job", ["ringtap", "run"], 1)
    ends = START_NS + np.round(np.cumsum([0.5, *iteration_s]) * 1e9).astype(np.int64)
    steps = np.arange(len(ends))
    for rank, host in enumerate(WORKERS[:ranks]):
        writer = RecordWriter(job.node(host) / "steps" / f"rank{rank}-{100 + rank}.rec", STEP_FIELDS, {"rank": rank})
        mine = ends - 1_000_000 * ((steps + rank) % ranks)  # a different rank is the slowest each time
        begun = mine - 2_000_000
        times = [begun, mine, begun - START_NS, mine - START_NS]
        writer.append_packed(packed(STEP_FIELDS, [steps, 0 * steps, *times]))
        writer.close()
    seconds = np.arange(0, (ends[-1] - START_NS) / 1e9 + 1, period_s)
    edges = np.array([0.0] + [until for until, _, _ in schedule])
    grown = [np.concatenate(([0], np.cumsum(np.diff(edges) * [step[k] for step in schedule]))) / 8 for k in (1, 2)]
    crossed, trained = (np.interp(seconds, edges, amount).astype(np.int64) for amount in grown)
    now = START_NS + np.round(seconds * 1e9).astype(np.int64)
    none = np.zeros_like(now)
    for node, nics, columns in (
        ("S0", ["eth0", "cross0"], [*(trained, none) * 4, *(crossed, none) * 4]),
        ("switch", ["to-S0"], [*(none, crossed + trained) * 4]),
    ):
        fields = counter_fields(nics)
        log = RecordWriter(job.node(node) / "nic" / "nic.rec", fields, {})
        log.append_packed(packed(fields, [now, now - START_NS, *columns]))
        log.close()
    job.finish("complete")
    return ends


def write_sweep(
    path: Path, series, loads_gbps=LOADS_GBPS, iterations=24, noise=0.01, seed=1, status="complete", period_s=0.05,
    delivered=None,
):  # fmt: skip
    """A sweep of (model, traffic) pairs; returns the true (series, load in Gbit/s, mean time in s) of each point.

    ``delivered`` gives, by kind of traffic, the load that passes the bottleneck over the load in ``loads_gbps``.
    """
    draw = np.random.default_rng(seed)
    models = [PROFILES[name] for name in dict.fromkeys(model for model, _ in series)]
    kinds = list(dict.fromkeys(kind for _, kind in series))
    plan = {"name": "made-up", "seed": seed, "scale": SCALE, "capacity_bps": CAPACITY_BPS}
    plan["topology"] = {"configuration": "B", "hosts": ["S0", "S1", "S2", "S3"], "workers": WORKERS}
    plan["topology"] |= {"cross_from": "S2", "cross_to": "S0", "queue_bytes": 400000, "burst_bytes": 32768}
    plan["topology"] |= {"mtu": 1500, "congestion_control": "cubic", "offloads": False}
    plan["models"] = [
        {"name": model.name, "title": model.title, "parameters": model.parameters, "layers": 16, "compute_s": 0.2}
        | {"bucket_bytes": 25_000_000, "thesis_iteration_s": model.thesis_iteration_s}
        for model in models
    ]
    plan |= {"traffic": kinds, "loads": [load / 25 for load in loads_gbps]}
    plan["window"] = {"warmup_iterations": 2, "settle_s": 1.0, "min_s": 2.0, "min_iterations": 20, "max_s": 30.0}
    links = [
        {"host": host, "direction": direction, "asked_bps": CAPACITY_BPS, "measured_bps": 0.98 * CAPACITY_BPS}
        for host in ("S0", "S1", "S2", "S3")
        for direction in ("up", "down")
    ]
    precheck = [
        {"kind": kind, "requested_bps": CAPACITY_BPS, "reached_bps": 0.93 * CAPACITY_BPS, "share_of_capacity": 0.93}
        | {"required_share": 0.88, "ok": True}
        for kind in kinds
    ]
    bottleneck = {
        "cross": [{"node": "S0", "nic": "cross0", "direction": "rx"}],
        "total": {"node": "switch", "nic": "to-S0", "direction": "tx"},
    }
    sweep = RunDirectory.create(
        path, "sweep", ["ringtap", "sweep", "demo"], seed, plan=plan, lab={"links": links}, precheck=precheck,
        bottleneck=bottleneck,
    )  # fmt: skip
    sweep.info["not_collected"] = [{"what": "packets", "why": "the plan did not ask for captures"}]
    lines, truth = JsonLinesWriter(path / "points.jsonl"), []
    for model, kind in series:
        directory = f"series/{model}-{kind}-1"
        times, schedule, windows = [], [], []
        for load in (load * (delivered or {}).get(kind, 1.0) for load in loads_gbps):
            spread = noise[kind] if isinstance(noise, dict) else noise
            seconds = CURVES[model, kind](load) * np.exp(draw.normal(0, spread * (1 + load / 5), iterations + 2))
            first = len(times) + 2  # the first two after a step are left to settle
            times += seconds.tolist()
            until = 0.5 + sum(times)
            schedule.append((until, load * 1e9 / SCALE, 20e6))
            windows.append((load, first, len(times)))
            truth.append((f"{model}-{kind}", load, float(np.mean(seconds[2:]))))
        ends = write_job(path / directory, times, schedule, period_s)
        for load, first, last in windows:
            item = {"series": f"{model}-{kind}", "model": model, "traffic": kind, "directory": directory}
            item |= {"requested_bps": load * 1e9 / SCALE * 1.05, "window_start_ns": int(ends[first])}
            lines.append(item | {"window_end_ns": int(ends[last]), "iterations": last - first, "ended": "enough"})
    lines.close()
    sweep.finish(status, "" if status == "complete" else "stopped by the user after two series")
    return truth


def edit_info(path, **changes):
    """Change keys of a run.json."""
    write_json(path / "run.json", json.loads((path / "run.json").read_text()) | changes)
