"""Reads the jobs of a plan that share links, and how they run together (docs/reference/plan.md#jobs)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.collective_algorithms import Collectives
from ringtap.core.sweep_plans.training_jobs import MODEL_NAME, SCALE_MODEL, Model, read_model
from ringtap.core.toml_tables import TomlTable
from ringtap.core.training_transports import VARIABLES, contradiction
from ringtap.core.units import format_duration, parse_duration_s

FREE, CASSINI = "free", "cassini"  # offsets of jobs: not kept, and those with the highest compatibility score
# and free ones whose shares of a link are unequal, by a rule
WEIGHTS, PRIORITIES, CRUX, MLTCP = "weights", "priorities", "crux", "mltcp"
CONGESTION_CONTROL = "congestion-control"
# key of jobs that a rule needs; for crux, each job must have it
KEY_OF = {WEIGHTS: "weight", PRIORITIES: "priority", CRUX: "flop", CONGESTION_CONTROL: "congestion_control"}
RULES = (*KEY_OF, MLTCP)
WORST = "worst"  # shifts with the lowest compatibility score
MIN_JOBS, MAX_JOBS = 2, 6


@dataclass(frozen=True)
class SharingJob:
    """One of several jobs that share links.

    Attributes:
        name: as used in results.
        model: the training job.
        workers: hosts of its ranks, rank 0 first; another job may have the same ones.
        weight: its weight by the rule `WEIGHTS`.
        priority: its priority by `PRIORITIES`, of which higher ones come first.
        flop: FLOPs of an iteration of all its ranks, from which `CRUX` has its priority; None: not known.
        congestion_control: its TCP congestion control by `CONGESTION_CONTROL`; empty: that of the testbed.
    """

    name: str
    model: Model
    workers: tuple[str, ...]
    weight: float = 1.0
    priority: int = 0
    flop: float | None = None
    congestion_control: str = ""


def read_job(table: TomlTable, scale: float) -> SharingJob:
    """Read one of the jobs, with the scale of its plan."""
    name = table.text("name", ...)
    if not re.fullmatch(MODEL_NAME, name):
        table.fail("name", f"= {name!r} is not a plain name (letters, digits, dot, dash)")
    workers = table.texts("workers", ...)
    if len(workers) < 2 or len(set(workers)) < len(workers):
        table.fail("workers", "must be two hosts at least, each once: a job has a rank on each")
    if table.has("transport"):
        table.fail("transport", "is for [[models]]: jobs that share links use TCP")
    weight, priority = table.number("weight", 1.0, 0.1, 10.0), table.integer("priority", 0, 0, 100)
    flop = table.number("flop", 0.0, 1.0, 1e30) if table.has("flop") else None
    congestion_control = table.text("congestion_control", "")
    model = read_model(table, scale, Collectives(), "model")
    return SharingJob(name, model, workers, weight, priority, flop, congestion_control)


def check_rules(tables: Sequence[TomlTable], offsets: Sequence[str | tuple[float, ...]]) -> None:
    """Refuse rules for which jobs lack numbers, and numbers for which there is no rule."""
    for rule, key in KEY_OF.items():
        lacking = [table for table in tables if not table.has(key)]
        if rule in offsets and (len(lacking) == len(tables) or (lacking and rule == CRUX)):
            which = "each job needs one" if rule == CRUX else "give one to a job at least"
            lacking[0].fail(key, f'is missing: "{rule}" among the offsets is by {key} of [[jobs]], and {which}')
        for table in tables if rule not in offsets else ():
            if table.has(key):
                table.fail(key, f'is for jobs that share by it: add "{rule}" to the offsets')


def sharing(jobs: Sequence[SharingJob]) -> dict[str, tuple[SharingJob, ...]]:
    """Return the jobs on each host that several jobs share."""
    hosts = dict.fromkeys(host for job in jobs for host in job.workers)
    users = {host: tuple(job for job in jobs if host in job.workers) for host in hosts}
    return {host: found for host, found in users.items() if len(found) > 1}


def over_tcp(job: SharingJob) -> SharingJob:
    """Return a job whose NCCL uses TCP on real hosts, as the counters of their interfaces do not see RDMA."""
    return replace(job, model=replace(job.model, environment=VARIABLES["tcp"] | dict(job.model.environment)))


def check_hosts(tables: Sequence[TomlTable], jobs: Sequence[SharingJob], cluster: Cluster) -> None:
    """Check that jobs can run on the hosts of a cluster.

    Raises:
        UsageError: a job is over RDMA, has ranks that Horovod cannot have, or would share GPUs with another one.
    """
    for table, job in zip(tables, jobs, strict=True):
        ranks = {cluster.host(host).ranks for host in job.workers}
        if len(ranks) > 1 and job.model.framework == "horovod":
            table.fail("framework", '= "horovod" needs the same number of ranks on every worker')
        for host in job.workers:
            if found := contradiction("tcp", {**job.model.environment, **cluster.host(host).environment}):
                table.fail(
                    "environment",
                    f"or that of {host} sets {found}: jobs that share links use TCP, so take the variable out",
                )
    for host, users in sharing(jobs).items():
        taken: dict[str, str] = {}
        for job in users:
            table = tables[jobs.index(job)]
            for gpu in gpus_of(job, cluster, host) or ():
                if taken.setdefault(gpu, job.name) != job.name:
                    table.fail(
                        "environment",
                        f"gives {job.name} GPU {gpu} of {host}, which {taken[gpu]} has: give each job GPUs of its own "
                        f'by CUDA_VISIBLE_DEVICES, and no "gpus" to {host}',
                    )


def gpus_of(job: SharingJob, cluster: Cluster, host: str) -> tuple[str, ...] | None:
    """Return the GPUs that a job sees on a host by the plan; None if it says nothing."""
    machine = cluster.host(host)
    if machine.gpus:
        return machine.gpus
    variables = {**cluster.environment, **job.model.environment, **machine.environment}
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def read_offsets(sweep: TomlTable, jobs: int) -> tuple[str | tuple[float, ...], ...]:
    """Return the offsets: names, or for two jobs the shift of the second one, else the shifts of all but the first."""
    names = (FREE, CASSINI, *RULES)
    rule = f"a list in which each offset is {', '.join(map(json.dumps, names))}, or {_shifts_rule(jobs)}"
    given = sweep.take(
        "offsets", list, [FREE, "0ms", CASSINI],
        lambda value: bool(value) and all(
            offset in names or _is_shifts([offset] if jobs == 2 else offset, jobs) for offset in value
        ), rule,
    )  # fmt: skip
    return tuple(offset if offset in names else _shifts_s(sweep, "offsets", offset) for offset in given)


def read_begin(
    sweep: TomlTable, jobs: int, offsets: Sequence[str | tuple[float, ...]], *, is_real: bool
) -> str | tuple[float, ...]:
    """Return the shifts at which free jobs are held until their rule begins: `WORST`, or in s; empty: not held."""
    if sweep.has("begin") and (is_real or not {FREE, *RULES} & {*offsets}):
        sweep.fail("begin", f'is for "{FREE}" and rules among the offsets, on a [testbed]: leave it out')
    given = sweep.take(
        "begin", (str, list), WORST if {*RULES} & {*offsets} else "",
        lambda value: value == WORST or _is_shifts([value] if jobs == 2 else value, jobs),
        f"{json.dumps(WORST)}, or {_shifts_rule(jobs)}",
    )  # fmt: skip
    return given if given in ("", WORST) else _shifts_s(sweep, "begin", given)


def check_shifts(
    sweep: TomlTable,
    key: str,
    jobs: Sequence[SharingJob],
    shifts_s: Sequence[float],
    exchanges_s: Sequence[float],
) -> None:
    """Refuse shifts that are not within an iteration, as far as the plan says how long one is on a testbed.

    An iteration of a scale model takes at most the time of its computation and then of the exchange of all gradients.

    Args:
        sweep: the table with the shifts.
        key: their key.
        jobs: the jobs.
        shifts_s: shift of each job.
        exchanges_s: time of each job's exchange.
    """
    for job, shift_s, exchange_s in zip(jobs, shifts_s, exchanges_s, strict=True):
        longest_s = job.model.compute_s + exchange_s
        if job.model.job == SCALE_MODEL and shift_s >= longest_s:
            sweep.fail(
                key,
                f"holds {format_duration(shift_s)}, but an iteration of {job.name} takes {format_duration(longest_s)} "
                "at most by the plan: give a shift within an iteration",
            )


def _shifts_rule(jobs: int) -> str:
    return 'a duration such as "50ms"' if jobs == 2 else f"a list of {jobs - 1} durations, for all jobs but the first"


def _is_shifts(value: Any, jobs: int) -> bool:
    return isinstance(value, list) and len(value) == jobs - 1 and all(isinstance(one, str) for one in value)


def _shifts_s(sweep: TomlTable, key: str, given: str | list[str]) -> tuple[float, ...]:
    """Return the shift of each job: 0 for the first one, and for the others one duration, or one each."""
    try:
        return (0.0, *(parse_duration_s(text) for text in ([given] if isinstance(given, str) else given)))
    except UsageError as error:
        sweep.fail(key, f"holds {given!r}, which is not understood: {error}")
