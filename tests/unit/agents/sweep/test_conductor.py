"""What a sweep says about what it does not record."""

from typing import Any

import pytest

from ringtap.agents.sweep.conductor import _not_collected
from ringtap.core.sweep_plans.sweep_plan import load_plan

pytestmark = pytest.mark.computes


@pytest.mark.parametrize(
    ("capture", "missing"),
    [
        ({}, {"sockets": "not asked for", "packets": "not asked for"}),
        ({"capture": [0.8]}, {"sockets": "only with packets"}),
    ],
)
def test_sockets_are_recorded_with_packets_only(capture: dict[str, Any], missing: dict[str, str]) -> None:
    sweep = {"loads": [0, 0.8], "traffic": ["consistent"], **capture}
    plan = load_plan({"sweep": sweep, "testbed": {"configuration": "B"}, "models": [{"name": "resnet50"}]})
    found = {item["what"]: item["why"] for item in _not_collected(plan) if item["what"] in ("sockets", "packets")}
    assert found.keys() == missing.keys()
    assert all(missing[what] in why for what, why in found.items())
