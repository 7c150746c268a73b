"""Limits of this host, as ``ringtap traffic calibrate`` measured them: kept in a file, read by ``send`` and sweeps."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ringtap.errors import UsageError
from ringtap.json_validation import ShapeError, load_json
from ringtap.units import format_rate

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """The calibrated limits of a host.

    Attributes:
        host: the host that they are valid for: host name, kernel, Python, processors.
        measured_unix_s: time of the measurement.
        method: the faster send method.
        ceiling_bps: payload rate of long flows over loopback, sender and receiver both on this host, by that method.
        methods_bps: the same rate for each method.
        kept_flows_per_s: flows of 1 kB on kept connections.
        new_flows_per_s: flows of 1 kB with a connection each.
        spin_ns: time before a flow is due at which a launcher with a processor of its own stops sleeping.
        sleep_p50_us: how late sleeps end beside long flows, median.
        sleep_p99_us: the same, 99th percentile.
        lateness_p50_us: launch lateness on the idle host, median.
        lateness_p99_us: the same, 99th percentile.
        lateness_busy_p50_us: launch lateness while long flows run as fast as they can, median.
        lateness_busy_p99_us: the same, 99th percentile.
    """

    host: dict[str, Any]
    measured_unix_s: float
    method: Literal["send", "sendfile"]
    ceiling_bps: float
    methods_bps: dict[str, float]
    kept_flows_per_s: float
    new_flows_per_s: float
    spin_ns: int
    sleep_p50_us: float
    sleep_p99_us: float
    lateness_p50_us: float
    lateness_p99_us: float
    lateness_busy_p50_us: float
    lateness_busy_p99_us: float

    def spin_for(self, own_processor: bool) -> int:
        """Return for how long the launcher polls the clock before a flow, in ns; less on a shared processor."""
        return self.spin_ns if own_processor else min(self.spin_ns, round(self.sleep_p50_us * 1e3))

    def exceeded_by(self, load_bps: float, flows_per_s: float, new_connections: bool) -> str:
        """Return a text that names the first of these limits that a plan exceeds; empty if it exceeds none."""
        if load_bps > self.ceiling_bps:
            return f"{format_rate(load_bps)} is above this host's ceiling of {format_rate(self.ceiling_bps)}"
        most = self.new_flows_per_s if new_connections else self.kept_flows_per_s
        if flows_per_s > most:
            return f"{flows_per_s:.0f} flows a second are above this host's ceiling of {most:.0f}"
        return ""


def this_host() -> dict[str, Any]:
    """Return the properties of this host for which a calibration is valid."""
    return {
        "name": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
    }


def usual_path() -> Path:
    """Return the default file: in the user's cache folder, named by host, since hosts may share a home."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "ringtap" / f"calibration-{platform.node()}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": VERSION, **asdict(calibration)}, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file with -o") from error


_SHAPE = {"version": int, "host": dict, "method": str, "methods_bps": {str: float}, str: float}


def load(path: Path | None = None) -> Calibration | None:
    """Read this host's calibration; None if there is none, or it is for another host, kernel, Python or CPU count."""
    try:
        found = load_json(path or usual_path(), _SHAPE)
        if found.pop("version") != VERSION or found["host"] != this_host():
            return None
        return Calibration(**found)
    except (OSError, ShapeError, TypeError):
        return None
