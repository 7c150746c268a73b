"""Estimates a sweep: its points, duration and disk space, and the parts that its report will lack."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from ringtap.agents.sweep.choose_network_paths import check_sharing
from ringtap.agents.testbed.topology import Roles, TestbedSpec, roles_of
from ringtap.collectors.packets import SNAP_BYTES
from ringtap.core.ethernet import ETHERNET_MTU
from ringtap.core.run_directory_schema import ALONE, MERGE_SHARE, MIN_CONGESTION_LOADS, MIN_FIT_LOADS, MIN_RISE
from ringtap.core.secret_masking import mask_variables, mask_words
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.jobs_that_share import FREE, RULES, SharingJob
from ringtap.core.sweep_plans.sweep_plan import AUTO, LoadPlan, SharingPlan, SweepPlan, Testbed
from ringtap.core.sweep_plans.training_jobs import SCALE_MODEL, Model, model_label
from ringtap.core.testbed_options import LinkOptions
from ringtap.core.thesis_neural_networks import FORWARD_SHARE
from ringtap.core.units import counted, format_duration, format_rate, format_size

_MIN_LOADS = {"a fit": MIN_FIT_LOADS, "a congestion point": MIN_CONGESTION_LOADS}
TESTBED_UP_S = 4.0
PRECHECK_S = 6.0
JOB_START_S = 10.0
_BOTTLENECK_S = 3.0
# samples of ten interfaces every 10 ms, and the log of a thousand flows per second
ROOM_BYTES_PER_S = 120_000
MIN_ROOM_BYTES = 16_000_000
CAPTURE_START_S = 3.0
_CAPTURED_NODES = 4  # at most: see ringtap.agents.sweep.capture_packets_at_loads.capture_points
_RECORD_BYTES = 16  # header of a packet in a file


def layout(plan: SweepPlan) -> tuple[TestbedSpec, Roles]:
    """Return the testbed and the roles of a plan; the first testbed if it has several.

    Raises:
        UsageError: a job has no link in common with another one.
    """
    jobs = plan.jobs if isinstance(plan, SharingPlan) else ()
    testbed = (plan if isinstance(plan, SharingPlan) else plan.parts()[0]).topology
    assert not isinstance(testbed, Cluster)
    spec = TestbedSpec(
        name="sweep",
        hosts=testbed.every_host,
        rate_bps=testbed.host_rate_bps(plan.capacity_bps),
        jobs=len(jobs),
        **{field.name: getattr(testbed, field.name) for field in fields(LinkOptions)},
    )
    if jobs:
        check_sharing(spec, jobs)
    return spec, roles_of(testbed)


def resolved(plan: SweepPlan) -> dict[str, Any]:
    """Return the plan as stored in run.json: hosts and roles of named configurations filled in, secrets masked."""
    item: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    models = [*item["models"], *(job["model"] for job in item["jobs"])]
    for model in models:
        model["command"] = mask_words(model["command"])
    for part in (*models, item["topology"], *item["topology"].get("machines", ())):
        if "environment" in part:
            part["environment"] = mask_variables(part["environment"])
    if isinstance(plan.topology, Cluster):
        return item
    spec, roles = layout(plan)
    item["topology"] |= {"hosts": list(spec.hosts), "workers": list(roles.workers)}
    item["topology"] |= {"cross_from": roles.cross_from, "cross_to": roles.cross_to}
    return item


class SharingStep(NamedTuple):
    """A point of a plan with jobs.

    Attributes:
        number: position among the points: first each job alone, then the offsets.
        offset: its name: `ringtap.core.run_directory_schema.ALONE`, one of `ringtap.core.sweep_plans.jobs_that_share`,
            or the shifts.
        jobs: the jobs that run.
        shifts_s: shift of each job; None if they are not given.
        repeat: number of earlier points with the same offset.
    """

    number: int
    offset: str
    jobs: tuple[SharingJob, ...]
    shifts_s: tuple[float, ...] | None = None
    repeat: int = 0

    @property
    def label(self) -> str:
        """Name of the point for people."""
        return f"{self.jobs[0].name} alone" if self.offset == ALONE else self.offset

    @property
    def is_free(self) -> bool:
        """True if nothing keeps the jobs, at most a rule shares links."""
        return self.offset in (FREE, *RULES)


def sharing_steps(plan: SharingPlan) -> list[SharingStep]:
    """Return the points of a plan with jobs."""
    steps = [SharingStep(number, ALONE, (job,)) for number, job in enumerate(plan.jobs)]
    for place, offset in enumerate(plan.offsets):
        shifts_s = None if isinstance(offset, str) else offset
        name = offset if isinstance(offset, str) else "-".join(f"{1e3 * shift_s:g}ms" for shift_s in offset[1:])
        steps.append(SharingStep(len(steps), name, plan.jobs, shifts_s, plan.offsets[:place].count(offset)))
    return steps


def step_s(plan: SharingPlan) -> float:
    """Estimate the duration of a point of a plan with jobs, in seconds."""
    window, longest_s = plan.window, max(iteration_s(plan, job.model, 0.0, job.workers) for job in plan.jobs)
    measured_s = min(window.max_s, max(window.min_s, window.min_iterations * longest_s))
    return JOB_START_S + window.warmup_iterations * longest_s + window.settle_s + measured_s


def iteration_s(plan: SweepPlan, model: Model, load: float, workers: Sequence[str] = ()) -> float:
    """Estimate the iteration time under a load, in seconds.

    It is the compute time, or, if longer, the forward pass plus the time of a ring all-reduce (eq. 3.1) on the share of
    the link that the load leaves.

    Args:
        plan: the sweep.
        model: the training job.
        load: cross traffic as a share of the capacity.
        workers: hosts of the job; empty: all workers of the plan.
    """
    topology = plan.topology
    workers = workers or (topology.workers if isinstance(topology, Cluster) else layout(plan)[1].workers)
    left_bps = plan.capacity_bps * (1 - load)
    exchange_s = model.exchange_s(topology.ranks(workers), plan.scale, left_bps, _mtu(plan))
    return max(model.compute_s, model.compute_s * FORWARD_SHARE + exchange_s)


def _mtu(plan: SweepPlan) -> int:
    """Return the MTU of a plan's testbed; that of a cluster is not known before its hosts are asked."""
    return plan.topology.mtu if isinstance(plan.topology, Testbed) else ETHERNET_MTU


def series_names(plan: SweepPlan) -> list[str]:
    """Return the names of a sweep's series, in the order in which they are measured."""
    return (
        [] if isinstance(plan, SharingPlan) else [model.series(kind) for model in plan.models for kind in plan.traffic]
    )


def estimate(plan: SweepPlan, only: str = "") -> list[dict[str, Any]]:
    """Return all points of a sweep with their expected durations.

    Args:
        plan: the sweep.
        only: one of its series; empty: all.

    Returns:
        A list of ``{series, requested_bps, load, duration_s, packets_bytes}`` in the plan's order. The first point of
        each series includes the start of its job, the first point of the sweep also the set-up and the checks of the
        generators. If jobs share links, each point starts them. ``packets_bytes`` is for all nodes together.
    """
    window = plan.window
    points: list[dict[str, Any]] = []
    if isinstance(plan, SharingPlan):
        for step in sharing_steps(plan):
            item = {"series": step.label, "load": 0.0, "requested_bps": 0, "packets_bytes": 0}
            points.append(item | {"duration_s": round(step_s(plan) + (0.0 if points else TESTBED_UP_S), 1)})
        return points
    if len(parts := plan.parts()) > 1:  # each has a testbed of its own
        return [point for part in parts for point in estimate(part, only)]
    for model in plan.models:
        for kind in plan.traffic:
            if only not in ("", model.series(kind)):
                continue
            for number, load in enumerate(plan.loads):
                captured = plan.capture is not None and load in plan.capture.loads
                seconds = _measured_s(plan, model, load) + (_capture_s(plan, model, load) if captured else 0.0)
                if number == 0:
                    seconds += JOB_START_S + window.warmup_iterations * iteration_s(plan, model, 0.0)
                if not points:
                    seconds += TESTBED_UP_S + PRECHECK_S * (1 if only else len(plan.traffic))
                    if isinstance(plan.topology, Testbed) and plan.topology.topology != "star":
                        seconds += JOB_START_S + bottleneck_s(plan, model)
                requested_bps = round(load * plan.capacity_bps)
                item = {"series": model.series(kind), "load": load, "requested_bps": requested_bps}
                recorded = _CAPTURED_NODES * _capture_bytes(plan, model, load) if captured else 0
                points.append(item | {"duration_s": round(seconds, 1), "packets_bytes": recorded})
    return points


def bottleneck_s(plan: LoadPlan, model: Model) -> float:
    """Return the seconds of several iterations under the heaviest load, in which the busiest link shows."""
    return min(plan.window.max_s, max(_BOTTLENECK_S, 3 * iteration_s(plan, model, plan.heaviest_load)))


def _measured_s(plan: LoadPlan, model: Model, load: float) -> float:
    """Estimate the measured time of a point with its settling, in seconds."""
    window = plan.window
    enough_s = max(window.min_s, window.min_iterations * iteration_s(plan, model, load))
    return window.settle_s + min(window.max_s, enough_s)


def sweep_s(plan: SweepPlan, only: str = "") -> float:
    """Return the expected duration of a sweep in seconds; the longest one if the sweep chooses its loads.

    Args:
        plan: the sweep.
        only: one of its series; empty: all.
    """
    seconds: float = sum(point["duration_s"] for point in estimate(plan, only))
    if isinstance(plan, LoadPlan) and plan.auto:
        for model in plan.models:
            first_s = sum(_measured_s(plan, model, load) for load in plan.loads)
            kinds = sum(only in ("", model.series(kind)) for kind in plan.traffic)
            seconds += kinds * max(plan.auto.budget_s - first_s, 0.0)
    return round(seconds, 1)


def to_json(plan: SweepPlan, only: str = "") -> dict[str, Any]:
    """Return a dry run as plain values: points and duration; for chosen loads, also the targets and the budget."""
    points = estimate(plan, only)
    item = {"points": points, "duration_s": sweep_s(plan, only), "warnings": doubts(plan)}
    item |= {"transports": transports(plan), "packets_bytes": sum(point["packets_bytes"] for point in points)}
    if isinstance(plan, SharingPlan) or plan.auto is None:
        return item
    return item | {
        "mode": AUTO,
        "first_loads": list(plan.loads),
        "target_interval_gbps": plan.auto.target_interval_gbps,
        "target_mean": plan.auto.target_mean,
        "budget_s": plan.auto.budget_s,
    }


def _capture_s(plan: LoadPlan, model: Model, load: float) -> float:
    """Estimate the time that the recording of packets takes at a load, in seconds."""
    assert plan.capture is not None
    return CAPTURE_START_S + min(plan.window.max_s, plan.capture.iterations * iteration_s(plan, model, load))


def _capture_bytes(plan: LoadPlan, model: Model, load: float) -> int:
    """Estimate the bytes that a node records at a load, if both directions of its link are full of whole packets."""
    assert plan.capture is not None
    packets = 2 * plan.capacity_bps / 8 / _mtu(plan) * _capture_s(plan, model, load)
    return min(plan.capture.max_bytes, round(packets * (_RECORD_BYTES + SNAP_BYTES)))


def room_bytes(plan: SweepPlan) -> int:
    """Estimate the largest number of bytes that a host writes in a sweep."""
    packets_bytes: int = sum(point["packets_bytes"] for point in estimate(plan)) // _CAPTURED_NODES
    return round(MIN_ROOM_BYTES + sweep_s(plan) * ROOM_BYTES_PER_S) + packets_bytes


def doubts(plan: SweepPlan) -> list[str]:
    """List the parts that a report of the sweep will lack according to the plan, one sentence each."""
    if isinstance(plan, SharingPlan):
        return []
    loads = sorted(plan.loads)
    # loads that hardly differ count as one, as in reports
    different = 1 + sum(second - first >= MERGE_SHARE for first, second in itertools.pairwise(loads))
    lacking = [result for result, least in _MIN_LOADS.items() if different < least]
    found = []
    if lacking:
        what = " and ".join(f"{result} ({_MIN_LOADS[result]})" for result in lacking)
        found.append(f"{different} different load{'s' if different > 1 else ''}, too few for {what}: add loads")
    scale_models = [model for model in plan.models if model.job == SCALE_MODEL]
    for model in scale_models if different > 1 and not lacking else ():
        if iteration_s(plan, model, loads[-1]) < MIN_RISE * iteration_s(plan, model, loads[0]):
            found.append(
                f"{model.label} is hardly slower at the heaviest load ({loads[-1]:.0%}) than at the lightest, by the "
                "estimate: add a heavier one for a congestion point"
            )
    return found


def transports(plan: SweepPlan) -> list[dict[str, Any]]:
    """Return ``model``, ``transport`` and the job's ``environment``, secrets masked, of each model with a transport."""
    found = {}  # a model may be there once per collective
    for model in resolved(plan)["models"]:
        if model["transport"]:
            item = {"model": model["name"], "transport": model["transport"], "environment": model["environment"]}
            found[model["name"], model["transport"]] = item
    return list(found.values())


def print_estimate(plan: SweepPlan, only: str = "") -> None:
    """Print a dry run of a sweep, or of one of its series, and the variables of models with a transport."""
    points = estimate(plan, only)
    width = max(len(point["series"]) for point in points)
    for point in points:
        rate = format_rate(point["requested_bps"])
        print(
            f"{point['series']:<{width}} {point['load']:6.1%}  {rate:>14}  about {format_duration(point['duration_s'])}"
        )
    if captured := [point["packets_bytes"] for point in points if point["packets_bytes"]]:
        print(f"packets after {counted(len(captured), 'point')}: about {format_size(sum(captured))} at most")
    if isinstance(plan, SharingPlan) or plan.auto is None:
        total_s = sum(point["duration_s"] for point in points)
        print(f"{counted(len(points), 'point')}, scale 1:{plan.scale:g}, about {format_duration(total_s)}")
    else:
        print(
            f"{counted(len(points), 'point')} in the first pass, scale 1:{plan.scale:g}; then loads chosen by the "
            f"measurement, until the congestion point is known to ±{plan.auto.target_interval_gbps:g} Gbit/s and each "
            f"mean to {100 * plan.auto.target_mean:g} %, for at most {format_duration(plan.auto.budget_s)} per series: "
            f"about {format_duration(sweep_s(plan, only))} at most"
        )
    for item in transports(plan):
        variables = " ".join(f"{name}={value}" for name, value in item["environment"].items())
        print(f"{model_label(item['model'], item['transport'])}: {variables}")
    for doubt in doubts(plan):
        print(f"warning: {doubt}")
