"""Workloads as directories of Chakra execution traces: round trips, what is refused, and damaged files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import PROFILES, profile_named
from ringtap.workload import astra_sim_1
from ringtap.workload.astra_sim import write_astra_sim
from ringtap.workload.execution_trace import Collective, Node, NodeType, message_classes, read_trace, write_trace
from ringtap.workload.export import param
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.model_workloads import buckets, model_workload
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.simulate_iterations import critical_path, simulate
from ringtap.workload.topologies import leaf_spine, star
from ringtap.workload.workload import (
    CARRIED_OUT_AS,
    Workload,
    check_workload,
    kind_of,
    read_workload,
    size_of,
    split_bytes,
    summary,
    write_workload,
)
from ringtap.workload.workload_to_flow_plan import operations

pytestmark = [pytest.mark.computes, pytest.mark.long]

COMP, SEND, RECV, COLL = NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL


def trace() -> list[Node]:
    sum_of = {"comm_type": 0, "comm_size": 1_000_000}
    return [
        Node(1, "forward", COMP, duration_us=1000),
        Node(2, "backward", COMP, [1], duration_us=500),
        Node(3, "bucket0", COLL, [2], attributes=dict(sum_of)),
        Node(4, "backward", COMP, [2], duration_us=500),
        Node(5, "bucket1", COLL, [3], [4], attributes=dict(sum_of)),
    ]


def workload(ranks: int = 4) -> Workload:
    return Workload([trace() for _ in range(ranks)])


TYPED = ("comm_", "is_", "pg_", "num_", "tensor_")  # attributes whose types are fixed
identifiers = st.integers(0, 2**64 - 1)
values = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(), st.lists(st.booleans()),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
)  # fmt: skip
nodes = st.builds(
    Node, identifiers, st.text(), st.sampled_from(NodeType), st.lists(identifiers), st.lists(identifiers), identifiers,
    identifiers, st.dictionaries(st.text(min_size=1).filter(lambda name: not name.startswith(TYPED)), values),
)  # fmt: skip


@given(st.lists(nodes, max_size=5))
@settings(max_examples=100, deadline=None)
def test_a_trace_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, written: list[Node]) -> None:
    path = tmp_path_factory.mktemp("trace") / "rank.0.et"
    write_trace(written, path)
    for node in written:  # a dependency of both kinds is one of control, and one that is named twice is one
        node.data_deps = sorted(node.deps.difference(node.control_deps))
    assert list(read_trace(path)) == written


def test_readers_that_know_one_kind_of_dependencies_see_all(tmp_path: Path) -> None:
    """Chakra's first reader looks at data_deps alone, field 5 of a node."""
    write_trace(trace(), tmp_path / "rank.0.et")
    data, messages = (tmp_path / "rank.0.et").read_bytes(), []
    while data:  # each message after its length, which is one byte here
        messages.append(data[1 : 1 + data[0]])
        data = data[1 + data[0] :]
    read = map(message_classes()[1].FromString, messages[1:])  # the first one is the metadata
    assert {node.id: list(node.data_deps) for node in read} == {1: [], 2: [1], 3: [2], 4: [2], 5: [3, 4]}


def test_a_workload_comes_back_as_it_was_written(tmp_path: Path) -> None:
    made = workload()
    made.groups = {"1": [0, 1, 2, 3]}
    made.traces[0][2].attributes["pg_name"] = "1"
    for other in made.traces[1:]:
        other[2].attributes["pg_name"] = "1"
    made.about = {"assumptions": ["one"]}
    write_workload(made, tmp_path / "w")
    read = read_workload(tmp_path / "w")
    assert (read.traces, read.groups, read.about) == (made.traces, made.groups, made.about)
    assert summary(read)["collectives"] == 2


def without_part(made: Workload) -> None:
    made.traces[1].pop()


def with_cycle(made: Workload) -> None:
    made.traces[2][0].control_deps.append(4)


def with_negative_size(made: Workload) -> None:
    made.traces[2][4].attributes["comm_size"] = -1


def with_other_size(made: Workload) -> None:
    made.traces[2][4].attributes["comm_size"] = 7


def with_send_alone(made: Workload) -> None:
    made.traces[2].append(Node(9, "s", SEND, attributes={"comm_dst": 1, "comm_size": 5}))


def with_send_to_nobody(made: Workload) -> None:
    made.traces[0].append(Node(9, "s", SEND, attributes={"comm_dst": 8}))


def with_tag_of_text(made: Workload) -> None:
    made.traces[0].append(Node(9, "s", SEND, attributes={"comm_dst": 1, "comm_size": 5, "comm_tag": "x"}))


def with_same_id(made: Workload) -> None:
    made.traces[3].append(Node(5, "again", COMP))


def with_unknown_dependency(made: Workload) -> None:
    made.traces[3][1].data_deps.append(77)


def with_other_length(made: Workload) -> None:
    made.traces[0].append(Node(9, "s", SEND, attributes={"comm_dst": 1, "comm_size": 5}))
    made.traces[1].append(Node(9, "r", RECV, attributes={"comm_src": 0, "comm_size": 6}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_part, "rank 0 node 5 is a collective in which rank 1 takes no part"),
        (with_cycle, "rank 2 node 1 waits for itself"),
        (with_negative_size, "rank 2 node 5 has a comm_size of -1"),
        (with_other_size, "rank 2 node 5 is ALL_REDUCE of 7 bytes where rank 0 node 5 is ALL_REDUCE of 1000000"),
        (with_send_alone, "rank 2 node 9 has no receive"),
        (with_send_to_nobody, "rank 0 node 9 names rank 8 as its peer: there are ranks 0 to 3"),
        (with_tag_of_text, "rank 0 node 9 has a comm_tag that is not a whole number"),
        (with_same_id, "rank 3 node 5 exists twice"),
        (with_unknown_dependency, "rank 3 node 2 waits for node 77, which does not exist"),
        (with_other_length, "sends 5 bytes, of which rank 1 receives 6"),
    ],
)
def test_what_cannot_run_is_refused(damage: Callable[[Workload], None], says: str) -> None:
    made = workload()
    damage(made)
    with pytest.raises(UsageError, match=says):
        check_workload(made)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"1": [0, 9]}, "names rank 9, but there are ranks 0 to 3"),
        ({"1": [0, 0]}, "names a rank twice"),
        ({"1": "all"}, "is not a list of ranks"),
        ([1], "is not a JSON object"),
    ],
)
def test_wrong_groups_are_refused(tmp_path: Path, groups: object, says: str) -> None:
    write_workload(workload(), tmp_path / "w")
    (tmp_path / "w" / "comm_group.json").write_text(json.dumps(groups))
    with pytest.raises(UsageError, match=says):
        read_workload(tmp_path / "w")


def test_a_group_without_ranks_is_refused(tmp_path: Path) -> None:
    made = workload()
    for each in made.traces:
        each[2].attributes["pg_name"] = "0"
    write_workload(made, tmp_path / "w")
    read = read_workload(tmp_path / "w")
    assert [len(read.members(node)) for node in read.traces[3] if node.type == COLL] == [4, 4]
    for each in made.traces:
        each[2].attributes["pg_name"] = "tp"
    made.groups = {"tp": [0, 1, 2, 3]}
    write_workload(made, tmp_path / "tp")
    (tmp_path / "tp" / "comm_group.json").rename(tmp_path / "comm_group.json")
    with pytest.raises(UsageError, match=r"is of group 'tp': name its ranks in comm_group.json beside the traces"):
        read_workload(tmp_path / "tp")


def test_wrong_directories_are_refused(tmp_path: Path) -> None:
    for says in ("is not a directory", "has no execution traces"):
        with pytest.raises(UsageError, match=says):
            read_workload(tmp_path / "w")
        (tmp_path / "w").mkdir(exist_ok=True)
    write_trace(trace(), tmp_path / "w" / "a.1.et")
    with pytest.raises(UsageError, match="1 trace but none of rank 0"):
        read_workload(tmp_path / "w")
    write_trace(trace(), tmp_path / "w" / "b.0.et")
    with pytest.raises(UsageError, match="traces of 2 workloads"):
        read_workload(tmp_path / "w")
    write_trace(trace(), tmp_path / "w" / "a.0.et")
    (tmp_path / "w" / "a.1.et").unlink()
    with pytest.raises(UsageError, match="traces of 2 workloads"):
        read_workload(tmp_path / "w")
    (tmp_path / "w" / "a.0.et").rename(tmp_path / "w" / "b.00.et")
    with pytest.raises(UsageError, match=r"two traces of rank 0: keep one of b\.0\.et and b\.00\.et"):
        read_workload(tmp_path / "w")
    with pytest.raises(UsageError, match="cannot be created"):
        write_workload(workload(), tmp_path / "w")


def test_damaged_files_end_in_a_sentence(tmp_path: Path) -> None:
    """10,000 mutations of a trace: each is read, or refused in one sentence that names the file."""
    path = tmp_path / "rank.0.et"
    write_trace(trace(), path)
    whole, draw = path.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            change = draw.randrange(4)
            if change == 0:
                data[place] = draw.randrange(256)
            elif change == 1:
                del data[place : place + draw.randint(1, 9)]
            elif change == 2:
                data[place:place] = draw.randbytes(draw.randint(1, 9))
            else:
                data[place] ^= 1 << draw.randrange(8)
            if not data:
                data = bytearray(b"\0")
        path.write_bytes(data)
        try:
            check_workload(Workload([list(read_trace(path))]))
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 1000


def test_a_file_cannot_ask_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank.0.et"
    path.write_bytes(b"\xff\xff\xff\xff\x0f" + b"x" * 100)
    with pytest.raises(UsageError, match="should have 4294967295 bytes"):
        list(read_trace(path))
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="cut short or damaged at message 0"):
        list(read_trace(path))
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="is empty"):
        list(read_trace(path))


def test_a_file_that_is_cut_short_is_so_at_its_last_message(tmp_path: Path) -> None:
    path = tmp_path / "rank.0.et"
    path.write_bytes(b"\0\x05")  # metadata of no bytes, and the length of the first node
    with pytest.raises(UsageError, match="cut short: message 1 should have 5 bytes"):
        list(read_trace(path))


ALGORITHMS = [
    Algorithms("ring"), Algorithms("tree", pieces=3), Algorithms("double-tree"), Algorithms("halving-doubling"),
    Algorithms("hierarchical", group=2), Algorithms("parameter-server", shards=2), Algorithms("in-network"),
]  # fmt: skip


@pytest.mark.parametrize("algorithms", ALGORITHMS, ids=lambda each: each.all_reduce)
@pytest.mark.parametrize("about", [{}, {"sends": "eager"}], ids=["ours", "eager"])
def test_lowered_workloads_take_the_same_time(algorithms: Algorithms, about: dict[str, str]) -> None:
    """No rank is late, so that sends have nothing to wait for in either kind."""
    made = workload()
    made.about = about
    check_workload(made)
    lowered = lower(made, algorithms)
    check_workload(lowered)
    network = star(8, 1e9)
    times = simulate(made, network, algorithms, iterations=3, latency_s=1e-5)
    same = simulate(lowered, network, Algorithms(), iterations=3, latency_s=1e-5)
    assert same.end_s[:, :4] == pytest.approx(times.end_s)
    assert summary(lowered)["collectives"] == 0


def test_ranks_that_wait_for_each_other_are_named() -> None:
    made = Workload([[], []])
    for rank in range(2):
        attributes = {"comm_src": 1 - rank, "comm_size": 1}
        made.traces[rank] = [
            Node(1, "r", RECV, attributes=attributes),
            Node(2, "s", SEND, [1], attributes={"comm_dst": 1 - rank, "comm_size": 1}),
        ]
    check_workload(made)
    for about in ({}, {"sends": "eager"}):
        made.about = about
        with pytest.raises(UsageError, match=r"^rank 0( node 1)? waits for ever"):
            simulate(made, star(2, 1e9), Algorithms())


def test_in_traces_of_other_programs_sends_wait_for_no_receive(tmp_path: Path) -> None:
    """Each rank sends first and receives then, as in the custom collectives that ASTRA-sim ships with."""
    made = Workload([])
    for rank in range(4):
        to, source = {"comm_dst": (rank + 1) % 4}, {"comm_src": (rank - 1) % 4}
        nodes = []
        for i in range(0, 6, 3):
            nodes += [
                Node(i, "send", SEND, [i - 1] if i else [], attributes=to | {"comm_size": 1_000_000}),
                Node(i + 1, "receive", RECV, [i], attributes=source | {"comm_size": 1_000_000}),
                Node(i + 2, "add", NodeType.COMP, [i + 1], duration_us=1000 * (rank == 2)),
            ]
        made.traces.append(nodes)
    check_workload(made)
    with pytest.raises(UsageError, match="rank 0 waits for ever"):
        simulate(made, star(4, 1e9), Algorithms())
    write_workload(made, tmp_path / "w")
    assert not read_workload(tmp_path / "w").is_eager
    (tmp_path / "w" / "workload.json").unlink()
    found = read_workload(tmp_path / "w")
    simulated = simulate(lower(found, Algorithms()), star(4, 1e9), Algorithms(), iterations=2)
    # two messages of 8 ms, and what rank 2 adds between them
    assert simulated.end_s[0] == pytest.approx([0.016, 0.016, 0.018, 0.017])
    path = critical_path(found, simulate(found, star(4, 1e9), Algorithms()))
    assert (path.compute_s, path.communication) == (
        pytest.approx(0.002),
        {"send": pytest.approx(0.016), "receive": 0.0},
    )
    assert len([one for one in operations(found) if one.peer >= 0]) == 8


@pytest.mark.parametrize("name", PROFILES)
def test_buckets_are_those_of_ddp(name: str) -> None:
    torch = pytest.importorskip("torch")
    profile = profile_named(name)
    tensors = [tensor for layer in reversed(profile.layers) for tensor in reversed(layer)]
    meta = [torch.empty(tensor.parameters, device="meta") for tensor in tensors]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(meta, [2**20, 25 * 2**20])
    expected = [sum(4 * tensors[i].parameters for i in bucket) for bucket in indices]
    found = list(buckets(profile))
    assert [size for size, _ in found] == expected
    assert sum(size for size, _ in found) == 4 * profile.parameters
    made = model_workload(profile, 2)
    assert sum(made.traces[0][i].duration_us for i in range(len(made.traces[0]))) == pytest.approx(
        profile.compute_s * 1e6, abs=len(found) + 1
    )


def collectives(*found: tuple[Collective, int]) -> Workload:
    nodes = [
        Node(
            number,
            f"c{number}",
            NodeType.COMM_COLL,
            attributes={"is_cpu_op": False, "comm_type": int(kind), "comm_size": size},
        )
        for number, (kind, size) in enumerate(found, 1)
    ]
    return Workload([nodes, [replace(node) for node in nodes]])


def test_what_a_backend_carries_out_as_another_kind_moves_its_bytes(tmp_path: Path) -> None:
    """As gloo does: a reduce-scatter that is an all-reduce sends twice the bytes between two ranks."""
    called, carried = (collectives((Collective.REDUCE_SCATTER, 8_000_000)) for _ in range(2))
    for trace in carried.traces:
        trace[0].attributes[CARRIED_OUT_AS] = int(Collective.ALL_REDUCE)
    write_workload(carried, tmp_path / "carried")
    carried = read_workload(tmp_path / "carried")
    assert kind_of(carried.traces[0][0]) == Collective.REDUCE_SCATTER
    reduced = collectives((Collective.ALL_REDUCE, 8_000_000))
    times = [simulate(made, star(2, 1e9), Algorithms()).iteration_s for made in (called, carried, reduced)]
    assert times == pytest.approx([0.032, 0.064, 0.064])
    sent = [
        sum(size_of(node) for node in lower(made, Algorithms()).traces[0] if node.type == NodeType.COMM_SEND)
        for made in (called, carried, reduced)
    ]
    assert sent == [4_000_000, 8_000_000, 8_000_000]
    files = [astra_sim_1.workload_file(made)[0] for made in (carried, reduced)]
    assert files[0] == files[1]


def test_a_kind_that_is_none_is_refused() -> None:
    made = collectives((Collective.REDUCE_SCATTER, 8_000_000))
    made.traces[0][0].attributes[CARRIED_OUT_AS] = 99
    with pytest.raises(UsageError, match="has a carried_out_as that is no kind of collective"):
        simulate(made, star(2, 1e9), Algorithms())


GATHER, SCATTER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE


@pytest.mark.parametrize(
    ("found", "sizes", "own"),
    [
        ([(GATHER, 500), (GATHER, 500), (SCATTER, 1000)], [250, 250, 1000], 0),  # FSDP
        ([(GATHER, 250), (SCATTER, 1000)], [125, 1000], 0),  # parameters of 2 bytes, gradients of 4
        ([(GATHER, 501), (SCATTER, 1002)], [251, 1002], 0),  # padded
        ([(GATHER, 500), (GATHER, 8), (SCATTER, 1000)], [250, 8, 1000], 1),  # and a metric of each rank
        ([(GATHER, 300), (GATHER, 200), (SCATTER, 600), (SCATTER, 410)], [150, 100, 600, 410], 0),  # buckets of ZeRO
        ([(GATHER, 300), (GATHER, 200), (REDUCE, 700), (REDUCE, 300)], [150, 100, 700, 300], 0),  # ZeRO 1
        ([(GATHER, 300), (REDUCE, 5000)], [300, 5000], 1),  # features of a contrastive loss
        ([(GATHER, 300)], [300], 1),
    ],
)
def test_all_gathers_of_shards_are_told_from_those_of_a_ranks_own_data(
    found: list[tuple[Collective, int]], sizes: list[int], own: int
) -> None:
    scaled = scale(collectives(*found), Scaling(4))
    assert [size_of(node) for node in scaled.traces[3]] == sizes
    said = [text for text in scaled.about["assumptions"] if "of each rank's own data" in text]
    assert [text.split()[0] for text in said] == [str(own)] * bool(own)
    assert any("of shards" in text for text in scaled.about["assumptions"]) == (
        own < sum(kind == GATHER for kind, _ in found)
    )


def test_a_workload_with_ranks_that_differ_keeps_its_number_of_workers() -> None:
    different = workload()
    different.traces[2][4].attributes["comm_size"] = 7
    with pytest.raises(UsageError, match="ranks 0 and 2 take part in different collectives"):
        scale(different, Scaling(8))
    original = workload()
    assert scale(original, Scaling(compute=2)).traces[0][0].duration_us == 2000
    assert original.traces[0][0].duration_us == 1000


@pytest.mark.parametrize("algorithms", ALGORITHMS, ids=lambda each: each.all_reduce)
def test_lowered_nodes_wait_for_nodes_of_their_own_rank(algorithms: Algorithms) -> None:
    """A dependency names a node that has to do with the message: of its collective, or before it."""
    made = workload(4)
    for rank, nodes_ in enumerate(made.traces):  # ids that no other rank has
        for node in nodes_:
            node.id += 1000 * rank
            node.control_deps = [dep + 1000 * rank for dep in node.control_deps]
            node.data_deps = [dep + 1000 * rank for dep in node.data_deps]
    lowered = lower(made, algorithms)
    check_workload(lowered)
    for rank, nodes_ in enumerate(lowered.traces[:4]):
        assert all(1000 * rank <= dep < 1000 * rank + 1000 for node in nodes_ for dep in node.deps)


def test_a_late_rank_delays_both_forms_alike() -> None:
    for algorithms in ALGORITHMS:
        made = workload()
        made.traces[3][0].duration_us = 50_000
        check_workload(made)
        lowered = lower(made, algorithms)
        check_workload(lowered)
        times = simulate(made, star(8, 1e9), algorithms, iterations=2)
        same = simulate(lowered, star(8, 1e9), Algorithms(), iterations=2)
        assert same.end_s[:, :4] == pytest.approx(times.end_s)


def test_the_critical_path_goes_through_the_last_rank() -> None:
    made = Workload([[], [], []])
    for rank in range(3):
        collective = {"comm_type": int(Collective.ALL_REDUCE), "comm_size": 3_000_000}
        made.traces[rank] = [
            Node(1, "slow" if rank == 2 else "fast", NodeType.COMP, duration_us=50_000 if rank == 2 else 1_000),
            Node(2, "reduce", NodeType.COMM_COLL, [1], attributes=dict(collective)),
            Node(3, "beside", NodeType.COMP, [1], duration_us=2_000),
            Node(4, "after", NodeType.COMP, [2, 3], duration_us=7_000),
        ]
    check_workload(made)
    simulated = simulate(made, star(3, 1e9), Algorithms())
    path = critical_path(made, simulated)
    # 50 ms at rank 2, 4 steps of 1 MB at 1 Gbit/s, 7 ms at any rank
    assert (path.compute_s, path.communication_s) == pytest.approx((0.057, 0.032))
    assert path.communication == {"reduce": pytest.approx(0.032)}
    assert simulated.iteration_s == pytest.approx(path.compute_s + path.communication_s)
    assert simulated.link_bytes == pytest.approx(4_000_000)
    # two ranks at a host: the ring has one link out of each host; on one host it needs no link
    shared = simulate(made, star(2, 1e9), Algorithms(), ranks_per_host=2)
    assert shared.link_bytes == pytest.approx([4_000_000] * 4)
    alone = simulate(made, star(1, 1e9), Algorithms(), ranks_per_host=4)
    assert alone.iteration_s == pytest.approx(0.059)
    assert not alone.link_bytes.any()
    assert critical_path(Workload([[]]), simulate(Workload([[]]), star(1, 1e9), Algorithms())).compute_s == 0


def test_a_rank_that_begins_earlier_makes_no_longer_path() -> None:
    """Rank 0 begins its next iteration while rank 1 still computes: an iteration takes what the slower rank does."""
    message = {"comm_size": 0, "comm_tag": 0}
    first = [Node(1, "a", COMP, duration_us=30_000), Node(2, "s", SEND, [1], attributes=message | {"comm_dst": 1})]
    second = [
        Node(1, "r", RECV, attributes=message | {"comm_src": 0}),
        Node(2, "b", COMP, [1], duration_us=30_000),
        Node(3, "c", COMP, [2], duration_us=10_000),
    ]
    made = Workload([first, second])
    simulated = simulate(made, star(2, 1e9), Algorithms(), iterations=4)
    assert simulated.iteration_s == pytest.approx(0.04)
    assert critical_path(made, simulated).compute_s == pytest.approx(0.04)
    once = simulate(made, star(2, 1e9), Algorithms())
    assert critical_path(made, once).compute_s == once.iteration_s == pytest.approx(0.07)


def test_a_rank_that_a_broadcast_does_not_need_is_not_on_its_path() -> None:
    """Rank 2 has ended when rank 3, which rank 1 serves, begins."""
    made = Workload([])
    for rank in range(4):
        made.traces.append([
            Node(1, "late" if rank == 3 else "soon", COMP, duration_us=10_000 if rank == 3 else 1_000),
            Node(2, "spread", COLL, [1], attributes={"comm_type": int(Collective.BROADCAST), "comm_size": 125_000}),
            Node(3, "then", COMP, [2], duration_us=20_000 if rank == 2 else 1),
        ])  # fmt: skip
    simulated = simulate(made, star(4, 1e9), Algorithms())
    path = critical_path(made, simulated)
    # 1 ms to either child, which share the root's link
    assert (path.compute_s, path.communication) == (pytest.approx(0.021), {"spread": pytest.approx(0.002)})
    assert simulated.iteration_s == pytest.approx(0.023)


@pytest.mark.parametrize("about", [{}, {"sends": "eager"}], ids=["ours", "eager"])
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_critical_path_is_as_long_as_its_iteration(about: dict[str, str], seed: int) -> None:
    draw = random.Random(seed)
    made = Workload([[] for _ in range(4)], about=about)

    def add(rank: int, name: str, kind: NodeType, **attributes: int) -> None:
        trace = made.traces[rank]
        deps = [number for number in range(1, len(trace) + 1) if draw.random() < 0.4]
        length = draw.randint(0, 3000) if kind == COMP else 0
        trace.append(Node(len(trace) + 1, name, kind, deps, duration_us=length, attributes=dict(attributes)))

    for step in range(12):
        size, (source, destination) = draw.randint(0, 200_000), draw.sample(range(4), 2)
        what = draw.choice(["compute", "compute", "collective", "message"])
        if what == "collective":
            kind = draw.choice([Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_TO_ALL, Collective.REDUCE])
            for rank in range(4):
                add(rank, f"c{step}", COLL, comm_type=int(kind), comm_size=size)
        elif what == "message":
            add(source, f"m{step}", SEND, comm_dst=destination, comm_size=size, comm_tag=step)
            add(destination, f"m{step}", RECV, comm_src=source, comm_size=size, comm_tag=step)
        else:
            add(source, f"w{step}", COMP)
    check_workload(made)
    for iterations in (1, 2, 4):
        simulated = simulate(made, leaf_spine(4, 1e9, 2, 2.0), Algorithms(), iterations=iterations, latency_s=1e-4)
        path = critical_path(made, simulated)
        length_s = np.diff(simulated.end_s.max(axis=1), prepend=0.0)[-1]
        assert path.compute_s + path.communication_s == pytest.approx(length_s)
        assert min([0.0, *path.communication.values()]) == 0.0


SPLITS = ([0, 600_000, 400_000], [100_000, 0, 0], [0, 2_000_000, 0])


def uneven() -> Workload:
    made = Workload([])
    for splits in SPLITS:
        attributes = {"comm_type": int(Collective.ALL_TO_ALL), "comm_size": sum(splits), "comm_split_bytes": splits}
        made.traces.append([Node(1, "c", COMP, duration_us=1000), Node(2, "experts", COLL, [1], attributes=attributes)])
    check_workload(made)
    return made


@pytest.mark.parametrize("about", [{}, {"sends": "eager"}], ids=["ours", "eager"])
def test_an_uneven_all_to_all_sends_its_bytes(tmp_path: Path, about: dict[str, str]) -> None:
    made = uneven()
    made.about = about
    write_workload(made, tmp_path / "w")
    read = read_workload(tmp_path / "w")
    assert read.traces == made.traces
    network = star(3, 1e9)
    simulated = simulate(read, network, Algorithms(), iterations=2, latency_s=1e-5)
    assert simulated.link_bytes == pytest.approx([1e6, 1e5, 2e6, 1e5, 2.6e6, 4e5])
    # into rank 1 go 2.6 MB; what rank 0 sends shares that link with rank 2
    assert simulated.iteration_s == pytest.approx(0.001 + 2.6e6 * 8 / 1e9 + 1e-5)
    lowered = lower(read, Algorithms())
    check_workload(lowered)
    assert summary(lowered)["message_bytes"] == 3_100_000
    same = simulate(lowered, network, Algorithms(), latency_s=1e-5)
    assert same.end_s == pytest.approx(simulated.end_s[:1])
    bigger = scale(read, Scaling(parameters=2))
    assert [size_of(trace[1]) for trace in bigger.traces] == [2_000_000, 200_000, 4_000_000]
    with pytest.raises(UsageError, match="is an all-to-all with bytes for each rank"):
        scale(read, Scaling(workers=9, data_parallel=("all",)))
    for export in (astra_sim_1.workload_file, param):
        with pytest.raises(UsageError, match=r"^rank\.0\.et node 2 is an all-to-all with other bytes for each rank"):
            export(read)
    with pytest.raises(UsageError, match="which ASTRA-sim does not have: lower the workload first"):
        write_astra_sim(read, network, "ring", 0.0, tmp_path / "x")


def test_ranks_without_split_sizes_send_equal_parts() -> None:
    made = uneven()
    del made.traces[1][1].attributes["comm_split_bytes"]
    made.traces[1][1].attributes["comm_size"] = 300_000
    check_workload(made)
    sent = simulate(made, star(3, 1e9), Algorithms()).link_bytes
    assert sent == pytest.approx([1e6, 2e5, 2e6, 1e5, 2.6e6, 5e5])
    even = collectives((Collective.ALL_TO_ALL, 500))
    even.traces[0][0].attributes["comm_split_bytes"] = [250, 250]
    parts = [(rank, trace[0]) for rank, trace in enumerate(even.traces)]
    assert not split_bytes(parts)
    for _, node in parts:
        node.attributes["comm_split_bytes"] = [300, 200]
    assert split_bytes(parts) == ((300, 200),) * len(parts), "two sizes are enough"


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"comm_split_bytes": [1, 2]}, "rank 1 node 2 has a comm_split_bytes that is not a list of 3 numbers of bytes"),
        ({"comm_split_bytes": [1, -2, 3]}, "rank 1 node 2 has a comm_split_bytes that is not a list"),
        ({"comm_split_bytes": "1, 2, 3"}, "rank 1 node 2 has a comm_split_bytes that is not a list"),
        ({"comm_split_bytes": [1, 2, 3]}, "has a comm_split_bytes of 6 bytes in all, but a comm_size of 100000"),
        ({"comm_type": 0}, "rank 1 node 2 has comm_split_bytes, which is for an all-to-all"),
    ],
)
def test_split_sizes_that_do_not_fit_are_refused(attributes: dict[str, object], says: str) -> None:
    made = uneven()
    made.traces[1][1].attributes |= attributes  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=says):
        check_workload(made)
    for trace in made.traces:
        trace[1].attributes = {"comm_type": int(Collective.ALL_TO_ALL), "comm_size": 5 + len(trace[0].name)}
    made.traces[2][1].attributes["comm_size"] = 7
    with pytest.raises(
        UsageError, match=r"where rank 0 node 2 is ALL_TO_ALL of 6: give the bytes to each rank \(comm_spl"
    ):
        check_workload(made)
