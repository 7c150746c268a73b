"""Flow plans as arrays: what both readers agree on, and damaged files."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.flow_plan_format import Flow
from ringtap.core.flow_plan_table import read_plan

pytestmark = pytest.mark.computes

SOURCES, DESTINATIONS = ["10.0.0.2", "10.0.0.3"], ["10.0.0.1:5001", "10.0.0.3:5001"]


class Made:
    def __init__(self, flows: list[Flow]) -> None:
        self._flows = flows
        self.header = {"format": "ringtap-flow-plan", "version": 2, "duration_ns": 10**9, "flows": len(flows)}
        self.header |= {"bytes": sum(flow.size_bytes for flow in flows)}
        self.header |= {"sources": SOURCES, "destinations": DESTINATIONS}

    def flows(self) -> list[Flow]:
        return self._flows


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    flows = [Flow(0, "", DESTINATIONS[0], 1000), Flow(5, SOURCES[1], DESTINATIONS[0], 0)]
    flows += [
        Flow(7, SOURCES[0], DESTINATIONS[1], 2**40, ((0, 12),)),
        Flow(7, SOURCES[0], DESTINATIONS[1], 3, ((0, 0), (2, 500))),
    ]
    made = Made(flows)
    made.header["version"] = 3
    write_plan(made, tmp_path / "plan")
    return tmp_path / "plan"


def test_the_arrays_hold_what_the_sender_reads(plan: Path) -> None:
    found = read_plan(plan)
    waits = list(zip(found.after.tolist(), found.delay_ns.tolist(), strict=True))
    after = [tuple(waits[begin:end]) for begin, end in itertools.pairwise(found.after_start.tolist())]
    rows = zip(found.start_ns, found.source, found.destination, found.size_bytes, after, strict=True)
    flows = [
        Flow(int(start), SOURCES[source] if source >= 0 else "", DESTINATIONS[to], int(size), after)
        for start, source, to, size, after in rows
    ]
    assert flows == list(PlanFile(plan).flows())
    assert found.sources == []  # a flow is unbound
    assert found.waits.tolist() == [0, 0, 1, 2]


def test_computations_are_lines_that_are_no_flows(tmp_path: Path) -> None:
    made = Made([Flow(0, SOURCES[0], "", 0), Flow(0, SOURCES[0], DESTINATIONS[1], 3, ((0, 7),))])
    made.header |= {"version": 3, "flows": 1}
    write_plan(made, tmp_path / "plan")
    found = read_plan(tmp_path / "plan")
    assert found.is_flow.tolist() == [False, True]
    assert found.destination.tolist() == [-1, 1]


def test_a_flow_waits_for_one_above_it(plan: Path) -> None:
    lines = plan.read_text().splitlines(keepends=True)
    plan.write_text("".join([*lines[:3], lines[3].replace("0+12", "2"), *lines[4:]]))
    with pytest.raises(UsageError, match="line 4: after 2 is not an earlier flow"):
        read_plan(plan)


@pytest.mark.parametrize("seed", range(20))
def test_damage_ends_in_one_sentence(plan: Path, tmp_path: Path, seed: int) -> None:
    whole, draw = plan.read_bytes(), random.Random(seed)
    for _ in range(20):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.choice(b'0123456789\t\n-+"\x00\xff')
        path = tmp_path / "damaged"
        path.write_bytes(bytes(damaged[: draw.randint(1, len(damaged))]))
        try:
            assert len(read_plan(path).start_ns) == json.loads(path.read_bytes().partition(b"\n")[0])["flows"]
        except UsageError as error:
            assert "\n" not in str(error)
