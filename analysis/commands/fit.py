"""``ringtap fit`` and ``ringtap demand``: fits of measured points, and the bytes that a collective needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ringtap.analysis.model.breakpoint import BreakCandidate, BreakResult, compared, find_break
from ringtap.analysis.model.congestion_point import CongestionResult, find_congestion_point
from ringtap.analysis.model.fit import CongestionModel, FitResult
from ringtap.analysis.sweeps.points_csv import Points, read_points_csv
from ringtap.errors import UsageError
from ringtap.terminal import shell_word
from ringtap.units import counted, format_duration, format_rate, format_size, parse_duration_s, parse_rate_bps

FEWEST_SETS, MOST_SETS = 40, 100_000  # fewer do not reach the tails of a 95 % interval
_EXPONENTS: dict[str, Any] = {"0.5": 0.5, "1/2": 0.5, "1": 1.0, "2": 2.0, "free": "free"}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``fit`` or ``demand``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    {"demand": _demand_arguments, "fit": _fit_arguments}[name](parser)
    parser.add_argument("--json", action="store_true", help="print the data alone, as JSON")


def _demand_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", required=True, metavar="COUNT", help="parameters of the model, 32 bit each")
    parser.add_argument("--workers", required=True, metavar="N", help="number of workers")
    parser.add_argument("--iteration", metavar="TIME", help="mean iteration time, e.g. 370ms: gives the bandwidth")
    parser.add_argument(
        "--collective",
        default="ring",
        metavar="NAME",
        help="ring (default), reduce-scatter-all-gather, parameter-server, tree or hierarchical",
    )
    parser.add_argument("--group", default="1", metavar="G", help="workers that share a node, for hierarchical")
    parser.set_defaults(handler=_demand)


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("points", metavar="POINTS.csv", help="columns bandwidth_gbps and iteration_s")
    parser.add_argument("--capacity", default="25gbit", metavar="RATE", help="capacity of the bottleneck (25gbit)")
    parser.add_argument("--n", metavar="N", help="exponent: 0.5, 1, 2 or free; without it the least AICc chooses")
    parser.add_argument(
        "--weights", metavar="COLUMN", help="standard error of each time; std_s is divided by sqrt(count)"
    )
    parser.add_argument("--robust", action="store_true", help="let outliers count for less")
    parser.add_argument(
        "--bootstrap", metavar="SETS", default="1000", help="resampled sets for intervals, 0 for none (1000)"
    )
    parser.add_argument("-o", dest="output", metavar="FIT.json", type=Path, help="keep the fit, for ringtap predict")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    parser.set_defaults(handler=_fit)


def _count(text: str, option: str) -> int:
    try:
        number = Decimal(text.replace("_", "").replace(",", ""))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or abs(number) >= 10**18 or number != int(number):
        raise UsageError(f"{option} {text!r} is not a whole number below 10^18")
    return int(number)


def _print_json(item: object) -> None:
    print(json.dumps(item, indent=1, allow_nan=False))


def _demand(options: argparse.Namespace) -> int:
    from ringtap.analysis.model.demand import demand

    result = demand(
        _count(options.params, "--params"),
        _count(options.workers, "--workers"),
        options.collective,
        _count(options.group, "--group"),
    )
    iteration_s = None if options.iteration is None else parse_duration_s(options.iteration)
    required_bps = None if iteration_s is None else result.required_bps(iteration_s)
    if options.json:
        item: dict[str, Any] = {"collective": result.collective, "parameters": result.parameters}
        item |= {"workers": result.workers, "demand_bytes": result.worker_bytes, "demand_mb": result.worker_bytes / 1e6}
        item |= {"busiest_link_bytes": result.busiest_link_bytes, "busiest_link_mb": result.busiest_link_bytes / 1e6}
        item |= {"iteration_s": iteration_s, "required_bps": required_bps}
        item |= {"required_gbps": None if required_bps is None else required_bps / 1e9, "source": result.source}
        _print_json(item)
        return 0
    print(
        f"{result.collective}, {counted(result.workers, 'worker')}, {counted(result.parameters, 'parameter')} of 32 bit"
    )
    print(f"Demand a worker and iteration  {format_size(result.worker_bytes)}")
    print(f"Busiest link, one direction    {format_size(result.busiest_link_bytes)}")
    if iteration_s is not None and required_bps is not None:
        at = format_duration(iteration_s)
        print(f"Bandwidth required             {format_rate(required_bps)} at {at} an iteration")
    print(f"Source: {result.source}")
    return 0


def _fit(options: argparse.Namespace) -> int:
    capacity_gbps = parse_rate_bps(options.capacity) / 1e9
    if capacity_gbps <= 0:
        raise UsageError(f"--capacity {options.capacity} is not a positive rate")
    if options.n is not None and options.n not in _EXPONENTS:
        raise UsageError(f"--n {options.n!r} is unknown: give 0.5, 1, 2 or free")
    sets = _count(options.bootstrap, "--bootstrap")
    if sets and not FEWEST_SETS <= sets <= MOST_SETS:
        raise UsageError(f"--bootstrap {sets} is out of range: 0 for no intervals, else {FEWEST_SETS} to {MOST_SETS}")
    if options.output is not None and options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: name another file or add --force")
    path = Path(options.points)
    points = read_points_csv(path, capacity_gbps, options.weights)
    from ringtap.analysis.model.fit import CongestionModel

    model = CongestionModel(capacity_gbps, None if options.n is None else _EXPONENTS[options.n])
    try:
        found = fit(model, points, options.robust, sets)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if options.output is not None:
        try:
            options.output.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.output} cannot be written: {error.strerror}") from error
    if options.json:
        _print_json(found.to_json())
        return 0
    print("\n".join(found.lines()))
    if options.output is not None:
        print(f"Wrote {options.output}")
        print(f"Next: ringtap predict --fit {shell_word(options.output)} --slowdown 1.5")
    return 0


@dataclass(frozen=True)
class Found:
    """A fit with both kinds of congestion point.

    Attributes:
        fit: the fit.
        construction: the congestion point by the construction in the thesis's appendix A.2.
        placed: the break between two fitted line segments.
    """

    fit: FitResult
    construction: CongestionResult
    placed: BreakResult

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; a missing point is null, with the reason as a warning."""
        item = self.fit.to_json()
        for name, found in (("congestion_point", self.construction), ("break", self.placed)):
            item[name] = None if found.point is None else found.point.to_json()
            if found.point is None:
                item["warnings"].append(f"no {name.replace('_', ' ')}: {found.reason}")
        if self.placed.point is not None and (text := compared(self.placed.point, self.fit)):
            item["break"]["warnings"].append(text)
        return item

    def lines(self) -> list[str]:
        """Return the lines of the text for a terminal."""
        lines = [self.fit.report()]
        point, place = self.construction.point, self.placed.point
        if point is None:
            lines.append(f"No congestion point: {self.construction.reason}")
        else:
            at = f"{point.bandwidth_gbps:.4g} Gbit/s, {format_duration(point.iteration_s)}"
            lines.append(f"Congestion point  {at}: {point.data_mb:.1f} MB an iteration")
        if place is None:
            return [*lines, f"No break: {self.placed.reason}"]
        load, volume = _between(place.bandwidth_gbps, "Gbit/s"), _between(place.data_mb, "MB an iteration")
        lines.append(f"Break of two lines  {load}: {volume}")
        told = [*place.warnings, *filter(None, [compared(place, self.fit)])]
        return [*lines, *(f"  warning: {text}" for text in told)]


def fit(model: CongestionModel, points: Points, robust: bool, samples: int) -> Found:
    """Fit the points and look for both kinds of congestion point."""
    loads, times, capacity = points.bandwidth_gbps, points.iteration_s, model.capacity_gbps
    found = model.fit(loads, times, spread_s=points.error_s, robust=robust, bootstrap=samples)
    return Found(found, find_congestion_point(loads, times, capacity), find_break(loads, times, capacity))


def _between(number: BreakCandidate, unit: str) -> str:
    return f"{number.value:.4g} ({number.low:.4g} to {number.high:.4g}) {unit}"
