"""The generator check before a sweep: its flows are small enough for their number to determine the load."""

import pytest

from ringtap.agents.sweep.traffic_precheck import with_enough_flows
from ringtap.core.sweep_plans.sweep_plan import LoadPlan, load_plan
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH

pytestmark = pytest.mark.computes


def plan_of(capacity: str, scale: float) -> LoadPlan:
    sweep = {"name": "own", "scale": scale, "capacity": capacity, "loads": [0, 0.4], "traffic": ["consistent"]}
    found = load_plan({"sweep": sweep, "testbed": {"configuration": "B"}, "models": [{"name": "vgg16"}]})
    assert isinstance(found, LoadPlan)
    return found


@pytest.mark.parametrize(("capacity", "scale"), [("25gbit", 100), ("25gbit", 500), ("25gbit", 1), ("100gbit", 10)])
def test_flows_that_are_many_are_sent_as_the_plan_has_them(capacity: str, scale: float) -> None:
    plan = plan_of(capacity, scale)
    assert with_enough_flows(plan) == plan


@pytest.mark.parametrize("capacity", ["2500kbit", "250mbit", "1gbit"])
def test_full_size_flows_of_a_slow_link_become_small(capacity: str) -> None:
    plan = plan_of(capacity, 1)
    found = with_enough_flows(plan)
    assert plan.capacity_bps / 8 / (WEB_SEARCH.mean_bytes / found.scale) == pytest.approx(1500)
