"""Differences between the plan of points that were measured and the plan of the sweep that resumes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringtap.errors import UsageError
from ringtap.json_validation import NAME, Number, Shape, ShapeError, check

# of a plan in run.json, which other programs and people may have written
_MEASURED: Shape = {
    "loads": [Number(0, 1e3)],
    "traffic": [NAME],
    "models": [{"name": NAME}],
    "topology": {"workers": [str], "cross_from": str, "cross_to": str, "machines?": [{"name": str}]},
}
# keys on which no window depends
_FREE = {"name", "window.start_timeout_s", "window.retries", "topology.may_load", "topology.ports", "topology.hosts"}
_FREE_OF_HOST = {"ssh", "python", "workdir"}
# keys of a model with a command that only reports use
_FREE_OF_COMMAND = {"parameters", "layers", "compute_s", "bucket_bytes"}
# default values of keys that plans of older runs lack
_DEFAULTS: tuple[object, ...] = (None, "", 1, "ranks", [], {})


class Changes(NamedTuple):
    """Changed keys of a plan.

    Attributes:
        touching: keys on which the points measured so far depend.
        free: the other keys.
    """

    touching: list[str]
    free: list[str]


def plan_changes(before: Mapping[str, Any], now: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Changes:
    """Compare two plans in the form of `ringtap.agents.sweep.estimate.resolved`.

    Args:
        before: the plan of run.json.
        now: the plan of the resumed sweep.
        points: the points measured so far.

    Raises:
        UsageError: ``before`` is not a plan.
    """
    try:
        check(before, _MEASURED)
    except ShapeError as error:
        raise UsageError(f"run.json does not say what was measured ({error}): use a new folder") from error
    old, new = _flat(before), _flat(now)
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in old or new[key] not in _DEFAULTS)
    ]
    touching = [key for key in changed if points and _touches(key, before, now, points)]
    return Changes(touching, [key for key in changed if key not in touching])


def _flat(item: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a plan's values by dotted keys, with models and machines by their names."""
    found: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value):
            for one in value:
                about = {name: what for name, what in one.items() if name != "name"}
                found |= _flat(about, f"{prefix}{key}.{one['name']}.")
        elif isinstance(value, dict) and key != "environment":
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _touches(key: str, before: Mapping[str, Any], now: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if measured points depend on a changed key."""
    kinds = {one["traffic"] for one in points}
    loaded_by_iperf = any(one["traffic"] == "iperf" and one["requested_bps"] for one in points)
    known = dict.fromkeys(_FREE, False) | {
        "loads": any(_load(before, one) is None or _load(before, one) != _load(now, one) for one in points),
        "traffic": not kinds <= set(now["traffic"]),
        "iperf_streams": loaded_by_iperf,
        "topology.most_load_bps": loaded_by_iperf,
    }
    if key in known:
        return known[key]
    if key.startswith("burst."):
        return "burst" in kinds
    if key.startswith("models."):
        return _touches_model(key, now, points)
    return not key.startswith("topology.machines.") or _touches_machine(key, before, now, points)


def _load(plan: Mapping[str, Any], point: Mapping[str, Any]) -> float | None:
    """Return the load of a point's step, or None if the plan does not have it."""
    loads, step = plan["loads"], point.get("step")
    return float(loads[step]) if step is not None and step < len(loads) else None


def _touches_model(key: str, now: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> bool:
    name, _, what = key.removeprefix("models.").rpartition(".")
    if all(one["model"] != name for one in points):
        return False
    model: Mapping[str, Any] = next((one for one in now["models"] if one["name"] == name), {})
    return bool(what != "title" and not (model.get("command") and what in _FREE_OF_COMMAND)) or not model


def _touches_machine(
    key: str, before: Mapping[str, Any], now: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> bool:
    name, _, what = key.removeprefix("topology.machines.").rpartition(".")
    roles = [role for plan in (before, now) for role in (*plan["topology"]["workers"], plan["topology"]["cross_from"])]
    roles += [plan["topology"]["cross_to"] for plan in (before, now)]
    if name not in roles or what in _FREE_OF_HOST:
        return False
    measured = {one["model"] for one in points}
    commands = [model.get("command") or () for model in now["models"] if model["name"] in measured]
    return what != "job_python" or any("{python}" in word for command in commands for word in command)
