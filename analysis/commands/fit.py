"""Implements ``ringtap fit``: fits the general model to a CSV file of points, or to a series of a sweep."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.installation import shipped_example
from ringtap.core.run_directory_schema import POINTS_JSONL, REPORT_JSON
from ringtap.core.terminal_escaping import shell_word
from ringtap.core.units import counted, whole_number

if TYPE_CHECKING:
    from ringtap.analysis.sweeps.points_csv import Points

MIN_SETS, MAX_SETS = 40, 100_000  # fewer sets do not reach the tails of a 95 % interval
_EXPONENTS: dict[str, Any] = {"0.5": 0.5, "1/2": 0.5, "1": 1.0, "2": 2.0, "free": "free"}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``fit``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "points", metavar="POINTS.csv|RUN", help="columns bandwidth_gbps and iteration_s, or a sweep's run directory"
    )
    parser.add_argument("--series", metavar="NAME", help="series of a sweep (default: its only one)")
    parser.add_argument("--capacity", metavar="RATE", help="for a table: capacity of the bottleneck, such as 25gbit")
    parser.add_argument("--n", metavar="N", help="exponent: 0.5, 1, 2 or free (default: the one with the least AICc)")
    parser.add_argument(
        "--weights", metavar="COLUMN", help="standard error of each time; std_s is divided by sqrt(count)"
    )
    parser.add_argument(
        "--max-load", metavar="LOAD", help="fit only the points at loads up to this one: 17gbit or 68%% (default: all)"
    )
    parser.add_argument("--robust", action="store_true", help="leave out points that the others contradict")
    parser.add_argument(
        "--bootstrap", metavar="SETS", default="1000", help="resampled sets for intervals, 0 for none (1000)"
    )
    parser.add_argument("-o", dest="output", metavar="FIT.json", type=Path, help="write the fit, for ringtap predict")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the models compared, and intervals")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_fit)


def _of_table(path: Path, options: argparse.Namespace) -> tuple[float, Points]:
    from ringtap.analysis.sweeps.points_csv import capacity_for, read_points_csv

    if options.series is not None:
        raise UsageError(f"--series is for the run directory of a sweep: {path} is none")
    run = path.resolve().parent.parent
    if path.resolve().parent == (run / REPORT_JSON).parent and (run / POINTS_JSONL).is_file():
        raise UsageError(f"{path} is the table of a report: ringtap fit {shell_word(run)} reads its sweep")
    points = read_points_csv(path, options.capacity, options.weights)
    return capacity_for(path, options.capacity), points


def _of_sweep(path: Path, options: argparse.Namespace) -> tuple[float, Points]:
    """Return the capacity and the points of a series, as its report fits them."""
    from ringtap.analysis.sweeps.points_csv import Points
    from ringtap.analysis.sweeps.sweep import open_sweep

    if options.capacity is not None or options.weights is not None:
        raise UsageError(f"--capacity and --weights are for a table: the sweep {path} has its own")
    sweep = open_sweep(path)
    if options.series is None and len(sweep.names) != 1:
        names = ", ".join(sweep.names) or "none yet"
        raise UsageError(f"{path} has {counted(len(sweep), 'series', 'series')}: name one with --series ({names})")
    series = sweep[options.series or sweep.names[0]]
    return series.capacity_gbps, Points(series.loads_gbps, series.times_s, None, series.iterations_s)


def _fit(options: argparse.Namespace) -> int:
    if options.n is not None and options.n not in _EXPONENTS:
        raise UsageError(f"--n {options.n!r} is unknown: give 0.5, 1, 2 or free")
    sets = whole_number(options.bootstrap, "--bootstrap")
    if sets and not MIN_SETS <= sets <= MAX_SETS:
        raise UsageError(f"--bootstrap {sets} is out of range: 0 for no intervals, else {MIN_SETS} to {MAX_SETS}")
    if options.output is not None and options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: name another file or add --force")
    from ringtap.analysis.model.fit import CongestionModel
    from ringtap.analysis.model.fit_and_congestion_points import fit_points

    path = shipped_example(options.points) or Path(options.points)
    capacity_gbps, points = (_of_sweep if path.is_dir() else _of_table)(path, options)
    model = CongestionModel(capacity_gbps, None if options.n is None else _EXPONENTS[options.n])
    try:
        found = fit_points(model, points, options.robust, sets, options.max_load)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if options.output is not None:
        with file_errors(options.output, "cannot be written"):
            options.output.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False))
        return 0
    print("\n".join([*found.lines(), *(["", *found.details()] if options.verbose else [])]))
    if options.output is not None:
        print(f"Wrote {options.output}")
        print(f"Next: ringtap predict --fit {shell_word(options.output)} --slowdown 1.5")
    return 0
