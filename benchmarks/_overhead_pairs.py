"""Computes the time that recording adds to a job's iterations, from pairs of blocks measured in alternation."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _bench import Bench

#: Kind of job -> the figure that gives its overhead. On a busy core, the time of an iteration depends on the programs
#: that share the core's hardware, so the CPU time of the job's own processes counts there.
JUDGED_BY = {"computes": "cpu_s", "communicates": "mean_s"}
RANKS = 2
#: Computation time of the iteration to which overheads refer. The job that communicates sleeps for this time.
COMPUTE_S = 0.08
RATES = ("100ms", "10ms")  # the default, and 100 Hz
_JOB = str(Path(__file__).resolve().parent / "_overhead_job.py")
_START_S = 60.0
#: share of pairs trimmed at either end before the mean, because other programs may have disturbed them
TRIMMED = 0.2


def interval(pairs: Sequence[dict[str, dict[str, Any]]], key: str) -> tuple[float, float, float]:
    """Return the mean difference of paired blocks, in per cent of the block without recording, and its 95 % interval.

    The mean is that of the logarithms of the ratios, so that it favours neither arm. It is trimmed by a fifth of the
    pairs at either end; its interval is Yuen's: Student's t with the winsorized variance (Wilcox, Introduction to
    Robust Estimation and Hypothesis Testing, section 4.3).
    """
    from scipy.special import stdtrit

    values = sorted(math.log(pair["with"][key] / pair["without"][key]) for pair in pairs)
    count, cut = len(values), int(len(values) * TRIMMED)
    middle = statistics.fmean(values[cut : count - cut])
    if count - 2 * cut < 3:
        return 100 * math.expm1(middle), -math.inf, math.inf
    winsorized = [min(max(value, values[cut]), values[count - cut - 1]) for value in values]
    error = statistics.stdev(winsorized) / ((1 - 2 * cut / count) * math.sqrt(count))
    reach = float(stdtrit(count - 2 * cut - 1, 0.975)) * error
    low, mean, high = (100 * math.expm1(value) for value in (middle - reach, middle, middle + reach))
    return mean, low, high


def overhead(sample: dict[str, Any]) -> tuple[float, float, float]:
    """Return the overhead of a job's recording in per cent of an iteration, with its 95 % interval.

    The iterations of the job that computes are short, so their added time is given in per cent of COMPUTE_S. If the
    agent ran in both arms, its CPU time is added to that of the job's processes.
    """
    pairs, key = sample["pairs"], JUDGED_BY[sample["kind"]]
    scale = 1.0
    if sample["kind"] == "computes":
        scale = statistics.median(pair["without"][key] for pair in pairs) / (RANKS * COMPUTE_S)
    agent_pct = 100 * (sample["agent_cpu_share"] or 0) / RANKS  # of as many cores as there are ranks
    mean, low, high = (value * scale + agent_pct for value in interval(pairs, key))
    return mean, low, high


def measure_job(bench: Bench, kind: str, every: str, limit_s: float) -> None:
    """Run one job of this kind under ``ringtap run``, with its recording switched between blocks of iterations."""
    with bench.sample("job", kind=kind, every=every) as figures:
        run = bench.folder / f"job-{kind}-{every}"
        seed = str(random.Random(f"{kind} {every}").randrange(10**6))
        job = [sys.executable, _JOB, kind, limit_s, seed]
        recording = bench.processes.ringtap("run", "--every", every, "--node", "here", "-o", run, "--", *job)
        ended = recording.result(limit_s + _START_S)
        figures.update(json.loads(ended.stdout.splitlines()[-1]))
        _check_recorded(run, figures["recorded"])


def _check_recorded(run: Path, iterations: int) -> None:
    """Check that the run recorded exactly the iterations with recording, as the measured overhead assumes."""
    from _processes import BenchmarkError

    from ringtap.core.append_only_logs import open_records

    steps = run / "nodes" / "here" / "steps"
    counts = [open_records(path).count for path in steps.glob("rank*-*.rec") if ".ddp." not in path.name]
    if counts != [iterations] * RANKS:
        raise BenchmarkError(f"two ranks made {iterations} recorded steps each, but the files have {counts}")
