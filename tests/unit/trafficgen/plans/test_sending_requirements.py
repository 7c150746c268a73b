"""What a plan requires of its sender: connections at once, and the highest rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringtap.core.flow_plan_file import PlanFile
from ringtap.trafficgen.plans.sending_requirements import PlanRequirements, requirements
from tests.unit.core.test_flow_plan_file import plan_file

pytestmark = pytest.mark.computes


def needs(folder: Path, *flows: str, **header: Any) -> PlanRequirements:
    """Return what `send` needs for a plan of these lines, with a header whose sums fit them."""
    total = sum(int(flow.split("\t")[3]) for flow in flows)
    sums = {"duration_ns": 10**9, "flows": len(flows), "bytes": total}
    return requirements(PlanFile(plan_file(folder, list(flows), **(sums | header))))


def test_needs_count_what_starts_within_a_millisecond(tmp_path: Path) -> None:
    starts = [0, 400_000, 1_000_000, 1_399_999, 3_000_000]
    got = needs(tmp_path, *(f"{start}\t-\ta:1\t1\t-" for start in starts), "3000000\t10.0.0.9\ta:1\t1\t-")
    assert got.most_at_once == {("", "a:1"): 3, ("10.0.0.9", "a:1"): 1}
    assert not got.dependent


def test_needs_add_open_ended_flows_and_chains(tmp_path: Path) -> None:
    endless = needs(tmp_path, "0\t-\ta:1\t0\t-", "0\t-\ta:1\t0\t-", "500000000\t-\ta:1\t5\t-")
    assert endless.most_at_once == {("", "a:1"): 3}
    assert endless.bytes == 5
    chain = needs(tmp_path, "0\t-\ta:1\t1\t-", *(f"0\t-\ta:1\t1\t{after}" for after in range(9)))
    assert chain.most_at_once == {("", "a:1"): 2}
    assert chain.dependent


def test_the_busiest_moment_is_a_bin_or_the_paced_flows_under_way(tmp_path: Path) -> None:
    lines = [f"{ms}000000\t-\ta:1\t{size}\t-" for ms, size in ((0, 100), (99, 200), (100, 250), (300, 10))]
    assert needs(tmp_path, *lines).busiest_bps == 300 * 8 * 10
    assert needs(tmp_path, *lines, transport={"pacing_bps": 1000}).busiest_bps == 4000
    assert needs(tmp_path, *lines, transport={"pacing_bps": 10**6}).busiest_bps == 2 * 10**6
