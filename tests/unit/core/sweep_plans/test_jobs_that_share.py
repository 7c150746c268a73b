"""Jobs that share links of a testbed: how long an iteration is by the plan, and shifts within it."""

from typing import Any

import pytest

from ringtap.agents.sweep.sweep_estimate import iteration_s, layout, step_s
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import SharingPlan, load_plan
from ringtap.core.thesis_neural_networks import PROFILES

pytestmark = pytest.mark.computes

COMPUTE_S, BPS, SCALE = 0.1, 250e6, 100
# of two ranks: all gradients once
EXCHANGE_S = 8 * 4 * PROFILES["vgg16"].parameters / SCALE / BPS


def plan(jobs: int, offset: str, mtu: int = 1500) -> SharingPlan:
    """Return a plan of jobs of two ranks each, of which all have one on S0."""
    models: list[dict[str, Any]] = [
        {"name": f"j{number}", "model": "vgg16", "compute": f"{COMPUTE_S}s", "workers": ["S0", f"S{number + 1}"]}
        for number in range(jobs)
    ]
    offsets: list[Any] = [offset if jobs == 2 else [offset] * (jobs - 1)]
    found = load_plan({"sweep": {"scale": SCALE, "offsets": offsets}, "testbed": {"mtu": mtu}, "jobs": models})
    assert isinstance(found, SharingPlan)
    return found


@pytest.mark.parametrize(("mtu", "share"), [(1500, 1448 / 1514), (576, 524 / 590), (9000, 8948 / 9014)])
def test_a_shift_may_be_as_long_as_the_frames_of_an_iteration_take(mtu: int, share: float) -> None:
    longest_ms = 1e3 * (COMPUTE_S + EXCHANGE_S / share)
    plan(2, f"{longest_ms - 0.1:.3f}ms", mtu)
    with pytest.raises(UsageError, match=r"but an iteration of j1 takes .* at most by the plan"):
        plan(2, f"{longest_ms + 0.1:.3f}ms", mtu)


def test_the_estimate_is_of_the_ranks_of_each_job_and_of_the_testbeds_frames() -> None:
    for jobs in (2, 4):
        for mtu, share in ((1500, 1448 / 1514), (576, 524 / 590)):
            found = plan(jobs, "0ms", mtu)
            assert len(layout(found)[1].workers) == jobs + 1
            model, workers = found.jobs[0].model, found.jobs[0].workers
            assert iteration_s(found, model, 0.0, workers) == pytest.approx(COMPUTE_S / 3 + EXCHANGE_S / share)
    assert step_s(plan(2, "0ms")) == pytest.approx(step_s(plan(4, "0ms")))
