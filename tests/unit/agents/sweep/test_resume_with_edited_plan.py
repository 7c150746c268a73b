"""Plans of jobs that share links: what may change before a sweep goes on. Those of loads are in other files here."""

from typing import Any

import pytest

from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.sweep_estimate import resolved
from ringtap.core.sweep_plans.sweep_plan import LoadPlan, SharingPlan, load_plan

pytestmark = pytest.mark.computes

JOBS = [
    {"name": "a", "model": "vgg16", "workers": ["S0", "S1"]},
    {"name": "b", "model": "resnet50", "workers": ["S0", "S2"]},
]


def plan_of(offsets: list[str], *changes: dict[str, Any], **sweep: Any) -> dict[str, Any]:
    jobs = [job | change for job, change in zip(JOBS, [*changes, {}, {}], strict=False)]
    plan = load_plan({"sweep": {"offsets": offsets, **sweep}, "jobs": jobs})
    assert isinstance(plan, SharingPlan)
    return resolved(plan)


def steps(count: int) -> list[dict[str, Any]]:
    return [{"step": number} for number in range(count)]


@pytest.mark.parametrize(
    ("now", "measured", "touching"),
    [
        (plan_of(["cassini", "20ms", "free"]), 4, []),
        (plan_of(["20ms", "cassini"]), 3, ["offsets"]),
        (plan_of(["20ms", "cassini"]), 2, []),
        (plan_of(["cassini"]), 4, ["offsets"]),
        (plan_of(["cassini", "weights"], {"weight": 2.0}), 3, []),
        (plan_of(["cassini", "20ms"], {"title": "VGG"}), 4, []),
        (plan_of(["cassini", "20ms"], {"workers": ["S0", "S3"]}), 2, ["topology.workers", "jobs.a.workers"]),
        (plan_of(["cassini", "20ms"], {"compute": "500ms"}), 1, ["jobs.a.model.compute_s"]),
        (plan_of(["cassini", "20ms"], seed=7), 1, ["seed"]),
        (plan_of(["cassini", "20ms"], seed=7), 0, []),
    ],
)
def test_offsets_and_numbers_of_rules_that_were_not_measured_may_change(
    now: dict[str, Any], measured: int, touching: list[str]
) -> None:
    changes = plan_changes(plan_of(["cassini", "20ms"]), now, [], steps(measured))
    assert sorted(changes.touching) == sorted(touching)
    assert not set(changes.free) & set(touching)


def test_what_holds_free_jobs_may_change_until_they_were_measured() -> None:
    before = plan_of(["cassini", "weights"], {"weight": 2.0})
    now = plan_of(["cassini", "weights"], {"weight": 2.0}, begin="20ms")
    assert plan_changes(before, now, [], steps(3)).touching == []
    assert plan_changes(before, now, [], steps(4)).touching == ["begin"]
    heavier = plan_of(["cassini", "weights"], {"weight": 3.0})
    assert plan_changes(before, heavier, [], steps(3)).touching == []
    assert plan_changes(before, heavier, [], steps(4)).touching == ["jobs.a.weight"]


def test_points_of_jobs_are_no_points_of_loads() -> None:
    loads = load_plan({"sweep": {"loads": [0]}, "models": [{"name": "vgg16"}]})
    assert isinstance(loads, LoadPlan)
    jobs, of_loads = plan_of(["cassini"]), resolved(loads)
    assert set(jobs) == set(of_loads), "readers of run.json find all keys"
    assert "jobs.a.workers" in plan_changes(jobs, of_loads, [], steps(1)).touching
    point = {"series": "vgg16-iperf", "model": "vgg16", "traffic": "iperf", "step": 0, "requested_bps": 0}
    assert "models.vgg16.parameters" in plan_changes(of_loads, jobs, [point]).touching
