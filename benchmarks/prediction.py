"""Iteration times predicted from a profile of two ranks, by simulation and by replay, against the job itself.

python benchmarks/prediction.py FOLDER [--models NAME,...] [--ranks N,...] [--slower N] [--figure FILE] [-o FILE]

Each model is profiled with two ranks on this machine, and its workload is scaled to more ranks. One sweep per number
of ranks measures the scale model and the replay on the virtual testbed, under consistent web-search traffic to rank 0.
What is in the folder is not measured again. Three models with 3, 4, 6 and 8 ranks take about 50 minutes, and root.
With --slower N, computation takes N times as long and links have an Nth of the rate, so that processors have N times
as long for the same messages; give it a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _result import write_result

import ringtap
from ringtap.analysis.plots.figure import new_figure, styled
from ringtap.analysis.plots.style import BLUE, INK, VERMILION
from ringtap.core.models import profile_named
from ringtap.core.sweep_plan import load_plan
from ringtap.core.sweep_plan_models import Model

SCALE, CAPACITY_BPS = 100, 250e6
# TCP payload of the bytes that the links' limit counts: frames of 1,514 bytes without preamble and checksum
PAYLOAD_SHARE = 1448 / 1514
LOADS = (0.0, 0.2, 0.4, 0.6, 0.8)
MODELS, RANKS = ("resnet50", "vgg16", "bert-large"), (3, 4, 6, 8)
PORT = 5101
PLAN = """\
[sweep]
name = "prediction"
scale = {scale}
capacity = "{capacity}bit"
loads = {loads}
traffic = ["consistent"]

[testbed]
configuration = "custom"
hosts = {hosts}
workers = {workers}
cross_from = "{sender}"
cross_to = "S0"

[window]
settle = "2s"
min_time = "{min_s}s"
min_iterations = 10
max_time = "{max_s}s"

[[models]]
name = "{model}"
compute = "{compute_s}s"

[[models]]
name = "replay"
parameters = {parameters}
command = ["env", "RINGTAP_TOKEN=prediction", "{{python}}", "-m", "ringtap", "traffic", "send", "{flow_plan}",
    "--as", "{{host}}", "--receive"]
"""


def run(*words: object, environment: dict[str, str] | None = None) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ringtap_command(*words: object) -> str:
    """Run ringtap and return what it prints."""
    return run(sys.executable, "-m", "ringtap", *words)


def profiled(model: str, slower: float, folder: Path) -> Path:
    """Return the workload of the scale model of two ranks, as it computes and communicates on this machine."""
    workload = folder / f"{model}-2"
    if workload.exists():
        return workload
    job = planned(model)
    command = [sys.executable, "-m", "ringtap", "run", "--profile", "-o", folder / f"{model}-profile", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "ringtap.examples.scale_model", "--model", model, "--scale", SCALE, "--iterations", 30]
    command += ["--compute-s", slower * job.compute_s, "--bucket-bytes", round(job.bucket_bytes / SCALE)]
    command += ["--first-bucket-bytes", round(job.first_bucket_bytes / SCALE)]
    run(*command, environment={"OMP_NUM_THREADS": "1"})
    ringtap_command("workload", "new", "--run", folder / f"{model}-profile", "-o", workload)
    return workload


def planned(model: str) -> Model:
    """Return a model as sweeps have it."""
    return load_plan({"sweep": {"scale": SCALE, "loads": [0]}, "models": [{"name": model}]}).models[0]


def measured(model: str, ranks: int, slower: float, folder: Path) -> Path:
    """Return the sweep of the scale model and of its replay, which is measured unless it exists."""
    out = folder / f"{model}-{ranks}"
    if (out / "run.json").exists() and json.loads((out / "run.json").read_text())["status"] == "complete":
        return out
    scaled, lowered, flow_plan = (folder / f"{model}-{ranks}{what}" for what in ("-workload", "-messages", ".plan"))
    if not scaled.exists():
        ringtap_command("workload", "scale", profiled(model, slower, folder), "--workers", ranks, "-o", scaled)
    if not lowered.exists():
        ringtap_command("workload", "lower", scaled, "-o", lowered)
    hosts = [f"S{number}" for number in range(ranks + 1)]
    nodes = [word for host in hosts[:ranks] for word in ("--node", f"{host}:{PORT}")]
    kind = ("--kind", "workload", "--from", lowered, "--iterations", iterations(lowered, slower))
    ringtap_command("traffic", "plan", *kind, *nodes, "--force", "-o", flow_plan)
    plan = folder / f"{model}-{ranks}.toml"
    plan.write_text(PLAN.format(
        scale=SCALE, capacity=round(SCALE * CAPACITY_BPS / slower), loads=list(LOADS), hosts=json.dumps(hosts),
        workers=json.dumps(hosts[:ranks]), sender=hosts[ranks], min_s=8 * slower, max_s=20 * slower, model=model,
        compute_s=slower * planned(model).compute_s, parameters=profile_named(model).parameters,
        flow_plan=flow_plan.resolve(),
    ))  # fmt: skip
    ringtap_command("sweep", plan, "-o", out, *(["--resume"] if out.exists() else []))
    flow_plan.unlink()
    return out


def iterations(lowered: Path, slower: float) -> int:
    """Return more iterations than a series has: none is shorter than its computation."""
    compute_s = max(json.loads(ringtap_command("workload", "show", lowered, "--json"))["compute_s"])
    return math.ceil((120 + 25 * slower * len(LOADS)) / compute_s)


def simulated(model: str, ranks: int, slower: float, folder: Path, loads_bps: Sequence[float]) -> list[float]:
    """Return the simulated iteration time alone, and beside consistent web-search traffic of some loads on the wire."""
    plans = [folder / f"{model}-{ranks}-cross-{number}.plan" for number in range(len(loads_bps))]
    for path, load_bps in zip(plans, loads_bps, strict=True):
        load = f"{round(load_bps * PAYLOAD_SHARE)}bit"
        kind = (
            "--kind",
            "consistent",
            "--load",
            load,
            "--scale",
            SCALE,
            "--duration",
            f"{120 * slower:g}s",
            "--to",
            "10.0.0.1:5001",
        )
        ringtap_command("traffic", "plan", *kind, "--force", "-o", path)
    words = [word for path in plans for word in ("--cross", path)]
    rate = f"{round(CAPACITY_BPS / slower * PAYLOAD_SHARE)}bit"
    scaled = folder / f"{model}-{ranks}-workload"
    points = json.loads(ringtap_command("workload", "simulate", scaled, "--rate", rate, *words, "--json"))["points"]
    for path in plans:
        path.unlink()
    return [point["iteration_s"] for point in points]


def compared(model: str, ranks: int, slower: float, folder: Path) -> list[dict[str, Any]]:
    """Return the job's, the replay's and the simulation's iteration time at each load."""
    points = ringtap.open_sweep(measured(model, ranks, slower, folder)).points
    job, replay = (points[points["model"] == name].sort_values("requested_bps") for name in (model, "replay"))
    # the simulation gets the mean of the cross traffic that was really sent
    times_s = simulated(model, ranks, slower, folder, job["cross_bps"].tolist()[1:])
    rows = zip(LOADS, job.to_dict("records"), replay.to_dict("records"), times_s, strict=True)
    return [
        {
            "model": model, "ranks": ranks, "load": load, "job_s": one["mean_s"],
            "job_error_s": one["std_s"] / one["independent"] ** 0.5,
            "replay_s": other["mean_s"], "replay_error": other["mean_s"] / one["mean_s"] - 1,
            "simulated_s": simulated_s, "simulated_error": simulated_s / one["mean_s"] - 1,
        }
        for load, one, other, simulated_s in rows
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the iteration times against the load, a panel per model and number of ranks."""
    models, counts = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "ranks"))
    with styled():
        figure = new_figure(2.3 * len(counts) + 0.6, 2.1 * len(models) + 0.5)
        panels = figure.subplots(len(models), len(counts), sharex=True, sharey="row", squeeze=False)
        for model, line in zip(models, panels, strict=True):
            for ranks, axes in zip(counts, line, strict=True):
                some = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
                loads = [100 * row["load"] for row in some]
                job_s, error_s = ([row[f"{what}_s"] for row in some] for what in ("job", "job_error"))
                axes.errorbar(loads, job_s, [2 * each for each in error_s], fmt="o", color=INK, label="job")
                axes.plot(loads, [row["simulated_s"] for row in some], color=BLUE, label="simulation")
                axes.plot(loads, [row["replay_s"] for row in some], "x", color=VERMILION, label="replay")
                axes.set_title(f"{model}, {ranks} ranks")
            line[0].set_ylim(bottom=0)  # of the whole line, after all has been drawn
            line[0].set_ylabel("iteration, s")
        figure.supxlabel("cross traffic to rank 0, % of the link", fontsize="medium")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        figure.savefig(path)


def medians(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line of Markdown per group of loads: the median error of simulation and replay."""
    lines = []
    for title, low, high in (("0", 0.0, 0.0), ("0.2 to 0.6", 0.1, 0.6), ("0.8", 0.7, 1.0)):
        some = [row for row in rows if low <= row["load"] <= high]
        errors = [statistics.median(abs(row[f"{what}_error"]) for row in some) for what in ("simulated", "replay")]
        lines.append(f"| {title} | {len(some)} | {errors[0]:.1%} | {errors[1]:.1%} |")
    return lines


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="for profiles, workloads and sweeps; kept")
    parser.add_argument("--models", default=",".join(MODELS), help="models, with commas between")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas between")
    parser.add_argument("--slower", type=float, default=1, metavar="N", help="factor of every time")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the times")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| model | ranks | load | job, ms | simulated, ms | error | replay, ms | error |\n" + "|---" * 8 + "|")
    rows = []
    for model in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for row in compared(model, ranks, options.slower, options.folder):
                rows.append(row)
                job_ms, error_ms, simulated_ms, replay_ms = (
                    f"{1e3 * row[f'{what}_s']:.1f}" for what in ("job", "job_error", "simulated", "replay")
                )
                errors = [f"{row[f'{what}_error']:+.1%}" for what in ("simulated", "replay")]
                cells = (model, ranks, row["load"], f"{job_ms} ± {error_ms}", simulated_ms, errors[0], replay_ms)
                print("", *cells, errors[1], "", sep=" | ", flush=True)
    print("\n| load | points | simulation, median error | replay, median error |\n|---|---|---|---|")
    print("\n".join(medians(rows)))
    if options.figure:
        draw(rows, options.figure)
    write_result({"points": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
