"""Quality of `ringtap traffic` beside installed peers, in one run on one machine (docs/method/benchmarks.md).

python benchmarks/traffic.py [--quick] [--peer NAME=PATH] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import _flows
import _lateness
import _load
import _plans
import _wire
from _context import Bench, Settings
from _figures import last_line
from _guarded import guarded
from _machine import CpuTimes, describe
from _namespaces import make_routes
from _peers import find_peers
from _processes import Processes
from _report import tables, write
from _ringtap import TOKEN
from _throughput import Throughput

MEASURES = ("plans", "throughput", "load", "lateness", "flows", "wire")
_CAUTION = 1.2  # a round may take longer than the longest one so far
_QUICK_LIMIT_S = 56.0  # the rest of the minute is for the end of the last measure and of the processes


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    before = CpuTimes.now()
    peers = find_peers(options.peer)
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, _processes_in(folder) as processes:
        routes, sentence = make_routes(processes)
        bench = Bench(_settings(options), processes, routes, peers, Path(folder))
        bench.notes += [sentence] if sentence else []
        if not any(peer.name == "iperf3" for peer in peers):
            bench.notes.append("iperf3 is not installed, so the ratios to it are null.")
        _measure(bench, options.only or list(MEASURES))
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples, bench.settings.streams[0]), tables(bench))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="end within 60 s")
    parser.add_argument("--repeats", type=int, default=5, help="of every measure (default 5; --quick: as time allows)")
    parser.add_argument("--streams", type=int, default=4, help="n of the transfers with n streams (default 4)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="another iperf3 or an iperf 2")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    if options.repeats < 1 or options.streams < 2:
        parser.error("--repeats must be 1 or more, --streams 2 or more")
    return options


def _settings(options: argparse.Namespace) -> Settings:
    if not options.quick:
        return Settings(False, options.repeats, tuple(dict.fromkeys((options.streams, 2))))
    return Settings(
        True,
        options.repeats,
        (options.streams,),
        bulk_s=1,
        load_s=2,
        lateness_s=1.5,
        offer_s=1,
        new_offered=12_000,
        limit_s=_QUICK_LIMIT_S,
    )


def _processes_in(folder: str) -> Processes:
    """Return processes with their calibration in the run's folder, so that they neither use nor replace the user's."""
    return Processes({"XDG_CACHE_HOME": folder} | TOKEN)


def _measure(bench: Bench, chosen: list[str]) -> None:
    """Measure everything once, figures with targets first; then repeat as often as requested or as time allows."""
    if "plans" in chosen:
        _plans.measure(bench)
    if chosen == ["plans"]:
        return
    ceiling_bps = _load.calibrate(bench)
    rounds = [Throughput(bench, route) for route in bench.routes] if "throughput" in chosen else []
    for throughput in rounds[:1]:
        throughput.round()
    for repeat in range(1 if bench.settings.quick else bench.settings.repeats):
        if "lateness" in chosen:
            _lateness.measure(bench, repeat)
        if "flows" in chosen:
            _measure_flows(bench, repeat)
        if "load" in chosen and ceiling_bps:
            _load.measure(bench, ceiling_bps, repeat)
        if "wire" in chosen and ceiling_bps and not bench.settings.quick:
            _wire.measure(bench, ceiling_bps, repeat)
    if "flows" in chosen:
        _flows.measure_concurrent(bench)
    _repeat_throughput(bench, rounds)


def _measure_flows(bench: Bench, repeat: int) -> None:
    for route in bench.routes[:1] if bench.settings.quick else bench.routes:
        for connections in ("kept", "new"):
            _flows.measure_rate(bench, route, connections, repeat)


def _repeat_throughput(bench: Bench, rounds: list[Throughput]) -> None:
    """Repeat the bulk transfers: the other route, then both in turn."""
    for number in range(1, bench.settings.repeats * len(rounds)):
        throughput = rounds[number % len(rounds)]
        if max(each.round_s for each in rounds) * _CAUTION > bench.left_s():
            bench.notes.append(
                f"The time of --quick allowed {number} rounds of bulk transfers, of both routes together."
            )
            return
        throughput.round()


if __name__ == "__main__":
    sys.exit(guarded(main))
