"""A made-up sweep of two jobs that share a link, in the documented formats, whose every number is known.

Both jobs iterate every 100 ms alone and communicate from 40 to 90 ms at 200 Mbit/s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.sweep_plans.sweep_plan import load_plan
from tests.gold.job_run import DDP_NAMES, START_NS, STEP_NAMES, TIMES

MS = 1_000_000
RATE_BPS, CAPACITY_BPS = 200_000_000, 250_000_000
ITERATIONS = 40
PLAN = {
    "sweep": {"scale": 100, "offsets": ["free", "0ms", "cassini"]},
    "jobs": [{"name": name, "model": "vgg16", "workers": ["S0", "S1"]} for name in ("a", "b")],
}
PORTS = [{"node": "switch", "nic": "to-S0", "direction": "tx"}]


def counters(path: Path, nic: str, spans_ns: Sequence[tuple[int, int]], until_ns: int) -> None:
    """Write an interface's counters, sampled every 10 ms; it sends full packets of 1,514 bytes within the spans."""
    names = [f"{nic}.{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets")]
    fields = [*TIMES, *(Field(name, "<u8", "", "counter", 64) for name in names)]
    writer = RecordWriter(path, fields, {"every_s": 0.01})
    for t_ns in range(START_NS - 1000 * MS, until_ns + 1000 * MS, 10 * MS):
        busy_ns = sum(max(0, min(end, t_ns) - begin) for begin, end in spans_ns if begin < t_ns)
        packets = round(busy_ns * RATE_BPS / 8e9 / 1514)
        writer.append(t_ns, t_ns, 0, 0, packets * 1514, packets)
    writer.close()


def job(path: Path, begins_ns: Sequence[int], pauses_ns: Sequence[int], *, has_ddp: bool = True) -> None:
    """Write the run of a job whose iterations begin at these times, after pauses of these lengths."""
    run = RunDirectory.create(path, "job", [], 1)
    run.finish("complete")
    fields = [Field(name, "<i8", "", "index") for name in (*STEP_NAMES, "pause_ns")]
    spans = [(begin + 40 * MS, begin + 90 * MS) for begin in begins_ns]
    for rank, host in enumerate(("S0", "S1")):
        steps = run.node(host) / "steps"
        writer = RecordWriter(steps / f"rank{rank}-{rank + 1}.rec", fields, {"rank": rank})
        for number, (begin, pause) in enumerate(zip(begins_ns, pauses_ns, strict=True)):
            end = begin - pause
            writer.append(number, 0, end - MS, end, end - MS, end, 0, 1, pause)
        writer.close()
        if has_ddp:
            writer = RecordWriter(
                steps / f"rank{rank}-{rank + 1}.ddp.rec", [Field(name, "<i8", "ns", "time") for name in DDP_NAMES], {}
            )
            for number, (begin, end) in enumerate(spans):
                writer.append(
                    number, 0, begin - 40 * MS, begin - 20 * MS, end, begin, end, 0, 0, end - begin, 0, end, end
                )
            writer.close()
        counters(run.node(host) / "nic" / "nic.rec", "eth0", spans, begins_ns[-1])
        write_json(run.node(host) / "node.json", {"before": {"nics": {"eth0": {"mtu": 1500}}}})
    counters(run.node("switch") / "nic" / "nic.rec", "to-S0", spans, begins_ns[-1])


def sharing(path: Path, *, has_ddp: bool = True, late_ns: int = 0) -> Path:
    """Write the sweep: alone every 100 ms, free every 150 ms with b sliding by 5 ms, and kept at 50 ms every 100 ms.

    Of the free jobs, it is predicted that b stays 50 ms behind a.

    Args:
        path: the run directory.
        has_ddp: write DDP's times.
        late_ns: time by which b runs later than a when both are kept.
    """
    from ringtap.agents.sweep.sweep_estimate import resolved

    run = RunDirectory.create(path, "sweep", [], 1, plan=resolved(load_plan(PLAN)))
    points = JsonLinesWriter(path / "shared.jsonl")

    def point(step: int, offset: str, jobs: dict[str, tuple[int, int, int]], **facts: object) -> None:
        """Write a point; each job has its first begin, its period and its pause, in ns."""
        lines = []
        for name, (first_ns, period_ns, pause_ns) in jobs.items():
            directory = f"series/{offset}-{name}-1"
            begins = [START_NS + first_ns + period_ns * number for number in range(ITERATIONS)]
            job(path / directory, begins, [pause_ns] * ITERATIONS, has_ddp=has_ddp)
            lines.append({"name": name, "directory": directory, **facts})
        longest_ns = max(period_ns for _, period_ns, _ in jobs.values())
        window = {"window_start_ns": START_NS, "window_end_ns": START_NS + longest_ns * (ITERATIONS - 1)}
        score = {"score": 1.0} if facts else {}
        points.append(
            {"step": step, "offset": offset, **window, "late_share": 0.0, **score, "ports": PORTS, "jobs": lines}
        )

    alone = (0, 100 * MS, 0)
    point(0, "alone", {"a": alone})
    point(1, "alone", {"b": alone})
    point(2, "free", {"a": (0, 150 * MS, 0), "b": (0, 155 * MS, 0)})
    kept = {"shift_s": 0.0, "period_s": 0.1, "predicted_s": 0.1}
    point(3, "cassini", {"a": (0, 100 * MS, 5 * MS), "b": (50 * MS + late_ns, 100 * MS, 5 * MS)}, **kept)
    points.close()
    path = path / "shared.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2] |= {"rule_ns": START_NS, "share_changes": {"ticks": 400, "seconds": 6.0, "cpu_s": 0.3}}
    for number, line in enumerate(lines[2]["jobs"]):
        begins_ns = [START_NS + 50 * MS * number + 150 * MS * iteration for iteration in range(ITERATIONS)]
        line |= {"predicted_begin_ns": begins_ns, "predicted_s": 0.15}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.finish("complete")
    return path.parent
