"""Long-lived, on-off, incast, all-to-all and ring plans: budgets, times, and who waits for whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import FlowSource
from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.common import OfferedLoad
from ringtap.trafficgen.plans.registry import make_plan

pytestmark = [pytest.mark.computes, pytest.mark.long]

MS = 1_000_000
NODES = ["10.0.0.1:5001", "10.0.0.2:5001", "10.0.0.3:5001", "10.0.0.4:5001"]
HOSTS = [node.split(":")[0] for node in NODES]
LOAD = {"load": 1_000_000_007, "duration": 1_003 * MS, "to": ["a:1"]}


def flows_of(plan: FlowSource) -> list[Flow]:
    """A plan's flows, after the sums in its header are seen to be right."""
    flows = list(plan.flows())
    assert plan.header["flows"] == len(flows)
    assert plan.header["bytes"] == sum(flow.size_bytes for flow in flows)
    assert all(low.start_ns <= high.start_ns for low, high in pairwise(flows))
    assert flows[0].start_ns >= 0
    assert flows[-1].start_ns < plan.header["duration_ns"]
    return flows


def test_long_lived_flows_take_destinations_and_sources_in_turn() -> None:
    given = {"flows": 3, "duration": MS, "to": ["a:1", "b:1"], "from": ["s", "t"]}
    plan = make_plan("long-lived", given)
    assert flows_of(plan) == [Flow(0, "s", "a:1", 0), Flow(0, "t", "b:1", 0), Flow(0, "s", "a:1", 0)]
    assert plan.header["transport"] == {}
    assert "load_bps" not in plan.header


def test_long_lived_flows_share_a_load_by_pacing() -> None:
    plan = make_plan("long-lived", {"flows": 4, "load": 10**9, "duration": MS, "to": ["a:1"]})
    assert plan.header["transport"] == {"pacing_bps": 250_000_000}
    assert plan.header["load_bps"] == 10**9


def test_on_off_has_its_load_its_peak_and_its_periods() -> None:
    plan = make_plan("on-off", {"load": 10**8, "duration": 100_000 * MS, "to": ["a:1"], "on": 5 * MS, "off": 15 * MS})
    flows = flows_of(plan)
    assert len(flows) == 5_000
    assert plan.header["bytes"] == 10**8 * 100 // 8
    assert plan.header["transport"]["pacing_bps"] == 4 * 10**8
    sizes = np.array([flow.size_bytes for flow in flows])
    starts = np.array([flow.start_ns for flow in flows])
    on_ns = sizes * 8e9 / 4e8
    off_ns = (starts[1:] - starts[:-1]) - on_ns[:-1]
    # A byte lasts 20 ns at the peak, and starts and ends are whole bytes
    assert off_ns.min() > -25
    assert stats.kstest(on_ns, stats.expon(scale=5 * MS).cdf).pvalue > 0.01
    assert stats.kstest(off_ns, stats.expon(scale=15 * MS).cdf).pvalue > 0.01
    assert starts[-1] + on_ns[-1] <= 100_000 * MS + 25


def test_on_off_begins_with_either() -> None:
    given = {"load": 10**8, "duration": 1_000 * MS, "to": ["a:1"], "on": 5 * MS, "off": 15 * MS}
    first_on = sum(next(iter(make_plan("on-off", given | {"seed": seed}).flows())).start_ns == 0 for seed in range(200))
    assert 25 < first_on < 80


def test_incast_starts_all_at_once_each_period() -> None:
    plan = make_plan("incast", LOAD | {"flows": 7, "period": 10 * MS})
    flows = flows_of(plan)
    assert len(flows) == 101 * 7
    assert plan.header["bytes"] == OfferedLoad(LOAD["load"]).bytes_until(1_003 * MS)
    done = 0
    for number in range(101):
        of_round = flows[number * 7 : number * 7 + 7]
        assert {flow.start_ns for flow in of_round} == {number * 10 * MS}
        sizes = [flow.size_bytes for flow in of_round]
        assert max(sizes) - min(sizes) <= 1
        done += sum(sizes)
        assert done == OfferedLoad(LOAD["load"]).bytes_until(min((number + 1) * 10, 1_003) * MS)


def test_incast_of_a_size_from_named_sources() -> None:
    plan = make_plan("incast", {"duration": 20 * MS, "to": ["a:1"], "from": ["s", "t"], "size": 64_000})
    assert flows_of(plan) == [
        Flow(start_ns, source, "a:1", 64_000) for start_ns in (0, 10 * MS) for source in ("s", "t")
    ]


def test_all_to_all_has_every_ordered_pair_each_period() -> None:
    plan = make_plan("all-to-all", {"duration": 25 * MS, "node": NODES, "size": 1_000})
    flows = flows_of(plan)
    assert len(flows) == 3 * 12
    pairs = {(flow.source, flow.destination) for flow in flows[:12]}
    assert pairs == {(host, node) for host in HOSTS for node in NODES if not node.startswith(host)}
    assert [flow.start_ns for flow in flows[::12]] == [0, 10 * MS, 20 * MS]


def test_ring_all_reduce_moves_every_chunk_around() -> None:
    given = {"duration": 1_000 * MS, "node": NODES, "bytes": 1_000_003, "compute": 7 * MS, "iterations": 2}
    plan = make_plan("ring", given)
    flows = flows_of(plan)
    assert len(flows) == 2 * 6 * 4
    assert plan.header["bytes"] == 2 * 6 * 1_000_003
    for number, flow in enumerate(flows):
        row, node = divmod(number, 4)
        assert (flow.source, flow.destination) == (HOSTS[node], NODES[(node + 1) % 4])
        assert flow.start_ns == row // 6 * 7 * MS
        if row == 0:
            assert flow.after == ()
            continue
        # It waits for the flow that its own node received in the row before
        ((after, delay_ns),) = flow.after
        before = flows[after]
        assert after // 4 == row - 1
        assert before.destination.split(":")[0] == flow.source
        assert delay_ns == (7 * MS if row == 6 else 0)
        if row != 6:
            assert before.size_bytes == flow.size_bytes


def test_a_ring_leaves_every_node_with_every_chunk_reduced() -> None:
    """The plan's flows carried out on numbers: the algorithm is all-reduce."""
    count = 4
    given = {"duration": MS, "node": NODES, "bytes": 40, "iterations": 1}
    held = [[{node} for _ in range(count)] for node in range(count)]
    for number, _ in enumerate(flows_of(make_plan("ring", given))):
        step, node = divmod(number, count)
        if node == 0:
            before = [[set(chunk) for chunk in row] for row in held]
        chunk = (node - step) % count
        held[(node + 1) % count][chunk] |= before[node][chunk]
    assert all(chunk == {0, 1, 2, 3} for row in held for chunk in row)


@pytest.mark.parametrize("kind", ["consistent", "burst", "on-off", "incast"])
@pytest.mark.parametrize(("to", "share"), [("a:1", 1448 / 1538), ("[fd00::1]:1", 1428 / 1538)])
def test_a_load_of_wire_bytes_is_less_payload(kind: str, to: str, share: float) -> None:
    plan = make_plan(kind, {"load": 10**9, "load_counts": "wire", "duration": 1_000 * MS, "to": [to]})
    assert plan.header["bytes"] == pytest.approx(10**9 / 8 * share, abs=1)
    assert plan.header["load_counts"] == "wire"
    assert plan.header["mtu"] == 1500
    assert plan.header["wire_bits_per_payload_bit"] == pytest.approx(1 / share)


def test_jumbo_packets_waste_less() -> None:
    plan = make_plan("long-lived", {"load": 10**9, "load_counts": "wire", "mtu": 9000, "duration": MS, "to": ["a:1"]})
    assert plan.header["transport"]["pacing_bps"] == round(10**9 * 8948 / 9038)


def test_transport_is_in_the_header() -> None:
    given = {"congestion_control": "cubic", "dscp": 8, "send_buffer": 10**6, "pacing": 10**7}
    plan = make_plan("consistent", LOAD | given)
    assert plan.header["transport"] == {
        "congestion_control": "cubic",
        "dscp": 8,
        "send_buffer_bytes": 10**6,
        "pacing_bps": 10**7,
    }


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("long-lived", {"flows": 0}, "--flows 0"),
        ("consistent", {"load": 10**14, "sizes": "fixed:1", "duration": 10**12}, "too long"),
        ("burst", {"burst_length": 100, "burst_period": 1000, "duration": 10**15}, "--burst-period"),
        ("on-off", {"on": 1, "off": 1, "duration": 10**13, "load": 10**14}, "too long"),
        ("long-lived", {"flows": 10**9}, "--flows"),
        ("long-lived", {"pacing": 10}, "--pacing does not go"),
        ("long-lived", {"load": 0}, "load 0"),
        ("on-off", {"on": 0}, "--on and --off"),
        ("on-off", {"on": MS, "off": MS, "load": 100}, "ask for more load"),
        ("incast", {"to": ["a:1", "b:1"]}, "--to once"),
        ("incast", {"flows": 3, "from": ["s"]}, "one of the two"),
        ("incast", {"flows": 0}, "--flows 0"),
        ("incast", {"size": 5}, "--load for all flows together, or --size"),
        ("incast", {"load": 1000}, "leaves 1 bytes for the 8 flows"),
        ("incast", {"period": 0}, "--period"),
        ("incast", {"period": 1, "duration": 10**15, "load": 10**12}, "too long"),
        ("incast", {"duration": 10 * MS + 1, "load": 10**6}, "whole periods"),
        ("consistent", {"mtu": 1500}, "--load-counts wire"),
        ("consistent", {"mtu": 100, "load_counts": "wire"}, "--mtu 100"),
        ("consistent", {"dscp": 64}, "--dscp 64"),
        ("consistent", {"send_buffer": 0}, "--send-buffer"),
        ("consistent", {"pacing": 0}, "--pacing"),
        ("consistent", {"congestion_control": "a b"}, "--congestion-control"),
        ("consistent", {"from": ["s", "s"]}, "twice"),
        ("consistent", {"from": ["-"]}, "source"),
        ("consistent", {"to": ["a\x7f:1"]}, "destination"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(kind, LOAD | change)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("all-to-all", {"node": NODES[:1]}, "two nodes"),
        ("all-to-all", {"node": ["a:1", "a:1"]}, "twice"),
        ("all-to-all", {"size": 0}, "--size"),
        ("all-to-all", {"load_counts": "wire"}, "give --load too"),
        ("ring", {"node": NODES[:1]}, "two nodes"),
        ("ring", {"bytes": 3}, "--bytes"),
        ("ring", {"iterations": 0}, "--iterations"),
        ("ring", {"compute": 500 * MS, "iterations": 3}, "compute for longer"),
        ("ring", {"bytes": 10**18, "iterations": 10**6}, "too large"),
    ],
)
def test_what_makes_no_sense_between_nodes_is_refused(kind: str, change: dict[str, Any], words: str) -> None:
    given = {"duration": 1_000 * MS, "node": NODES, "size": 1_000, "bytes": 10**6, "iterations": 1}
    with pytest.raises(UsageError, match=words):
        make_plan(kind, given | change)
