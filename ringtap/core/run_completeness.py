"""Finds what a run lacks beside its nodes' recordings: jobs that failed, and ranks that recorded no steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.run_directory import Status, open_log

_SHOWN = 4


def failed_job(nodes: Mapping[str, Mapping[str, Any]]) -> tuple[Status, str]:
    """Return status and reason of a run by the first of its jobs that failed; ``complete`` if none is known to have.

    Args:
        nodes: the contents of node.json, by node.
    """
    ends = [(job.get("ended_ns") or 0, node, job) for node, item in nodes.items() for job in item.get("jobs") or []]
    failed = [end for end in ends if end[2].get("exit_code")]
    if not failed:
        return "complete", ""
    _, node, job = min(failed, key=lambda end: end[:2])
    what = f"the job on {node}" if job.get("rank") is None else f"rank {job['rank']} on {node}"
    if job.get("signal"):
        return "partial", f"{what} was ended by {job['signal']}"
    return "failed", f"{what} ended with exit code {job['exit_code']}"


def missing_ranks(processes: Iterable[tuple[int, int]]) -> str:
    """Name the ranks that recorded no steps here, although ranks of their process group did; empty if none is missing.

    Groups of one size count as one, as a job that begins again meets elsewhere.

    Args:
        processes: rank and size of the process group of each process that recorded steps in one.
    """
    found: dict[int, set[int]] = {}
    for rank, size in processes:
        found.setdefault(size, set()).add(rank)
    sentences = []
    for size, ranks in sorted(found.items()):
        if missing := [rank for rank in range(min(size, len(ranks) + _SHOWN + 1)) if rank not in ranks]:
            names = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
            here = sum(0 <= rank < size for rank in ranks)
            word = "rank" if len(missing) == 1 else "ranks"
            sentences.append(f"{here} of {size} ranks recorded steps here, {word} {names} did not")
    return "; ".join(sentences)


def ranks_of_groups(run: Path) -> Iterator[tuple[int, int]]:
    """Yield rank and size of the process group of each step log of a run; one without a group says nothing."""
    for path in run.glob("nodes/*/steps/rank*.rec"):
        if path.suffixes == [".rec"]:
            with contextlib.suppress(UsageError, OSError):  # it is damaged
                about = open_log(path).about
                rank, size = about.get("rank"), about.get("world_size")
                if about.get("group") and type(rank) is int and type(size) is int:
                    yield rank, size
