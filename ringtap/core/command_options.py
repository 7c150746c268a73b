"""Adds the options of the command line that several verbs share."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_result(options: Namespace, item: dict[str, Any], lines: Iterable[str]) -> int:
    """Print a result as JSON or in lines, as `add_json` lets the user choose; returns the exit code."""
    print(json.dumps(item) if options.json else "\n".join(lines))
    return 0


def add_force(parser: ArgumentParser) -> None:
    """Add ``--force``."""
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def add_verbose(parser: ArgumentParser) -> None:
    """Add ``-v`` for verbs that have settings."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print the settings first")


def add_training(parser: ArgumentParser) -> None:
    """Add the facts about a job's training that its logs may not hold."""
    parser.add_argument("--batch", type=int, metavar="N", help="samples of a rank in an iteration, for samples/s")
    parser.add_argument("--job-output", metavar="FILE", help="file with the job's output, for its epochs")
    parser.add_argument("--target-accuracy", type=float, metavar="SHARE", help="say when the job reached this accuracy")
    parser.add_argument(
        "--phase", type=int, metavar="N", help="describe this training phase (default: the one with the most time)"
    )


def training_facts(options: Namespace) -> dict[str, Any]:
    """Return the facts that were given, as the keywords of `ringtap.open_job`."""
    facts = {"batch": options.batch, "output": options.job_output, "target_accuracy": options.target_accuracy}
    facts["phase"] = options.phase
    return {name: value for name, value in facts.items() if value is not None}


def add_metrics(parser: ArgumentParser) -> None:
    """Add the address of a run's metrics."""
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        help="serve metrics for Prometheus at :PORT of this machine, or at HOST:PORT, or send them to an OpenTelemetry "
        "Collector at http://HOST:4318",
    )
    parser.add_argument("--metrics-public", action="store_true", help="let other machines read the metrics")
