"""Decides whether a sweep may go on with an edited plan: what its measured points depend on has to stay as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import NAME, Number, Shape, ShapeError, check
from ringtap.core.run_directory_schema import VARIANTS
from ringtap.core.sweep_plans.jobs_that_share import FREE, KEY_OF, RULES
from ringtap.core.sweep_plans.training_jobs import COMMAND, REAL, SCALE_MODEL, model_label

# required keys of a plan in run.json, which may have been edited by other programs or people
_PLAN_SHAPE: Shape = {
    "loads": [Number(0, 1e3)],
    "traffic": [NAME],
    "models": [{"name": NAME}],
    "topology": {"workers": [str], "cross_from": str, "cross_to": str, "machines?": [{"name": str}]},
    "jobs?": [{"name": NAME, "model": {"name": NAME}}],
    "offsets?": list,
}
# keys on which no window depends, with all below them; * is a name. Each model has its own collective, and packets are
# recorded after a window
_FREE = (
    *("name", "window.start_timeout_s", "window.retries", "auto", "capture", "collectives.names"),
    *("topology.may_load", "topology.ports", "topology.hosts"),
    *("topology.machines.*.ssh", "topology.machines.*.python", "topology.machines.*.workdir"),
    *("models.*.title", "jobs.*.model.title"),
)
# keys of a model with a command that only reports use
_FREE_OF_COMMAND = ("parameters", "layers", "compute_s", "bucket_bytes", "first_bucket_bytes")
# default values of keys that plans of older runs lack
_DEFAULTS: tuple[object, ...] = (None, "", 1, "ranks", SCALE_MODEL, COMMAND, [], {}, "star", 2, 0.0)

_Key = tuple[str, ...]


class Changes(NamedTuple):
    """Changed keys of a plan.

    Attributes:
        touching: keys on which the points measured so far depend.
        free: the other keys.
    """

    touching: list[str]
    free: list[str]


def plan_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    shared: Sequence[Mapping[str, Any]] = (),
) -> Changes:
    """Compare two plans in the form of `ringtap.agents.sweep.sweep_estimate.resolved`.

    Args:
        before: the plan of run.json.
        now: the plan of the resumed sweep.
        points: the points measured so far, as in points.jsonl.
        shared: those of jobs that share links, as in shared.jsonl.

    Raises:
        UsageError: ``before`` is not a plan.
    """
    try:
        check(before, _PLAN_SHAPE)
    except ShapeError as error:
        raise UsageError(f"run.json does not say what was measured ({error}): use a new folder") from error
    old, new = _flat(before), _flat(now)
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in old or new[key] not in _DEFAULTS)
    ]
    free = [*(tuple(words.split(".")) for words in _FREE), *_unmeasured(before, now, points, shared)]
    touching = [key for key in changed if (points or shared) and not any(_is_below(key, place) for place in free)]
    return Changes([".".join(key) for key in touching], [".".join(key) for key in changed if key not in touching])


def _is_below(key: _Key, place: _Key) -> bool:
    return len(key) >= len(place) and all(word in ("*", own) for own, word in zip(key, place, strict=False))


def _flat(item: Mapping[str, Any], place: _Key = ()) -> dict[_Key, Any]:
    """Return a plan's values by the names of tables and keys; models, machines and jobs are tables of their name."""
    found: dict[_Key, Any] = {}
    for key, value in item.items():
        if isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value):
            for entry in value:
                rest = {name: what for name, what in entry.items() if name != "name"}
                found |= _flat(rest, (*place, key, _label(entry)))
        elif isinstance(value, dict) and key != "environment":
            found |= _flat(value, (*place, key))
        else:
            found[(*place, key)] = value
    return found


def _label(entry: Mapping[str, Any]) -> str:
    """Return the text that identifies a model, a machine or a job of a plan."""
    return model_label(*(str(entry.get(key) or "") for key in ("name", *VARIANTS)))


def _unmeasured(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    shared: Sequence[Mapping[str, Any]],
) -> Iterator[_Key]:
    """Yield the places of two plans on which no measured point depends, because of what was measured."""
    kinds, jobs = {point["traffic"] for point in points}, now.get("jobs") or []
    labels = {_label({**point, "name": point["model"]}) for point in points}
    models: dict[_Key, Any] = {("models", label): one for one in now["models"] if (label := _label(one)) in labels}
    models |= {("jobs", job["name"], "model"): job["model"] for job in jobs}
    every = [_label(model) for plan in (before, now) for model in plan["models"]]
    yield from (("models", label) for label in every if label not in labels)
    for place, model in models.items():
        yield from ((*place, key) for key in (_FREE_OF_COMMAND if model.get("command") else ()))
        yield from () if model.get("job") == REAL else [(*place, "batch")]
    if not any("{python}" in word for model in models.values() for word in model.get("command") or ()):
        yield "topology", "machines", "*", "job_python"
    topologies = before["topology"], now["topology"]
    names = [(*one["workers"], one["cross_from"], one["cross_to"], *(one.get("servers") or ())) for one in topologies]
    machines = [machine["name"] for one in topologies for machine in one.get("machines") or ()]
    yield from (("topology", "machines", name) for name in machines if name not in chain(*names))
    if "burst" not in kinds:
        yield ("burst",)
    if not any(point["traffic"] == "iperf" and point["requested_bps"] for point in points):
        yield from (("iperf_streams",), ("topology", "most_load_bps"))
    if all(_load(before, point) is not None and _load(before, point) == _load(now, point) for point in points):
        yield ("loads",)
    if kinds <= set(now["traffic"]):
        yield ("traffic",)
    if shared:
        count = max(0, max(point["step"] for point in shared) + 1 - len(jobs))
        offsets = (before.get("offsets") or [])[:count]
        yield from [("offsets",)] if (now.get("offsets") or [])[:count] == offsets else ()
        yield from () if {FREE, *RULES} & {str(offset) for offset in offsets} else [("begin",)]
        yield from (("jobs", "*", key) for rule, key in KEY_OF.items() if rule not in offsets)


def _load(plan: Mapping[str, Any], point: Mapping[str, Any]) -> float | None:
    """Return the load of a point's step, or None if the plan does not have it."""
    loads, step = plan["loads"], point.get("step")
    return float(loads[step]) if step is not None and step < len(loads) else None
