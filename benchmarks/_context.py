"""State that all measures share: settings, routes, processes, remaining time, and the samples so far."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _machine import CpuTimes
from _namespaces import Route
from _peers import Peer
from _processes import BenchmarkError, Processes


@dataclass(frozen=True)
class Settings:
    """Extent of the measurements.

    Attributes:
        quick: short measures, with repeats only as time allows.
        repeats: repeats of every measure.
        streams: numbers of streams of the transfers with several streams; the target refers to the first one.
        bulk_s: length of a bulk transfer.
        load_s: length of a plan at a given load.
        lateness_s: length of a plan whose lateness is measured.
        offer_s: time for which small flows are offered.
        kept_offered: flows per second offered to kept connections.
        new_offered: flows per second offered with a connection each.
        concurrent: flows that must be open at the same time.
        limit_s: time limit of the whole run; None: no limit.
    """

    quick: bool
    repeats: int
    streams: tuple[int, ...]
    bulk_s: float = 3.0
    load_s: float = 10.0
    lateness_s: float = 10.0
    offer_s: float = 2.0
    kept_offered: int = 40_000
    new_offered: int = 20_000
    concurrent: int = 10_000
    limit_s: float | None = None


@dataclass
class Bench:
    """One run of the benchmark.

    Attributes:
        settings: extent of the measurements.
        processes: all processes of the run.
        routes: loopback first, then veth if it could be created.
        peers: tools to compare with.
        folder: folder for plans, logs and captures; removed at the end.
        samples: name of a measure -> its samples, one dictionary each.
        notes: sentences to print with the figures.
        failures: sentences about failed measures.
    """

    settings: Settings
    processes: Processes
    routes: list[Route]
    peers: list[Peer]
    folder: Path
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds that the run may still take."""
        limit_s = self.settings.limit_s
        return float("inf") if limit_s is None else self.begun_s + limit_s - time.monotonic()

    def path(self, name: str) -> Path:
        """Return the path of a new file in the run's folder; an old one of this name is removed."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def sample(self, measure: str, **values: Any) -> Iterator[dict[str, Any]]:
        """Take one sample, to which the block adds its figures; a failure is noted, and other measures go on."""
        case = " ".join(f"{key}={value}" for key, value in values.items())
        print(f"{time.monotonic() - self.begun_s:6.1f} s  {measure} {case}", file=sys.stderr, flush=True)
        figures: dict[str, Any] = dict(values)
        before = CpuTimes.now()
        try:
            yield figures
        except BenchmarkError as error:
            self.failures.append(f"{measure} {case}: {error}".replace(" :", ":"))
            return
        except (LookupError, ValueError) as error:  # a command's output lacks a value that this benchmark reads
            self.failures.append(f"{measure} {case}: unexpected output ({type(error).__name__}: {error})")
            return
        figures.setdefault("stolen_pct", before.stolen_pct_since())
        self.samples.setdefault(measure, []).append(figures)
