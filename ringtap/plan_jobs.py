"""Jobs of a plan that share links, and the offsets at which they run together (docs/reference/plan.md#jobs)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ringtap.errors import UsageError
from ringtap.plan_collectives import Collectives
from ringtap.plan_models import MODEL_NAME, Model, read_model
from ringtap.toml_tables import TomlTable
from ringtap.units import parse_duration_s

FREE, CASSINI = "free", "cassini"  # offsets of jobs: not kept, and those with the highest compatibility score
MIN_JOBS, MAX_JOBS = 2, 6


@dataclass(frozen=True)
class Job:
    """One of several jobs that share links.

    Attributes:
        name: as used in results.
        model: the training job.
        workers: hosts of its ranks, rank 0 first; another job may have the same ones.
    """

    name: str
    model: Model
    workers: tuple[str, ...]


def read_job(table: TomlTable, scale: float) -> Job:
    """Read one of the jobs, with the scale of its plan."""
    name = table.text("name", ...)
    if not re.fullmatch(MODEL_NAME, name):
        table.fail("name", f"= {name!r} is not a plain name (letters, digits, dot, dash)")
    workers = table.texts("workers", ...)
    if len(workers) < 2 or len(set(workers)) < len(workers):
        table.fail("workers", "must be two hosts at least, each once: a job has a rank on each")
    if table.has("transport"):
        table.fail("transport", "is for [[models]]: jobs on a testbed use TCP")
    return Job(name, read_model(table, scale, Collectives(), "model"), workers)


def read_offsets(sweep: TomlTable, jobs: int) -> tuple[str | tuple[float, ...], ...]:
    """Return the offsets: for two jobs the shift of the second one, else a list of the shifts of all but the first."""
    shifts = 'a duration such as "50ms"' if jobs == 2 else f"a list of {jobs - 1} durations, for all jobs but the first"
    rule = f'a list in which each offset is "{FREE}", "{CASSINI}", or {shifts}'

    def fits(offset: Any) -> bool:
        return isinstance(offset, list) and len(offset) == jobs - 1 and all(isinstance(one, str) for one in offset)

    given = sweep.take(
        "offsets", list, [FREE, "0ms", CASSINI],
        lambda value: bool(value) and all(
            offset in (FREE, CASSINI) or fits([offset] if jobs == 2 else offset) for offset in value
        ), rule,
    )  # fmt: skip
    found: list[str | tuple[float, ...]] = []
    for offset in given:
        if offset in (FREE, CASSINI):
            found.append(offset)
            continue
        try:
            found.append((0.0, *(parse_duration_s(text) for text in ([offset] if jobs == 2 else offset))))
        except UsageError as error:
            sweep.fail("offsets", f"holds {offset!r}, which is not understood: {error}")
    return tuple(found)
