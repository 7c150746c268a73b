"""The interface of every collector: checked before a run, started beside a job, sampled, stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["ok", "degraded", "unavailable"]


@dataclass(frozen=True)
class Check:
    """The result of a check: what a node, a user and a job environment allow a collector.

    Attributes:
        state: ``ok``; ``degraded``: it collects less than it could; ``unavailable``: it collects nothing.
        reason: one sentence: what it found, or what is missing.
        remedy: one sentence: the command to run, the module to load, or whom to ask; empty if nothing is missing.
    """

    state: State
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """The context of a collector: the node's folder, the period, the job's processes and the options.

    Attributes:
        folder: the node's folder in the run directory.
        every_s: requested period; a collector with a shortest period of its own uses the longer of the two.
        pids: returns the pids of the recorded processes and their descendants at the time of the call; empty without a
            job. Expensive: not for every sample.
        options: command-line options of this collector (packets: ``interface``, ``filter``, ``snap_bytes`` and so on).
    """

    folder: Path
    every_s: float
    pids: Callable[[], list[int]] = list
    options: dict[str, str] = field(default_factory=dict)


class Collector(Protocol):
    """One source of measurements on a node; it writes only below the folder of its own name.

    ``sample`` may raise ``OSError``: the agent then stops this collector, notes the reason, and keeps the others.

    Attributes:
        name: its name for ``--collect``, and its folder.
        slow: True if a sample may take more than a millisecond; the collector then runs on a thread of its own.
        every_s: its actual period.
    """

    name: str
    slow: bool
    every_s: float

    def __init__(self, context: Context) -> None: ...

    def check(self) -> Check:
        """Check this node without leaving a trace on disk; takes less than a second and never raises."""
        ...

    def start(self) -> None:
        """Open the logs and take the first sample."""
        ...

    def sample(self) -> None:
        """Take one sample."""
        ...

    def stop(self) -> dict[str, Any]:
        """Take the last sample and close the logs; return facts for node.json (losses, counts), numbers as numbers."""
        ...
