"""Implements ``ringtap predict``: predicts the iteration time at a load, or the load for a slowdown, from a fit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.units import format_duration, parse_load

if TYPE_CHECKING:
    from ringtap.analysis.model.predict import AllowedLoad, Prediction


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--fit", required=True, metavar="FIT", help="output of ringtap fit -o, or a report.json")
    parser.add_argument("--series", metavar="NAME", help="series of a report.json (default: its only one)")
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument(
        "--load", metavar="LOAD", help="cross traffic (18gbit, 0.7 or 70%%): predict the iteration time"
    )
    question.add_argument(
        "--slowdown", metavar="FACTOR", help="time over that without load, e.g. 1.5: predict the load"
    )
    add_json(parser)
    parser.set_defaults(handler=_predict)


def _predict(options: argparse.Namespace) -> int:
    from ringtap.analysis.model.predict import read_fit

    slowdown = None if options.slowdown is None else _times(options.slowdown)
    fit = read_fit(Path(options.fit), options.series)
    if options.load is not None:
        prediction = fit.at(parse_load(options.load, fit.capacity_gbps * 1e9, "--load").bps / 1e9)
        found: Prediction | AllowedLoad = prediction
        lines = _time(prediction)
    else:
        allowed = fit.load_for(slowdown or 1.0)
        found = allowed
        lines = _load(allowed, fit.capacity_gbps)
    if options.json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False))
        return 0
    print("\n".join([*lines, *(f"  warning: {text}" for text in found.warnings)]))
    return 0


def _times(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"--slowdown {text!r} is not a number: 1.5 is 50 % more than without cross traffic") from error


def _time(found: Prediction) -> list[str]:
    def interval(ends: tuple[float, float] | None) -> str:
        return "unknown" if ends is None else " to ".join(map(format_duration, ends))

    load, time = f"{found.load_gbps:.4g} Gbit/s", format_duration(found.iteration_s)
    return [
        f"At {load}  {time} per iteration, {found.slowdown:.3g} times that without cross traffic",
        f"  {found.level:.0%} of the curve    {interval(found.curve_s)}",
        f"  {found.level:.0%} of a new mean   {interval(found.point_s)}",
    ]


def _load(found: AllowedLoad, capacity_gbps: float) -> list[str]:
    low = "unknown" if found.low_gbps is None else f"{found.low_gbps:.4g}"
    high = "unknown" if found.high_gbps is None else f"{found.high_gbps:.4g}"
    time, load = format_duration(found.iteration_s), f"{found.load_gbps:.4g} of {capacity_gbps:g} Gbit/s"
    return [
        f"{found.slowdown:g} times the time without cross traffic, {time} per iteration, at {load}",
        f"  {found.level:.0%} interval  {low} to {high} Gbit/s",
    ]
