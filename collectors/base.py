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
        state: ``ok``; ``degraded``: it collects, but less than it could; ``unavailable``: nothing.
        reason: one sentence: what it found, or what is missing.
        remedy: one sentence: the command to run, the module to load, whom to ask; empty where nothing is missing.
    """

    state: State
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """The surroundings of a collector: the node, the job and the run directory that it works for.

    Attributes:
        folder: the node's folder in the run directory.
        every_s: period asked for; a collector with a least period of its own takes the longer of the two.
        pids: gives the pids of the recorded processes and their descendants at the time of the call; empty without a
            job. Costly: not for every sample.
        options: words of the command line for one collector (packets: ``interface``, ``filter``, ``snap_bytes``).
    """

    folder: Path
    every_s: float
    pids: Callable[[], list[int]] = list
    options: dict[str, str] = field(default_factory=dict)


class Collector(Protocol):
    """One source of measurements on a node; it writes only below the folder of its own name.

    ``sample`` may raise ``OSError``: then the agent stops this collector, notes why, and goes on with the others.

    Attributes:
        name: the word for ``--collect``, and its folder.
        slow: True where a sample may take more than a millisecond: it then runs on a thread of its own.
        every_s: the period it really wants.
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
        """Take the last sample and close the logs; returns facts for node.json (losses, counts), numbers as numbers."""
        ...
