"""Time that recording adds to a job's iterations and imports, from pairs measured in alternation."""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import random
import re
import statistics
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _context import Bench

#: Kind of job -> the figure that gives its overhead. On a busy core, the time of an iteration depends on the programs
#: that share the core's hardware, so the CPU time of the job's own processes counts there.
JUDGED_BY = {"computes": "cpu_s", "communicates": "mean_s"}
RANKS = 2
#: Computation time of the iteration to which overheads refer. The job that communicates sleeps for this time.
COMPUTE_S = 0.08
RATES = ("100ms", "10ms")  # the default, and 100 Hz
_JOB = str(Path(__file__).resolve().parent / "_overhead_job.py")
_RINGTAP = [sys.executable, "-m", "ringtap.cli"]
_JOB_S = 120.0
_START_S = 60.0
_HOOK_MODULES = ("sitecustomize", "ringtap_hook")
#: share of pairs trimmed at either end before the mean, because other programs may have disturbed them
TRIMMED = 0.2
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}


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


def added_pct(kind: str, pairs: Sequence[dict[str, dict[str, Any]]]) -> tuple[float, float, float]:
    """Return the time that the switched recording adds to an iteration, in per cent, with its 95 % interval.

    The iterations of the job that computes are short, so their added time is given in per cent of COMPUTE_S.
    """
    key = JUDGED_BY[kind]
    scale = 1.0
    if kind == "computes":
        scale = statistics.median(pair["without"][key] for pair in pairs) / (RANKS * COMPUTE_S)
    mean, low, high = interval(pairs, key)
    return mean * scale, low * scale, high * scale


def overhead(sample: dict[str, Any]) -> tuple[float, float, float]:
    """Return the overhead of a job's recording in per cent, with its 95 % interval.

    If the agent ran in both arms, its CPU time is added to that of the job's processes.
    """
    mean, low, high = added_pct(sample["kind"], sample["pairs"])
    agent_pct = 100 * (sample["agent_cpu_share"] or 0) / RANKS  # of as many cores as there are ranks
    return mean + agent_pct, low + agent_pct, high + agent_pct


def instruction_counter() -> tuple[Callable[[], int] | None, str]:
    """Return a reader of the user-mode instructions of this process, or None and the reason why there is none.

    It uses perf_event_open(2), which also counts the threads started after it.
    """
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None or sys.platform != "linux":
        return None, f"perf_event_open is not known on {platform.machine()}"
    # struct perf_event_attr: PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS; inherit, exclude_kernel, exclude_hv
    attributes = bytearray(128)
    struct.pack_into("IIQ", attributes, 0, 0, len(attributes), 1)
    struct.pack_into("Q", attributes, 40, 1 << 1 | 1 << 5 | 1 << 6)
    buffer = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, buffer, 0, -1, -1, 0)
    if fd < 0:
        return None, f"the kernel gives no instruction counter: {os.strerror(ctypes.get_errno())}"
    return (lambda: int(struct.unpack("Q", os.read(fd, 8))[0])), ""


def measure_job(bench: Bench, kind: str, every: str, limit_s: float, half_width_pct: float) -> None:
    """Run one job of this kind under ``ringtap run``, with its recording switched between blocks of iterations."""
    with bench.sample("job", kind=kind, every=every) as figures:
        run = bench.folder / f"job-{kind}-{every}"
        seed = str(random.Random(f"{kind} {every}").randrange(10**6))
        job = [sys.executable, _JOB, kind, str(limit_s), str(half_width_pct), seed]
        command = [*_RINGTAP, "run", "--every", every, "--node", "here", "-o", str(run), "--", *job]
        ended = bench.processes.start(command).result(limit_s + _START_S)
        figures.update(json.loads(ended.stdout.splitlines()[-1]))
        figures["half_width_pct"] = half_width_pct
        if figures["no_instructions"] and figures["no_instructions"] not in bench.notes:
            bench.notes.append(figures["no_instructions"])
        _check_recorded(run, figures["recorded"])


def _check_recorded(run: Path, iterations: int) -> None:
    """Check that the run recorded exactly the iterations with recording, as the measured overhead assumes."""
    from _processes import BenchmarkError

    from ringtap.core.records import open_records

    steps = run / "nodes" / "here" / "steps"
    counts = [open_records(path).count for path in steps.glob("rank*-*.rec") if ".ddp." not in path.name]
    if counts != [iterations] * RANKS:
        raise BenchmarkError(f"two ranks made {iterations} recorded steps each, but the files have {counts}")


def measure_imports(bench: Bench, count: int) -> None:
    """Measure ``import torch`` in a rank process with and without the hook, both at the same time."""
    for turn in range(count):
        kinds = [("without", {}), ("with", _job_environment(bench))]
        started = {}
        for kind, extra in kinds if turn % 2 == 0 else reversed(kinds):
            variables = [f"{key}={value}" for key, value in (extra | {"RANK": "0"}).items()]
            argv = ["env", *variables, sys.executable, "-X", "importtime", "-c", "import torch"]
            started[kind] = bench.processes.start(argv)
        for kind, child in started.items():
            with bench.sample("import", hook=kind, pair=turn) as figures:
                ended = child.result(_JOB_S)
                figures["own_modules_ms"] = _own_modules_ms(ended.stderr)
                figures["cpu_ms"] = ended.cpu_s * 1000


def _own_modules_ms(output: str) -> float:
    """Return the import time of the hook's own modules by Python's clock: more precise than pairs, but incomplete."""
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", output)
    return sum(int(self_us) for self_us, name in lines if name.startswith(_HOOK_MODULES)) / 1000


def _job_environment(bench: Bench) -> dict[str, str]:
    """Return the variables that ``ringtap run`` adds to a job's environment; later calls read them from a file."""
    from _processes import BenchmarkError

    path = bench.folder / "job-environment.json"
    if not path.exists():
        code = "import json, os; print(json.dumps(dict(os.environ)))"
        argv = [*_RINGTAP, "run", "--node", "here", "-o", str(bench.folder / "environment"), "--"]
        given = json.loads(bench.processes.start([*argv, sys.executable, "-c", code]).result(_JOB_S).stdout)
        ours = {key: value for key, value in given.items() if key.startswith("RINGTAP_") or key == "PYTHONPATH"}
        if "RINGTAP_RUN" not in ours:
            raise BenchmarkError("ringtap run gave the job no hook")
        path.write_text(json.dumps(ours))
    environment: dict[str, str] = json.loads(path.read_text())
    return environment


def import_cost_ms(samples: list[dict[str, Any]], key: str) -> float | None:
    """Return the median over pairs of the time that the hook adds."""
    times = {(sample["pair"], sample["hook"]): sample[key] for sample in samples}
    pairs = [pair for pair, hook in times if hook == "with" and (pair, "without") in times]
    added = [times[pair, "with"] - times[pair, "without"] for pair in pairs]
    return statistics.median(added) if added else None
