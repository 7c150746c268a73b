"""Shares that rules give jobs, their rates at a link, and what models predict of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.sweep.job_shares import (
    gpu_intensities,
    longest_silence_s,
    mltcp_phases,
    predicted_begins_s,
    shares_of,
)
from ringtap.agents.testbed.htb_link_shares import LEAST_SHARE, JobProgress, class_rates_bps
from ringtap.agents.testbed.topology import JobShare, TestbedSpec
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.workload.interleaving import PeriodicJob, Phase

pytestmark = [pytest.mark.computes, pytest.mark.together]

MS, CAPACITY_BPS = 10**6, 250e6


def job(period_ms: int, *phases: tuple[int, int]) -> PeriodicJob:
    return PeriodicJob("job", period_ms * MS, tuple(Phase(begin * MS, end * MS, CAPACITY_BPS) for begin, end in phases))


def plan(*offsets: str, **keys: Any) -> dict[str, Any]:
    """Return the tables of a plan whose first job has the keys."""
    jobs = [{"name": name, "model": "vgg16", "workers": ["S0", "S1"]} for name in "ab"]
    return {"sweep": {"offsets": list(offsets)}, "jobs": [jobs[0] | keys, jobs[1]]}


def test_each_rule_gives_shares_by_its_key() -> None:
    keys = {"weight": 2, "priority": 3, "congestion_control": "bbr"}
    jobs = load_plan(plan("free", "weights", "priorities", "mltcp", "congestion-control", **keys)).jobs
    alone = [job(100, (40, 60), (70, 100)), job(200, (150, 200))]

    def shares(rule: str) -> list[JobShare]:
        return shares_of(rule, jobs, alone, ())

    assert shares("free") == [JobShare(), JobShare()]
    assert shares("weights") == [JobShare(2.0), JobShare()]
    assert shares("priorities") == [JobShare(priority=3), JobShare()]
    assert shares("congestion-control") == [JobShare(congestion_control="bbr"), JobShare()]
    # 50 ms at 250 Mbit/s; the longest silence is over the end of the iteration
    assert longest_silence_s(alone[0]) == pytest.approx(0.04)
    first, second = shares("mltcp")
    assert (first.intercept, first.slope, first.gap_s) == (0.25, 1.75, pytest.approx(0.02))
    assert first.iteration_bytes == pytest.approx(0.05 * CAPACITY_BPS / 8) == second.iteration_bytes
    tables = plan("crux", flop=4e12)
    tables["jobs"][1]["flop"] = 1e12
    jobs = load_plan(tables).jobs
    intensities = gpu_intensities(jobs, alone, [CAPACITY_BPS, CAPACITY_BPS / 2])
    assert intensities == pytest.approx([4e12 / 0.05, 1e12 / 0.1])
    crux = shares_of("crux", jobs, alone, intensities)
    assert [share.priority for share in crux] == [1, 0], "as many bytes, and more FLOPs"


@pytest.mark.parametrize(
    ("offsets", "given", "begin"),
    [
        (["free"], {}, ""),
        (["free", "mltcp"], {}, "worst"),
        (["mltcp"], {"begin": "20ms"}, (0.0, 0.02)),
        (["free"], {"begin": "worst"}, "worst"),
    ],
)
def test_free_jobs_begin_where_they_are_held(offsets: list[str], given: dict[str, Any], begin: object) -> None:
    tables = plan(*offsets)
    tables["sweep"] |= given
    assert load_plan(tables).begin == begin


def beginning(begin: object, *offsets: str) -> dict[str, Any]:
    """Return the tables of a plan with a begin."""
    tables = plan(*offsets)
    return tables | {"sweep": tables["sweep"] | {"begin": begin}}


def test_only_points_without_shifts_have_a_begin() -> None:
    tables = beginning(["5ms"], "free")
    tables["jobs"].append(tables["jobs"][0] | {"name": "c"})
    with pytest.raises(UsageError, match="a list of 2 durations, for all jobs but the first"):
        load_plan(tables)
    tables["sweep"]["begin"] = ["5ms", "8ms"]
    assert load_plan(tables).begin == (0.0, 0.005, 0.008)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (plan("weights"), '"weights" among the offsets is by weight of [[jobs]], and give one to a job at least'),
        (plan("crux", flop=1e12), '"crux" among the offsets is by flop of [[jobs]], and each job needs one'),
        (plan("free", priority=1), 'is for jobs that share by it: add "priorities" to the offsets'),
        (plan("weights", weight=0), "weight = 0 is not a number from 0.1 to 10"),
        (beginning("20ms", "cassini"), 'begin is for "free" and rules among the offsets, on a [testbed]: leave it out'),
        (plan("700ms", compute="300ms"), "offsets holds 700 ms, but an iteration of b takes"),
        (beginning("900ms", "free"), "begin holds 900 ms, but an iteration of b takes"),
        (beginning("soon", "free"), "begin holds 'soon', which is not understood"),
        (beginning(5, "free"), 'begin = 5 is not "worst", or a duration such as "50ms"'),
        (plan(7), 'each offset is "free", "cassini", "weights", "priorities"'),  # type: ignore[arg-type]
    ],
)
def test_rules_and_keys_that_do_not_go_together_are_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_plan(tables)
    assert said in str(error.value)


def test_jobs_have_an_interface_on_each_link_of_a_host() -> None:
    spec = TestbedSpec("t", ("a", "b"), 10**8, jobs=2)
    assert (spec.job_ip("b", 1), spec.job_network(1)) == ("10.77.11.2", "10.77.11.0/24")
    assert [spec.job_nic(1, nic) for nic in ("eth0", "eth3")] == ["job1", "job1-3"]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.booleans())
def test_rates_of_classes_are_never_more_than_the_link_has(weights: list[float], has_priorities: bool) -> None:
    shares = [JobShare(priority=number if has_priorities else 0) for number in range(len(weights))]
    rates_bps = class_rates_bps(shares, weights, CAPACITY_BPS)
    assert sum(rates_bps) <= (1 - LEAST_SHARE) * CAPACITY_BPS * (1 + 1e-9)
    if not has_priorities:
        assert sum(rates_bps) == pytest.approx((1 - LEAST_SHARE) * CAPACITY_BPS)
        assert [rate / rates_bps[0] for rate in rates_bps] == pytest.approx([each / weights[0] for each in weights])


def test_a_weight_grows_with_the_bytes_of_an_iteration_and_falls_after_a_gap() -> None:
    progress = JobProgress(JobShare(0.25, 1.75, iteration_bytes=1000, gap_s=0.05))
    sent = [(0.0, 500), (0.1, 500), (0.11, 750), (0.12, 1500), (0.13, 2500), (0.19, 2500), (0.2, 2600)]
    weights = [progress.weight(sent_bytes, now_s) for now_s, sent_bytes in sent]
    # 250 bytes, all 1000, more than these; 0.06 s of silence; and 100 bytes of the next iteration
    expected = [0.25, 0.25, 0.25 + 1.75 / 4, 2.0, 2.0, 0.25, 0.25 + 0.175]
    assert weights == pytest.approx(expected)


def test_mltcp_phases_are_those_of_the_equation() -> None:
    alone = [job(200, (150, 200))] * 2
    # aT = 50 ms and 5 ms at first: 23.529, 43.836, 49.136
    expected = [0.005 / 0.2, 0.023529 / 0.2, 0.043836 / 0.2, 0.049136 / 0.2]
    assert mltcp_phases(alone, [0.0, 0.005], 4) == pytest.approx(expected, abs=1e-4)
    assert mltcp_phases(alone, [0.005, 0.0], 4) == pytest.approx([1 - phase for phase in expected], abs=1e-4)
    longer = mltcp_phases([job(100, (20, 100))] * 2, [0.0, 0.005], 20)
    assert isinstance(longer, list)
    assert longer[-1] == 0.5, "as far apart as they can be"
    said = mltcp_phases([job(100, (50, 100)), job(106, (50, 100))], [0.0, 0.005], 4)
    assert said == (
        "MLTCP's equation is for jobs whose iterations take the same time alone; here they differ by 6.0%, more than 5%"
    )
    assert mltcp_phases([*alone, *alone], [0.0] * 4, 4) == "MLTCP's equation is for two jobs, not for 4"


def test_predicted_iterations_slide_by_the_shares() -> None:
    alone = [job(100, (60, 100))] * 2
    fair = predicted_begins_s(alone, [JobShare()] * 2, [-0.02, -0.02], [(CAPACITY_BPS, (0, 1))], 2.0)
    assert fair[0] == pytest.approx(fair[1])
    assert fair[0][:2] == pytest.approx([0.12, 0.26])
    assert fair[0][-1] <= 2.0
    heavy, light = predicted_begins_s(alone, [JobShare(2.0), JobShare()], [-0.02, -0.02], [(CAPACITY_BPS, (0, 1))], 2.0)
    assert (heavy[0], light[0]) == (pytest.approx(0.1), pytest.approx(0.12))
    assert [begins[-1] - begins[-2] for begins in (heavy, light)] == pytest.approx([0.1, 0.1], abs=1e-3)
