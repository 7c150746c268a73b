"""Decides whether a sweep may go on with an edited plan: what its measured points depend on has to stay as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringtap.errors import UsageError
from ringtap.json_validation import NAME, Number, Shape, ShapeError, check
from ringtap.plan_jobs import FREE, KEY_OF, RULES
from ringtap.plan_models import COMMAND, REAL, SCALE_MODEL, model_label
from ringtap.schema import VARIANTS

# required keys of a plan in run.json, which may have been edited by other programs or people
_PLAN_SHAPE: Shape = {
    "loads": [Number(0, 1e3)],
    "traffic": [NAME],
    "models": [{"name": NAME}],
    "topology": {"workers": [str], "cross_from": str, "cross_to": str, "machines?": [{"name": str}]},
    "jobs?": [{"name": NAME, "model": {"name": NAME}}],
    "offsets?": list,
}
# keys on which no window depends: each model has its own collective, and packets are recorded after a window
_FREE = {"name", "window.start_timeout_s", "window.retries", "topology.may_load", "topology.ports", "topology.hosts"}
_FREE |= {"auto.target_interval_gbps", "auto.target_mean", "auto.budget_s", "collectives.names"}
_FREE |= {"capture", "capture.loads", "capture.iterations", "capture.max_bytes"}
_FREE_OF_HOST = {"ssh", "python", "workdir"}
_FREE_OF_MODEL = {"title"}
# keys of a model with a command that only reports use
_FREE_OF_COMMAND = {"parameters", "layers", "compute_s", "bucket_bytes", "first_bucket_bytes"}
# default values of keys that plans of older runs lack
_DEFAULTS: tuple[object, ...] = (None, "", 1, "ranks", SCALE_MODEL, COMMAND, [], {}, "star", 2, 0.0)


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
    """Compare two plans in the form of `ringtap.agents.sweep.estimate.resolved`.

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
    if not points and not shared:
        return Changes([], changed)
    old, new = (_flat(_needed(plan, points, shared)) for plan in (before, now))
    touching = [key for key in changed if key not in _FREE and old.get(key) != new.get(key)]
    return Changes(touching, [key for key in changed if key not in touching])


def _flat(item: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a plan's values by dotted keys; the keys of models, machines and jobs contain their names."""
    found: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value):
            for entry in value:
                rest = {name: what for name, what in entry.items() if name != "name"}
                found |= _flat(rest, f"{prefix}{key}.{_label(entry)}.")
        elif isinstance(value, dict) and key != "environment":
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _label(entry: Mapping[str, Any]) -> str:
    """Return the text that identifies a model, a machine or a job of a plan."""
    return model_label(*(str(entry.get(key) or "") for key in ("name", *VARIANTS)))


def _needed(
    plan: Mapping[str, Any], points: Sequence[Mapping[str, Any]], shared: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a plan without the series, loads, offsets and hosts on which no measured point depends."""
    kinds = {point["traffic"] for point in points}
    labels = {_label({**point, "name": point["model"]}) for point in points}
    measured = [model for model in plan["models"] if _label(model) in labels]
    steps, loads = [point.get("step") for point in points], plan["loads"]
    is_known = all(step is not None and step < len(loads) for step in steps)
    needed = {key: value for key, value in plan.items() if key not in ("burst", "iperf_streams")} | {
        "loads": [[step, loads[step]] for step in steps] if is_known else loads,
        "traffic": [kind for kind in plan["traffic"] if kind in kinds],
        "models": [_needed_of_model(model) for model in measured],
        **({"burst": plan.get("burst")} if "burst" in kinds else {}),
    }
    jobs = plan.get("jobs") or []
    if shared:
        offsets = (plan.get("offsets") or [])[: max(0, max(point["step"] for point in shared) + 1 - len(jobs))]
        unused = {key for rule, key in KEY_OF.items() if rule not in offsets}
        needed["offsets"] = offsets
        needed["jobs"] = [
            {key: value for key, value in job.items() if key not in unused} | {"model": _needed_of_model(job["model"])}
            for job in jobs
        ]
        if not {FREE, *RULES} & {str(offset) for offset in offsets}:
            needed.pop("begin", None)
    topology = plan["topology"]
    roles = {*topology["workers"], topology["cross_from"], topology["cross_to"], *(topology.get("servers") or ())}
    commands = [model.get("command") or () for model in (*measured, *(job["model"] for job in jobs))]
    free = _FREE_OF_HOST | (
        set() if any("{python}" in word for words in commands for word in words) else {"job_python"}
    )
    needed["topology"] = topology | {
        "machines": [
            {key: value for key, value in machine.items() if key not in free}
            for machine in topology.get("machines") or ()
            if machine["name"] in roles
        ]
    }
    if any(point["traffic"] == "iperf" and point["requested_bps"] for point in points):
        needed["iperf_streams"] = plan.get("iperf_streams")
    else:
        needed["topology"].pop("most_load_bps", None)
    return needed


def _needed_of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model without the keys on which its windows do not depend."""
    free = _FREE_OF_MODEL | (_FREE_OF_COMMAND if model.get("command") else set())
    free |= {"batch"} if model.get("job") != REAL else set()
    return {key: value for key, value in model.items() if key not in free}
