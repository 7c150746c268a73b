"""Predicts without a network, from Python: iterations of a workload, other orders of tensors, jobs that share links."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from ringtap.core.check_api_arguments import option_names_as_arguments, path_of
from ringtap.core.installation import missing

# arguments whose numbers are bit/s, seconds or bytes -> the unit that the command wants with them
_UNITS = {"capacity": "bit", "latency": "s", "overhead": "s", "time_limit": "s", "partition": "B", "credit": "B"}


def simulate(workload: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Simulate the iterations of a workload on a network, with cross traffic.

    Args:
        workload: its folder.
        options: the options of ``ringtap workload simulate``, with underscores for dashes: ``capacity="25gbit"``,
            ``loads="0:0.8:0.2"``. A number is bit/s, seconds or bytes; an option that may be repeated takes a list.

    Returns:
        What the command prints with ``--json``; ``points`` has a row for each load.

    Raises:
        UsageError: an option is unknown, missing or wrong, or the workload cannot be read.
    """
    return _called(("workload", "simulate"), "simulate", [workload], options)


def whatif(workload: str | os.PathLike[str] | None = None, **options: Any) -> dict[str, Any]:
    """Calculate iteration times for other orders of tensors, or other overlap.

    Args:
        workload: its folder; None: ``tensors=`` names a table.
        options: the options of ``ringtap whatif``, as for `simulate`.

    Returns:
        What the command prints with ``--json``; ``points`` has a row for each load.

    Raises:
        UsageError: as for `simulate`.
    """
    return _called(("whatif",), "whatif_transfer_order", [] if workload is None else [workload], options)


def schedule(*workloads: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Find the time shifts with which jobs share links, and how compatible they are.

    Args:
        workloads: folders of workloads, or runs of jobs that ran alone.
        options: the options of ``ringtap schedule``, as for `simulate`; ``job=`` is one, or a list.

    Returns:
        What the command prints with ``--json``: ``score``, ``shifts_ms``, and rows of ``jobs`` and ``links``.

    Raises:
        UsageError: as for `simulate`.
    """
    return _called(("schedule",), "schedule", workloads, options)


def _called(
    verb: tuple[str, ...], module: str, workloads: Iterable[str | os.PathLike[str]], options: dict[str, Any]
) -> dict[str, Any]:
    from ringtap.cli import build_parser  # which imports this package

    words = [*verb]
    for name, value in options.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += _words(name, one)
    paths = [str(path_of(one, "a workload")) for one in workloads]
    try:
        with option_names_as_arguments():
            given = build_parser(*verb).parse_args([*words, "--", *paths] if paths else words)
            item: dict[str, Any] = importlib.import_module(f"ringtap.workload.commands.{module}").result(given)[0]
    except ImportError as error:
        if (said := missing(error)) is None:
            raise
        raise ImportError(f"ringtap.{verb[-1]} cannot be used: {said}", name=error.name) from None
    return item


def _words(name: str, value: Any) -> list[str]:
    """Return the words of an option on a command line; none for None and False."""
    option = "-o" if name == "output" else f"--{name.rstrip('_').replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, (int, float)) and name in _UNITS:
        value = f"{value:.12f}{_UNITS[name]}"
    return [f"{option}={os.fspath(value) if isinstance(value, os.PathLike) else value}"]
