"""What ``ringtap run`` costs a training job and its node, in one run on one machine (docs/collectors.md).

python benchmarks/overhead.py [--quick] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import _overhead_agent
import _overhead_pairs
from _context import Bench, Settings
from _guarded import guarded
from _machine import CpuTimes, describe
from _namespaces import make_routes
from _overhead_report import last_line, tables
from _processes import Processes
from _report import write

MEASURES = ("agent", "import", "jobs")
_QUICK_LIMIT_S = 55.0
_CAUTION = 0.6  # a turn that is cut short is of use, too


def main() -> int:
    """Measure, print the tables and, last, one JSON object; 1 when something could not be measured."""
    options = _options()
    before = CpuTimes.now()
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, Processes({}) as processes:
        routes, sentence = make_routes(processes)
        settings = Settings(options.quick, options.pairs, (), limit_s=_QUICK_LIMIT_S if options.quick else None)
        bench = Bench(settings, processes, routes, [], Path(folder))
        bench.notes += [sentence] if sentence else []
        _measure(bench, options.only or list(MEASURES))
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples), tables(bench.samples))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument(
        "--pairs", type=int, default=12, help="of runs and imports (default 12; --quick: as time allows)"
    )
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs must be 1 or more")
    return options


def _measure(bench: Bench, chosen: list[str]) -> None:
    """The agent first; then the pairs, one of each by turns for as long as there is time."""
    quick = bench.settings.quick
    if "agent" in chosen:
        for traffic in ("little",) if quick else _overhead_agent.TRAFFIC:
            for every in ("100ms", "10ms", "1ms"):
                _overhead_agent.measure(bench, every, traffic, 2.0 if quick else 20.0)
    iterations, compute_s = (40, 0.03) if quick else (100, 0.1)
    jobs = _overhead_pairs.Jobs(bench, iterations, compute_s)
    for turn in range(bench.settings.repeats):
        begun_s = time.monotonic()
        if "import" in chosen:
            _overhead_pairs.measure_import(bench, turn)
        if "jobs" in chosen:
            jobs.take(turn)
        if (time.monotonic() - begun_s) * _CAUTION > bench.left_s():
            bench.notes.append(f"The time of --quick allowed {turn + 1} turns of imports and jobs.")
            return


if __name__ == "__main__":
    sys.exit(guarded(main))
