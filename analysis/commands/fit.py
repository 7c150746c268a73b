"""``ringtap fit``: the general model fitted to a CSV file of points."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.installation import shipped_example
from ringtap.options import add_force, add_json
from ringtap.terminal import shell_word
from ringtap.units import parse_rate_bps, whole_number

MIN_SETS, MAX_SETS = 40, 100_000  # fewer sets do not reach the tails of a 95 % interval
_EXPONENTS: dict[str, Any] = {"0.5": 0.5, "1/2": 0.5, "1": 1.0, "2": 2.0, "free": "free"}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``fit``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("points", metavar="POINTS.csv", help="columns bandwidth_gbps and iteration_s")
    parser.add_argument("--capacity", default="25gbit", metavar="RATE", help="capacity of the bottleneck (25gbit)")
    parser.add_argument("--n", metavar="N", help="exponent: 0.5, 1, 2 or free (default: the one with the least AICc)")
    parser.add_argument(
        "--weights", metavar="COLUMN", help="standard error of each time; std_s is divided by sqrt(count)"
    )
    parser.add_argument(
        "--max-load", metavar="RATE", help="fit only the points at loads up to this one (17gbit; default: all)"
    )
    parser.add_argument("--robust", action="store_true", help="let outliers count for less")
    parser.add_argument(
        "--bootstrap", metavar="SETS", default="1000", help="resampled sets for intervals, 0 for none (1000)"
    )
    parser.add_argument("-o", dest="output", metavar="FIT.json", type=Path, help="write the fit, for ringtap predict")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_fit)


def _fit(options: argparse.Namespace) -> int:
    capacity_gbps = parse_rate_bps(options.capacity) / 1e9
    if capacity_gbps <= 0:
        raise UsageError(f"--capacity {options.capacity} is not a positive rate")
    if options.n is not None and options.n not in _EXPONENTS:
        raise UsageError(f"--n {options.n!r} is unknown: give 0.5, 1, 2 or free")
    sets = whole_number(options.bootstrap, "--bootstrap")
    if sets and not MIN_SETS <= sets <= MAX_SETS:
        raise UsageError(f"--bootstrap {sets} is out of range: 0 for no intervals, else {MIN_SETS} to {MAX_SETS}")
    if options.output is not None and options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: name another file or add --force")
    from ringtap.analysis.model.fit import CongestionModel
    from ringtap.analysis.model.fit_points import fit_points
    from ringtap.analysis.sweeps.tables import read_points_csv

    path = shipped_example(options.points) or Path(options.points)
    points = read_points_csv(path, capacity_gbps, options.weights)
    model = CongestionModel(capacity_gbps, None if options.n is None else _EXPONENTS[options.n])
    try:
        found = fit_points(model, points, options.robust, sets, options.max_load)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if options.output is not None:
        try:
            options.output.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.output} cannot be written: {error.strerror}") from error
    if options.json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False))
        return 0
    print("\n".join(found.lines()))
    if options.output is not None:
        print(f"Wrote {options.output}")
        print(f"Next: ringtap predict --fit {shell_word(options.output)} --slowdown 1.5")
    return 0
