"""Whether a job's iterations take longer under ``ringtap run``, and whether its imports do."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _context import Bench
from _processes import BenchmarkError

WITHOUT = "without"
RATES = ("100ms", "10ms")  # the default, and 100 Hz
_JOB = str(Path(__file__).resolve().parent / "_overhead_job.py")
_RINGTAP = [sys.executable, "-m", "ringtap.cli"]
_JOB_S = 120.0
_WARM_UP = 5  # iterations in which DDP rebuilds its buckets
_CAUTION = 1.15  # a run may take longer than the longest one so far
_HOOK_MODULES = ("sitecustomize", "ringtap_hook")
_TRIMMED = 0.1  # of the iterations at either end: those that something else on the machine disturbed
_RESAMPLES = 2000


class Jobs:
    """Runs of the job, with and without: A B C, C B A and so on, so that a drift favours nobody.

    Args:
        bench: where the samples go.
        iterations: of each run.
        compute_s: of each iteration.
    """

    def __init__(self, bench: Bench, iterations: int, compute_s: float) -> None:
        self._bench, self._iterations, self._compute_s = bench, iterations, compute_s
        self._longest_s = 0.0

    def take(self, turn: int) -> None:
        """One run of each kind, as far as there is time: the first two at any rate."""
        order = [WITHOUT, *RATES]
        for place, every in enumerate(order if turn % 2 == 0 else reversed(order)):
            if (turn == 0 and place < 2) or self._longest_s * _CAUTION < self._bench.left_s():
                begun_s = time.monotonic()
                self._run(turn, every)
                self._longest_s = max(self._longest_s, time.monotonic() - begun_s)

    def _run(self, turn: int, every: str) -> None:
        bench = self._bench
        with bench.sample("job", every=every, pair=turn) as figures:
            command = [sys.executable, _JOB, str(self._iterations), str(self._compute_s)]
            run = bench.folder / f"job-{turn}-{every}"
            if every != WITHOUT:
                command = [*_RINGTAP, "run", "--every", every, "--node", "here", "-o", str(run), "--", *command]
            ended = bench.processes.start(command).result(_JOB_S)
            figures["iterations_s"] = json.loads(ended.stdout.splitlines()[-1])[_WARM_UP:]
            figures["iteration_ms"] = 1000 * trimmed_mean(figures["iterations_s"])
            if every != WITHOUT:
                figures.update(_recorded(run, self._iterations))


def _recorded(run: Path, iterations: int) -> dict[str, Any]:
    """What was written; and a run that recorded no steps would cost nothing and prove nothing."""
    from ringtap.records import open_records

    node = run / "nodes" / "here"
    steps = [open_records(path).count for path in (node / "steps").glob("rank*-*.rec") if ".ddp." not in path.name]
    if steps != [iterations] * 2:
        raise BenchmarkError(f"two ranks made {iterations} steps each, recorded were {steps}")
    size_bytes = sum(path.stat().st_size for path in node.rglob("*") if path.is_file())
    return {"disk_bytes": size_bytes}


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the tenth that is smallest and the tenth that is largest."""
    cut = int(len(values) * _TRIMMED)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def overhead_pct(samples: list[dict[str, Any]], every: str) -> tuple[float, float, float] | None:
    """Median over pairs of how much longer iterations took, in per cent, and its 95 % interval.

    The interval is a bootstrap of pairs and, within their runs, of iterations: with few pairs, the scatter of the
    iterations is all there is to tell how sure the figure is.
    """
    runs = {(sample["pair"], sample["every"]): sample["iterations_s"] for sample in samples}
    pairs = [(runs[key[0], WITHOUT], run) for key, run in runs.items() if key[1] == every and (key[0], WITHOUT) in runs]
    if not pairs:
        return None
    chance = random.Random(1)

    def again(values: list[float]) -> list[float]:
        return chance.choices(values, k=len(values))

    def middle(chosen: list[tuple[list[float], list[float]]]) -> float:
        return statistics.median(100 * (trimmed_mean(run) / trimmed_mean(bare) - 1) for bare, run in chosen)

    drawn = sorted(
        middle([(again(bare), again(run)) for bare, run in chance.choices(pairs, k=len(pairs))])
        for _ in range(_RESAMPLES)
    )
    return middle(pairs), drawn[int(_RESAMPLES * 0.025)], drawn[int(_RESAMPLES * 0.975)]


def measure_import(bench: Bench, turn: int) -> None:
    """``import torch`` in a rank process with and without the hook, in turn; CPU time, which others disturb less."""
    environments = [("without", {}), ("with", _job_environment(bench))]
    for kind, extra in environments if turn % 2 == 0 else reversed(environments):
        with bench.sample("import", hook=kind, pair=turn) as figures:
            words = [f"{key}={value}" for key, value in (extra | {"RANK": "0"}).items()]
            argv = ["env", *words, sys.executable, "-X", "importtime", "-c", "import torch"]
            ended = bench.processes.start(argv).result(_JOB_S)
            figures["own_modules_ms"] = _own_modules_ms(ended.stderr)
            figures.update({"cpu_ms": ended.cpu_s * 1000, "wall_ms": ended.wall_s * 1000})


def _own_modules_ms(said: str) -> float:
    """What the hook's own modules took, by Python's own clock: sharper than the pairs, and less than the whole."""
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", said)
    return sum(int(self_us) for self_us, name in lines if name.startswith(_HOOK_MODULES)) / 1000


def _job_environment(bench: Bench) -> dict[str, str]:
    """What ``ringtap run`` gives to a job beside its own environment; asked once."""
    kept = bench.folder / "job-environment.json"
    if not kept.exists():
        code = "import json, os; print(json.dumps(dict(os.environ)))"
        argv = [*_RINGTAP, "run", "--node", "here", "-o", str(bench.folder / "environment"), "--"]
        given = json.loads(bench.processes.start([*argv, sys.executable, "-c", code]).result(_JOB_S).stdout)
        ours = {key: value for key, value in given.items() if key.startswith("RINGTAP_") or key == "PYTHONPATH"}
        if "RINGTAP_RUN" not in ours:
            raise BenchmarkError("ringtap run gave the job no hook")
        kept.write_text(json.dumps(ours))
    environment: dict[str, str] = json.loads(kept.read_text())
    return environment


def import_cost_ms(samples: list[dict[str, Any]], key: str) -> float | None:
    """Median over pairs of what the hook adds."""
    taken = {(sample["pair"], sample["hook"]): sample[key] for sample in samples}
    added = [
        taken[pair, "with"] - taken[pair, "without"]
        for pair, hook in taken
        if hook == "with" and (pair, "without") in taken
    ]
    return statistics.median(added) if added else None
