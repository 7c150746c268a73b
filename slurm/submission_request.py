"""Describes the request of a submission, and checks that a site can fulfil it."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ringtap.agents.node.recording_settings import RunSettings, parse_settings
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import EVERY
from ringtap.core.secret_masking import mask_words
from ringtap.core.units import counted
from ringtap.slurm.site_profiles import Nodes, Site

# directives of sbatch that `--drop` accepts
DIRECTIVES = (
    "job-name",
    "account",
    "time",
    "nodes",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-node",
    "mem",
    "signal",
)
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)|(?P<only_m>\d+)(?::(?P<only_s>\d+))?)"
)
_ARRAY = re.compile(r"(--)?array\b|-a")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
# variables from which sbatch takes values
_VARIABLES = {"account": "SBATCH_ACCOUNT", "time": "SBATCH_TIMELIMIT"}


@dataclass(frozen=True)
class Resources:
    """Resources of a job; None leaves a value to the site.

    Attributes:
        nodes: number of nodes.
        tasks_per_node: processes that Slurm starts on each node: one per rank, or one launcher.
        cpus_per_task: cores per task.
        gpus_per_node: a number, or a type and a number: ``4``, ``h100:4``.
        mem: memory per node in Slurm's notation.
        time: time limit in Slurm's notation.
        account: account to charge.
        job_name: name that squeue shows.
        stop_before_s: seconds before the time limit at which the job is asked to stop.
        sbatch: further directives, as after ``#SBATCH``.
        drop: directives to leave out, by name.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    mem: str | None = None
    time: str | None = None
    account: str | None = None
    job_name: str = "ringtap"
    stop_before_s: int = 120
    sbatch: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """Source of the job's Python.

    Attributes:
        python: an interpreter that has ringtap; None: an environment is made on every node.
        modules: further modules to load; each replaces the site's module of the same name.
        requirement: a requirements file for the environment made on every node.
        wheels: a folder of wheels for it (``ringtap bundle``).
    """

    python: str | None
    modules: tuple[str, ...] = ()
    requirement: Path | None = None
    wheels: Path | None = None


@dataclass(frozen=True)
class Recording:
    """Recording of a job, by options of ``ringtap run``.

    Attributes:
        collect: value of ``--collect``.
        every: value of ``--every``.
        packets_around_slow: value of ``--packets-around-slow``; None if not given.
        disk_limit: value of ``--disk-limit``; None if not given.
    """

    collect: str = "default"
    every: str = EVERY
    packets_around_slow: str | None = None
    disk_limit: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recording:
        """Return the recording of a command line."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        given = {name.replace("_", "-"): value for name, value in asdict(self).items() if value is not None}
        return [f"--{name}={value}" for name, value in given.items()]

    def settings(self) -> RunSettings:
        """Return the settings.

        Raises:
            UsageError: an option is not valid.
        """
        return parse_settings(self.collect, self.every, {"around_slow": self.packets_around_slow}, self.disk_limit)


@dataclass(frozen=True)
class Request:
    """Command to submit.

    Attributes:
        command: command of each task.
        folder: folder in which it runs.
        resources: resources of the job.
        environment: Python environment of the job.
        recording: what is recorded.
        keep: patterns of files that are copied from $SLURM_TMPDIR of every node at the end.
        horovod: True if the ranks are given Horovod's variables.
    """

    command: tuple[str, ...]
    folder: Path
    resources: Resources
    environment: Environment
    recording: Recording = Recording()
    keep: tuple[str, ...] = ()
    horovod: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the request as plain data for request.json."""
        item: dict[str, Any] = asdict(self)
        item |= {"folder": str(self.folder), "command": mask_words(self.command)}
        for name in ("requirement", "wheels"):
            path = item["environment"][name]
            item["environment"][name] = None if path is None else str(path)
        return item


def describe_resources(resources: Resources, environment: Environment) -> str:
    """Describe a job's resources and Python environment for the user."""
    parts = [counted(resources.nodes, "node"), f"{counted(resources.tasks_per_node, 'task')} per node"]
    for given, text in (
        (resources.cpus_per_task, "CPUs per task: {}"),
        (resources.gpus_per_node, "GPUs per node: {}"),
        (resources.mem, "memory per node: {}"),
        (resources.time, "time limit {}"),
        (resources.account, "account {}"),
    ):
        if given is not None:
            parts.append(text.format(given))
    if resources.stop_before_s:
        parts.append(f"stopped {resources.stop_before_s} s before the time limit")
    parts.append(f"Python {environment.python}" if environment.python else "a Python environment made on each node")
    return ", ".join(parts)


def parse_time_s(text: str) -> int:
    """Return the seconds of a time limit in Slurm's notation: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Raises:
        UsageError: the text has none of these forms.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--time {text!r} is not a time: write it as Slurm does, for example 30 (minutes), 3:00:00, 1-12"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = part["days"] * 24 + part["hours"] + part["h"]
    minutes = part["minutes"] + part["m"] + part["only_m"]
    return hours * 3600 + minutes * 60 + part["seconds"] + part["s"] + part["only_s"]


def check_resources(resources: Resources, site: Site, environment: Mapping[str, str]) -> Resources:
    """Check that a site can provide the resources; return them with GPU type, account and time filled in.

    Args:
        resources: the requested resources.
        site: the site.
        environment: the user's environment, which may contain account and time for sbatch.

    Raises:
        UsageError: the site cannot provide them; the message names the reason.
    """
    _check_numbers(resources)
    _check_directives(resources)
    given = {name: getattr(resources, name) or environment.get(variable) for name, variable in _VARIABLES.items()}
    resources = replace(resources, account=given["account"], time=given["time"])
    for name in site.requires:
        if name not in resources.drop and not given.get(name):
            raise UsageError(f"{site.name} wants a job to have --{name}: add it{_account_hint(name, site)}")
    _check_time(resources, site)
    gpus, kind = _gpus(resources, site)
    cores = resources.tasks_per_node * (resources.cpus_per_task or 1)
    kinds = [kind] if kind else list(site.nodes)
    if kinds and cores > max(entry.cores for entry in kinds):
        most = max(entry.cores for entry in kinds)
        what = f"a node of {site.name} with {kind.gpu}" if kind and kind.gpu else f"a node of {site.name}"
        raise UsageError(f"you ask for {counted(cores, 'core')} per node, and {what} has {most}")
    return replace(resources, gpus_per_node=gpus)


def _account_hint(name: str, site: Site) -> str:
    return (
        " (yours are listed by: sshare -U)"
        if name == "account"
        else f" (at most {site.longest_job})" * bool(site.longest_job)
    )


def _check_numbers(resources: Resources) -> None:
    for name in ("nodes", "tasks_per_node", "cpus_per_task"):
        value = getattr(resources, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not a number from 1 on")
    if resources.mem is not None and not _MEMORY.fullmatch(resources.mem):
        raise UsageError(f"--mem {resources.mem!r} is not a size: write it as Slurm does, for example 64G")


def _check_directives(resources: Resources) -> None:
    for name in resources.drop:
        if name not in DIRECTIVES:
            near = difflib.get_close_matches(name, DIRECTIVES, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(DIRECTIVES)}"
            raise UsageError(f"--drop {name!r} is not a directive that ringtap writes: {hint}")
    texts = {"--job-name": (resources.job_name,), "--account": (resources.account or "",), "--sbatch": resources.sbatch}
    for option, values in texts.items():
        for value in values:
            if not value.isprintable():
                raise UsageError(f"{option} {value!r} has a character that a line of a batch script cannot hold")
    for text in resources.sbatch:
        if not text.lstrip("-").strip():
            raise UsageError(
                f"--sbatch {text!r} is not a directive: write it as after #SBATCH, for example partition=debug"
            )
        if _ARRAY.match(text):
            raise UsageError(
                f"--sbatch {text}: the tasks of an array are jobs of their own, and one run has one job: submit the "
                "command once for each task"
            )


def _check_time(resources: Resources, site: Site) -> None:
    if resources.stop_before_s < 0:
        raise UsageError("--stop-before takes a time from 0 on")
    if resources.time is None or "time" in resources.drop:
        return
    limit_s = parse_time_s(resources.time)
    if site.longest_job and limit_s > parse_time_s(site.longest_job):
        raise UsageError(f"--time {resources.time} is longer than {site.name} allows: {site.longest_job} at most")
    if limit_s <= resources.stop_before_s:
        raise UsageError(
            f"--time {resources.time} leaves nothing before the stop {resources.stop_before_s} s ahead of it: "
            "ask for more time, or give a shorter --stop-before"
        )


def _gpus(resources: Resources, site: Site) -> tuple[str | None, Nodes | None]:
    """Return the GPUs per node with their type, and the kind of node that has them."""
    text = resources.gpus_per_node
    if text is None:
        return None, None
    name, _, number = text.rpartition(":")
    if not number.isdigit() or int(number) < 1:
        raise UsageError(f"--gpus-per-node {text!r} is not understood: a number, or a type and a number, as h100:4")
    kinds = [kind for kind in site.nodes if kind.gpu and name in ("", kind.gpu)]
    if not kinds:
        if name and site.gpu_types and "." not in name:  # Slurm checks names of parts of GPUs, which contain a dot
            near = difflib.get_close_matches(name, site.gpu_types, 1) or site.gpu_types
            raise UsageError(f"{site.name} has no GPUs of type {name!r}: did you mean {' or '.join(near)}?")
        if site.nodes and not site.gpu_types:
            raise UsageError(f"{site.name} has no GPUs")
        return text, None
    count = int(number)
    fitting = [kind for kind in kinds if count in kind.gpus]
    if not fitting:
        offers = "; ".join(f"{kind.gpu}: {' or '.join(map(str, kind.gpus))}" for kind in kinds)
        raise UsageError(f"--gpus-per-node {text} is not what a job gets on a node of {site.name} ({offers})")
    return f"{fitting[0].gpu}:{count}", fitting[0]
