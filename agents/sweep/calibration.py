"""Calibration of a host's traffic generator, on first use: ``python -m ringtap.agents.sweep.calibration``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from ringtap.errors import UsageError
from ringtap.terminal import as_command
from ringtap.trafficgen.calibration import Calibration, calibrate, load, save, usual_path


def calibrated(say: Callable[[str], None] = lambda _: None) -> Calibration:
    """Return this host's calibration; if there is none, make one, which takes 10 s.

    Raises:
        MeasurementError: flows failed over loopback.
    """
    calibration = load()
    if calibration is None:
        say("Calibrating this host's traffic generator, once; takes 10 s")
        calibration = calibrate()
        with suppress(UsageError):  # if the home directory is not writable, the next run calibrates again
            save(calibration, usual_path())
    return calibration


def main() -> int:
    """Print the calibration as JSON."""
    print(json.dumps(asdict(calibrated())))
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
