"""Where all ranks do the same, one that stands for all has the times that each of them has."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.workload import simulation
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms
from ringtap.workload.simulate_iterations import critical_path, simulate
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, check_workload

pytestmark = pytest.mark.computes

KINDS = [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL]


@st.composite
def traces(draw: st.DrawFn) -> list[Node]:
    found: list[Node] = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        deps = sorted(draw(st.sets(st.integers(1, number - 1), max_size=2))) if number > 1 else []
        if draw(st.booleans()):
            length_us = draw(st.sampled_from([0, 10, 1000]))
            found.append(Node(number, f"n{number}", NodeType.COMP, deps, duration_us=length_us))
        else:
            attributes = {"comm_type": int(draw(st.sampled_from(KINDS))), "comm_size": draw(st.integers(0, 10**6))}
            found.append(Node(number, f"n{number}", NodeType.COMM_COLL, deps, attributes=attributes))
    return found


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from([2, 3, 4, 7, 8]), st.sampled_from(["ring", "halving-doubling"]), st.booleans())
def test_one_for_all(trace: list[Node], ranks: int, name: str, has_latency: bool) -> None:
    if name == "halving-doubling":
        ranks = 1 << (ranks.bit_length() - 1)
    workload = Workload([[replace(node) for node in trace] for _ in range(ranks)])
    check_workload(workload)
    network, settings = star(ranks + 1, 1e9), {"iterations": 3, "latency_s": 1e-5 if has_latency else 0.0}
    one = simulate(workload, network, Algorithms(name), **settings)
    every = simulate(workload, replace(network, name="as a star"), Algorithms(name), **settings)  # nothing is assumed
    np.testing.assert_allclose(one.end_s, every.end_s, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(one.link_bytes, every.link_bytes, rtol=1e-9)
    for spans, others in zip(one.spans, every.spans, strict=True):
        assert [span.node for span in spans] == [span.node for span in others]
        np.testing.assert_allclose([span[1:] for span in spans], [span[1:] for span in others], rtol=1e-9, atol=1e-12)
    paths = [critical_path(workload, simulated) for simulated in (one, every)]
    assert paths[0].communication_s + paths[0].compute_s == pytest.approx(paths[1].communication_s + paths[1].compute_s)


@pytest.mark.parametrize("most", [0, 10**9])
def test_machine_code_and_python_give_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(simulation, "MAX_INTERPRETED", most)
    trace = [
        Node(1, "a", NodeType.COMP, [], duration_us=1000),
        Node(2, "b", NodeType.COMM_COLL, [1], attributes={"comm_type": 0, "comm_size": 8_000_000}),
        Node(3, "c", NodeType.COMM_COLL, [1], attributes={"comm_type": 6, "comm_size": 4_000_000}),
    ]
    workload = Workload([[replace(node) for node in trace] for _ in range(4)])
    workload.traces[0][0].duration_us = 2000
    share = np.ones(8)
    share[5] = 0.3
    found = simulate(workload, star(4, 1e9), Algorithms("ring"), iterations=2, rate_share=share)
    # the slow link is busy from 1 ms on, when the first computations end: 6 · 2 MB and 3 · 1 MB at 0.3 Gbit/s
    assert found.end_s.max() == pytest.approx(2 * (0.001 + 0.4), rel=1e-12)
