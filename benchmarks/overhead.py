"""Cost of ``ringtap run`` for a training job and its node, in one run on one machine (docs/reference/collectors.md).

python benchmarks/overhead.py [--quick] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import _overhead_agent
import _overhead_pairs
from _context import Bench, Settings
from _guarded import guarded
from _machine import CpuTimes, describe
from _namespaces import make_routes
from _overhead_pairs import JUDGED_BY, RATES
from _overhead_report import last_line, tables
from _processes import Processes
from _report import write

MEASURES = ("agent", "import", "jobs")
_QUICK_LIMIT_S = 115.0
_QUICK_IMPORTS = 10  # pairs
_IMPORT_PAIR_S = 2.5
_JOB_LIMIT_S = 240.0
_STARTED_S = 5.0  # time of a job before its first block and after its last


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    before = CpuTimes.now()
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, Processes({}) as processes:
        routes, sentence = make_routes(processes)
        settings = Settings(options.quick, options.imports, (), limit_s=options.limit_s)
        bench = Bench(settings, processes, routes, [], Path(folder))
        bench.notes += [sentence] if sentence else []
        _measure(bench, options.only or list(MEASURES), options.half_width)
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples), tables(bench))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="end within two minutes")
    parser.add_argument("--imports", type=int, default=20, help="pairs of imports (default 20; --quick: at most 10)")
    parser.add_argument(
        "--half-width",
        type=float,
        metavar="PCT",
        help="a job ends when the 95 %% interval of its overhead is within ± PCT (default 0.25; --quick: 0.5)",
    )
    parser.add_argument("--limit-s", type=float, help="seconds for everything (default: none; --quick: 115)")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    if options.half_width is None:
        options.half_width = 0.5 if options.quick else 0.25
    if options.quick:
        options.imports = min(options.imports, _QUICK_IMPORTS)
        options.limit_s = options.limit_s or _QUICK_LIMIT_S
    if options.imports < 1 or options.half_width <= 0 or (options.limit_s is not None and options.limit_s <= 0):
        parser.error("--imports must be 1 or more, --half-width and --limit-s above 0")
    return options


def _measure(bench: Bench, chosen: list[str], half_width_pct: float) -> None:
    """Measure the agent first, then imports, then the jobs, which share the remaining time."""
    quick = bench.settings.quick
    if "agent" in chosen:
        for traffic in ("little",) if quick else _overhead_agent.TRAFFIC:
            for every in ("100ms", "10ms", "1ms"):
                _overhead_agent.measure(bench, every, traffic, 2.0 if quick else 20.0)
    if "import" in chosen:
        pairs = min(float(bench.settings.repeats), max(1.0, bench.left_s() / 3 / _IMPORT_PAIR_S))
        _overhead_pairs.measure_imports(bench, int(pairs))
    if "jobs" in chosen:
        cases = [(kind, every) for every in RATES[: 1 if quick else None] for kind in JUDGED_BY]
        for done, (kind, every) in enumerate(cases):
            limit_s = min(_JOB_LIMIT_S, max(_STARTED_S, bench.left_s() / (len(cases) - done) - _STARTED_S))
            _overhead_pairs.measure_job(bench, kind, every, limit_s, half_width_pct)


if __name__ == "__main__":
    sys.exit(guarded(main))
