"""Reads the settings of a recording, from the command line or from run.json (for ranks on other nodes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import EVERY, EVERY_S
from ringtap.core.units import format_duration, format_size, parse_duration_s, parse_size_bytes

# Recorded in the job's own processes, by the hook
JOB_SIDE = ("steps", "ddp", "horovod", "nccl", "profile")
# The profile adds hooks to the job's modules, so that it must be asked for by name
_JOB_SIDE_ALL = JOB_SIDE[:-1]
# Horovod's timeline is opt-in too: its writer keeps a core busy, which slows a job that has none to spare
JOB_SIDE_DEFAULT = ("steps", "ddp", "nccl")
MIN_EVERY_S, MAX_EVERY_S = 0.001, 60.0


class RunSettings(NamedTuple):  # no dataclass: its module takes 10 ms to import, and a job waits for this one
    """Settings of a recording: its sources and their periods.

    Attributes:
        collectors: names of collectors, in the registry's order; then plug-ins, by name or as ``module:Class``.
        recorders: names of job-side recorders.
        every_s: period of the collectors without their own.
        options: options of the command line by collector; ``every`` is the collector's own period.
        disk_limit_bytes: size that the recording of a node must not exceed; 0 for no limit.
        named: collectors that the user asked for by name, and not as part of a group.
    """

    collectors: tuple[str, ...]
    recorders: tuple[str, ...]
    every_s: float
    options: dict[str, dict[str, str]] = {}  # noqa: RUF012 (never changed)
    disk_limit_bytes: int = 0
    named: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data, for run.json."""
        return self._asdict()

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> RunSettings:
        """The settings from run.json; missing values of older runs take their defaults."""
        return cls(
            tuple(item["collectors"] if "collectors" in item else _default()),
            tuple(item.get("recorders") or ()),
            float(item.get("every_s") or EVERY_S),
            dict(item.get("options") or {}),
            int(item.get("disk_limit_bytes") or 0),
            tuple(item.get("named") or ()),
        )

    def line(self) -> str:
        """The settings as one line for the user."""
        names = ",".join((*self.collectors, *self.recorders)) or "none"
        extra = "".join(
            f" {f'{collector}.{name}' if name == 'every' else name}={value}"
            for collector, options in self.options.items()
            for name, value in options.items()
        )
        limit = f" disk-limit={format_size(self.disk_limit_bytes).replace(' ', '')}" if self.disk_limit_bytes else ""
        return f"collect={names} every={format_duration(self.every_s).replace(' ', '')}{extra}{limit}"


def _default() -> tuple[str, ...]:
    from ringtap.collectors.registry import DEFAULT

    return DEFAULT


def parse_collect(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The collectors and the job-side recorders that ``--collect`` names.

    Raises:
        UsageError: a name is unknown; the message suggests the nearest one.
    """
    from ringtap.collectors.registry import DEFAULT, ORDER, plug_in_names, unknown_collector

    groups = {"default": (*DEFAULT, *JOB_SIDE_DEFAULT), "all": (*ORDER, *_JOB_SIDE_ALL), "none": ()}
    wanted: set[str] = set()
    added: list[str] = []
    for given in (word.strip() for word in text.split(",")):
        word = given.lower()
        if word in groups:
            wanted.update(groups[word])
        elif word in (*ORDER, *JOB_SIDE):
            wanted.add(word)
        elif ":" in given:
            added.append(_module_class(given))
        elif word in plug_in_names():
            added.append(word)
        elif word:
            raise unknown_collector(word, (*ORDER, *JOB_SIDE, *groups))
    collectors = (*(name for name in ORDER if name in wanted), *dict.fromkeys(added))
    return collectors, tuple(name for name in JOB_SIDE if name in wanted)


def _module_class(text: str) -> str:
    """Check ``module:Class`` without importing the module.

    Raises:
        UsageError: it is not of this form, or there is no such module.
    """
    from ringtap.collectors.registry import check_module

    module, _, name = text.partition(":")
    if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
        raise UsageError(f"--collect {text}: a collector of your own is named MODULE:CLASS, for example mine:Pressure")
    try:
        check_module(module)
    except UsageError as error:
        raise UsageError(f"--collect {text}: {error}") from error
    return text


def parse_settings(
    collect: str, every: str, packets: Mapping[str, str | None], disk_limit: str | None = None
) -> RunSettings:
    """The settings of a command line.

    Args:
        collect: the value of ``--collect``.
        every: the value of ``--every``: a period, and ``COLLECTOR=PERIOD`` for each collector with its own.
        packets: options of the packet collector by name; None if not given.
        disk_limit: the value of ``--disk-limit``; None if not given.

    Raises:
        UsageError: a value is not valid.
    """
    first, *overrides = every.split(",")
    if "=" in first:
        first, overrides = EVERY, [first, *overrides]
    every_s = _period_s(first)
    collectors, recorders = parse_collect(collect)
    options: dict[str, dict[str, str]] = {}
    for word in overrides:
        name, _, period = word.strip().partition("=")
        if name not in collectors:
            raise UsageError(f"--every {every}: {name!r} is not a collector that --collect names")
        _period_s(period)
        options[name] = {"every": period}
    given = {name: value for name, value in packets.items() if value is not None}
    if given and "packets" not in collectors:
        raise UsageError(
            "--interface, --filter, --snap and --packets-around-slow are for packets: add --collect default,packets"
        )
    if given:
        options["packets"] = options.get("packets", {}) | given
    if "around_slow" in given:
        from ringtap.collectors.slow_iterations import parse_rule

        parse_rule(given["around_slow"])
        if "steps" not in recorders:
            raise UsageError("--packets-around-slow needs the times of iterations: add steps to --collect")
    limit_bytes = 0 if disk_limit is None else max(1, parse_size_bytes(disk_limit, "--disk-limit"))
    words = [word.strip() for word in collect.split(",")]
    named = tuple(name for name in collectors if name in (*words, *(word.lower() for word in words)))
    return RunSettings(collectors, recorders, every_s, options, limit_bytes, named)


def check_disk_limit(settings: RunSettings) -> None:
    """Check that the first minute fits into the disk limit, if there is one.

    A node that joins a run does not check this: it may need a little more than the node on which the run was made, and
    the job must not fail for that.

    Raises:
        UsageError: it needs more.
    """
    from ringtap.agents.node.disk_use import first_minute_bytes

    limit_bytes = settings.disk_limit_bytes
    if limit_bytes and limit_bytes < (needed_bytes := first_minute_bytes(settings)):
        raise UsageError(
            f"--disk-limit {format_size(limit_bytes)} is less than the {format_size(needed_bytes)} that the first "
            "minute needs: give more, or collect less (--collect, --every)"
        )


def _period_s(text: str) -> float:
    """A collector's period in seconds.

    Raises:
        UsageError: it is not a duration from 1 ms to 60 s.
    """
    seconds = parse_duration_s(text, "--every")
    if not MIN_EVERY_S <= seconds <= MAX_EVERY_S:
        raise UsageError(f"--every {text} is outside 1ms to 60s")
    return seconds
