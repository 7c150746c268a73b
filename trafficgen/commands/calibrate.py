"""Implements ``ringtap traffic calibrate``: measures how fast and how punctually this host can send."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.units import format_duration, format_rate


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``calibrate`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (default: one in the user's cache folder)"
    )
    add_json(parser)
    parser.set_defaults(handler=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    from ringtap.trafficgen.calibrate_host_limits import calibrate, save, usual_path

    path = options.output or usual_path()
    calibration = calibrate(lambda text: print(f"calibrating: {text}", file=sys.stderr, flush=True))
    save(calibration, path)
    if options.json:
        print(json.dumps(asdict(calibration)))
    else:
        rates = ", ".join(f"{name} {format_rate(rate)}" for name, rate in calibration.methods_bps.items())
        print(f"long flows, by send method: {rates}")
        kept, new = calibration.kept_flows_per_s, calibration.new_flows_per_s
        print(f"flows of 1 kB a second: {kept:.0f} on kept connections, {new:.0f} with a connection each")
        for name, p50, p99 in (
            ("idle", calibration.lateness_p50_us, calibration.lateness_p99_us),
            ("beside a long flow", calibration.lateness_busy_p50_us, calibration.lateness_busy_p99_us),
        ):
            print(f"lateness {name}: median {format_duration(p50 / 1e6)}, p99 {format_duration(p99 / 1e6)}")
        print(f"the launcher watches the clock for {format_duration(calibration.spin_ns / 1e9)} before a flow")
    print(f"Wrote {path}", file=sys.stderr if options.json else sys.stdout)
    return 0
