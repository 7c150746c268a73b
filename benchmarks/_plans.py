"""Cost of a plan of a million flows: time and memory of writing and of reading it."""

from __future__ import annotations

import json
import sys

from _context import Bench
from _processes import BenchmarkError
from _ringtap import traffic

_FLOWS = 1_000_000
_MEAN_BYTES = 1_711_250  # mean of the web-search sizes
_LOAD_BPS = 100_000_000_000
_CHECK = """
import sys, pathlib
from ringtap.trafficgen.plans.plan_file import PlanFile
PlanFile(pathlib.Path(sys.argv[1])).check()
"""


def measure(bench: Bench) -> None:
    """Take one sample; this measure comes first, because a child's peak memory starts at that of its parent."""
    duration_s = _FLOWS * 1.001 * _MEAN_BYTES * 8 / _LOAD_BPS
    plan = bench.path("million.plan")
    with bench.sample("million flows") as figures:
        arguments = ["--kind", "consistent", "--load", f"{_LOAD_BPS}bit", "--duration", f"{duration_s:.3f}s"]
        address = f"{bench.routes[0].address}:5001"
        written = traffic(bench.processes, "plan", *arguments, "--to", address, "-o", plan, timeout_s=120)
        with plan.open() as file:
            flows = json.loads(file.readline())["flows"]
        if flows < _FLOWS:
            raise BenchmarkError(f"the plan holds {flows} flows")
        read = bench.processes.start([sys.executable, "-c", _CHECK, str(plan)]).result(120)
        figures |= {"flows": flows, "file_mb": plan.stat().st_size / 1e6}
        figures |= {"write_s": written.wall_s, "write_rss_mb": written.peak_rss_bytes / 1e6}
        figures |= {"read_s": read.wall_s, "read_rss_mb": read.peak_rss_bytes / 1e6}
    plan.unlink(missing_ok=True)
