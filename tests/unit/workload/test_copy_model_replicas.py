"""More replicas of a model: groups that are copied, groups that grow, and times that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.topologies import star
from ringtap.workload.transformer import TransformerLayout, layout_workload
from ringtap.workload.workload import Workload, check_workload, read_workload, size_of, write_workload

pytestmark = pytest.mark.computes

COMP, SEND, RECV, COLL = NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL
MB = 1_000_000  # at 1 Gbit/s: 8 ms
TENSOR, DATA = "mesh_tp", "mesh_dp"


def collective(
    number: int, deps: list[int], group: str, size: int = MB, kind: Collective = Collective.ALL_REDUCE
) -> Node:
    return Node(number, kind.name, COLL, deps, attributes={"comm_type": int(kind), "comm_size": size, "pg_name": group})


def tensor_parallel(described: bool = True) -> Workload:
    """Two replicas of two ranks: 10 ms, an all-reduce of a replica, 20 ms, and one of the gradients."""
    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
    traces = [
        [
            Node(1, "forward", COMP, duration_us=10_000),
            collective(2, [1], "12"[rank // 2]),
            Node(3, "backward", COMP, [2], duration_us=20_000),
            collective(4, [3], "34"[rank % 2]),
        ]
        for rank in range(4)
    ]
    kinds = {"1": [TENSOR], "2": [TENSOR], "3": [DATA], "4": [DATA]}
    return Workload(traces, groups, {"group_descriptions": kinds} if described else {})


def pipeline() -> Workload:
    """Two replicas with a stage on each of two ranks: 10 ms, a message, 5 ms, and all-reduces of the stages."""
    message = {"comm_size": MB, "comm_tag": 3}
    traces = []
    for rank in range(4):
        if rank < 2:
            nodes = [Node(1, "a", COMP, duration_us=10_000), Node(2, "s", SEND, [1], attributes={"comm_dst": rank + 2})]
        else:
            nodes = [Node(2, "r", RECV, attributes={"comm_src": rank - 2}), Node(3, "b", COMP, [2], duration_us=5_000)]
        node = next(each for each in nodes if each.type in (SEND, RECV))
        node.attributes |= message
        traces.append([*nodes, collective(4, [2 if rank < 2 else 3], "12"[rank // 2])])
    return Workload(traces, {"1": [0, 1], "2": [2, 3]})


def iteration_s(workload: Workload, ranks_per_host: int = 1) -> float:
    check_workload(workload)
    network = star(workload.ranks // ranks_per_host, 1e9)
    return simulate(workload, network, Algorithms(), ranks_per_host=ranks_per_host).iteration_s


def test_tensor_parallel_groups_are_copied_and_data_parallel_ones_grow() -> None:
    """An all-reduce among 2 ranks sends its bytes once, among 4 ranks 3/2 times."""
    before = tensor_parallel()
    scaled = scale(before, Scaling(8))
    assert [ranks for name, ranks in sorted(scaled.groups.items())] == [
        [0, 1], [2, 3], [0, 2, 4, 6], [1, 3, 5, 7], [4, 5], [6, 7],
    ]  # fmt: skip
    assert scaled.about["group_descriptions"] == {
        "1": [TENSOR], "2": [TENSOR], "3": [DATA], "4": [DATA], "5": [TENSOR], "6": [TENSOR],
    }  # fmt: skip
    assert iteration_s(before) == pytest.approx(0.010 + 0.008 + 0.020 + 0.008)
    assert iteration_s(scaled) == pytest.approx(0.010 + 0.008 + 0.020 + 0.012)
    # a replica at each host, whose two ranks share its link
    assert iteration_s(scaled, 2) == pytest.approx(0.010 + 0.020 + 0.024)
    assert any(
        "4 replicas of the model, with 2 ranks each, instead of 2" in text for text in scaled.about["assumptions"]
    )
    # back again, and to as many ranks as there are
    for fewer in (scale(scaled, Scaling(4)), scale(before, Scaling(4))):
        assert (fewer.traces, fewer.groups) == (before.traces, before.groups)
    assert scale(scaled, Scaling(6)).groups["3"] == [0, 2, 4]
    scaled.groups["99"] = [0, 7]  # which no collective has
    assert scale(scaled, Scaling(4)).groups == before.groups


def test_messages_stay_within_their_replica() -> None:
    scaled = scale(pipeline(), Scaling(8, data_parallel=("1",)))
    assert scaled.groups == {"1": [0, 1, 4, 5], "2": [2, 3, 6, 7]}
    assert [node.attributes["comm_dst"] for trace in scaled.traces for node in trace if node.type == SEND] == [
        2,
        3,
        6,
        7,
    ]
    assert iteration_s(pipeline()) == pytest.approx(0.010 + 0.008 + 0.005 + 0.008)
    assert iteration_s(scaled) == pytest.approx(0.010 + 0.008 + 0.005 + 0.012)


def test_a_slow_rank_stays_as_slow() -> None:
    """Each further rank does what one of the first ones does, of which rank 2 is the slowest."""
    traces = [[Node(1, "c", COMP, duration_us=10_000 + 1000 * rank), collective(2, [1], "")] for rank in range(3)]
    for trace in traces:
        del trace[1].attributes["pg_name"]
    scaled = scale(Workload(traces), Scaling(6))
    assert [trace[0].duration_us for trace in scaled.traces] == [10_000, 11_000, 12_000] * 2
    assert iteration_s(scaled) == pytest.approx(0.012 + 0.008 * 10 / 6)
    assert scaled.about["assumptions"] == [
        "scaled to 6 ranks: further ranks do what the first 3 do, replica by replica; all collectives are data-parallel"
    ]


def test_shards_are_those_of_their_group() -> None:
    """Of 1 MB that two ranks of a data-parallel group share, four ranks have 250 kB each; activations stay."""
    before = tensor_parallel()
    for rank, nodes in enumerate(before.traces):
        nodes.append(collective(5, [4], "34"[rank % 2], MB // 2, Collective.ALL_GATHER))
        nodes.append(collective(6, [5], "34"[rank % 2], MB, Collective.REDUCE_SCATTER))
        nodes.append(collective(7, [6], "12"[rank // 2], MB // 2, Collective.ALL_GATHER))
        nodes.append(collective(8, [7], "12"[rank // 2], MB, Collective.REDUCE_SCATTER))
    scaled = scale(before, Scaling(8))
    for nodes in scaled.traces:
        assert [size_of(node) for node in nodes[4:]] == [MB // 4, MB, MB // 2, MB]
    # each of the two ranks of a replica has one
    assert any(text.startswith("2 all-gathers of shards") for text in scaled.about["assumptions"])


def hybrid(described: str) -> Workload:
    """The same groups, of hybrid sharding."""
    made = tensor_parallel()
    made.about["group_descriptions"] |= {"1": [described], "2": [described]}
    return made


def test_what_cannot_be_told_is_refused() -> None:
    listed = r"1 \[0, 1\] and 1 more like it; 3 \[0, 2\] and 1 more like it"
    with pytest.raises(UsageError, match=f"cannot be told which collectives are data-parallel: there are {listed}"):
        scale(tensor_parallel(described=False), Scaling(8))
    for name in ("3", "4"):
        named = scale(tensor_parallel(described=False), Scaling(8, data_parallel=(name,)))
        assert named.groups == scale(tensor_parallel(), Scaling(8)).groups
    assert scale(hybrid("mesh_shard"), Scaling(8, data_parallel=(DATA,))).groups["5"] == [4, 5]
    for workload, wanted, says in (
        (tensor_parallel(), ("9",), r"--data-parallel 9: no such group; there are 1 \[0, 1\] \(mesh_tp\) and 1 more"),
        (hybrid("mesh_dp_shard"), (), r"does not have the same ranks of all 4 replicas"),
        (hybrid("undefined"), (), "cannot be told"),
        (pipeline(), (), "cannot be told"),
    ):
        with pytest.raises(UsageError, match=says):
            scale(workload, Scaling(8, data_parallel=wanted))
    with pytest.raises(UsageError, match="7 ranks are no whole replicas of the model, which have 2 each"):
        scale(tensor_parallel(), Scaling(7))
    alone = tensor_parallel()
    alone.about["group_descriptions"] |= {"3": ["mesh_pp"], "4": ["mesh_pp"]}
    with pytest.raises(UsageError, match="all ranks belong to one replica of the model"):
        scale(alone, Scaling(8))


@pytest.mark.parametrize(("descriptions", "is_scaled"), [
    (["default_pg"], True), (["default_pg", "mesh_dp"], True), ([TENSOR], False), (["default_pg", TENSOR], False),
    (["DATA_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"], False), (["EXPERT_DATA_PARALLEL_GROUP"], True),
])  # fmt: skip
def test_collectives_of_all_ranks_are_data_parallel_unless_a_description_denies_it(
    descriptions: list[str], is_scaled: bool
) -> None:
    traces = [[Node(1, "c", COMP, duration_us=1), collective(2, [1], "")] for _ in range(2)]
    workload = Workload(traces, {}, {"group_descriptions": {"": descriptions}})
    if is_scaled:
        assert scale(workload, Scaling(4)).ranks == 4
    else:
        with pytest.raises(UsageError, match=r"one replica|cannot be told"):
            scale(workload, Scaling(4))
        assert scale(workload, Scaling(4, data_parallel=("all",))).ranks == 4  # you know better


def test_other_programs_have_to_be_asked_for(tmp_path: Path) -> None:
    """Their collectives of all ranks may be those of a model that all ranks share."""
    traces = [[Node(1, "c", COMP, duration_us=1000), collective(2, [1], "")] for _ in range(2)]
    made = Workload(traces, {}, {"sends": "eager"})
    with pytest.raises(UsageError, match=r"cannot be told which collectives are .* there are all \[0, 1\]; name one"):
        scale(made, Scaling(4))
    scaled = scale(made, Scaling(4, data_parallel=("all",)))
    assert iteration_s(scaled) == pytest.approx(0.001 + 0.012)


def test_replicas_that_differ_are_refused() -> None:
    other = tensor_parallel()
    for rank in (2, 3):
        other.traces[rank][1].attributes["comm_size"] = 8
    with pytest.raises(UsageError, match="ranks 0 and 2 take part in different collectives"):
        scale(other, Scaling(8))
    uneven = Workload([*tensor_parallel().traces, [collective(4, [], "5")]], {**tensor_parallel().groups, "5": [4]},
                      tensor_parallel().about)  # fmt: skip
    with pytest.raises(UsageError, match="replicas of the model have 2 and 1 rank"):
        scale(uneven, Scaling(8))


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_scaled_layouts_take_as_long_as_larger_ones(tensor: int, stages: int) -> None:
    """A layout writes the groups and messages of more replicas by itself."""
    layout = TransformerLayout(
        layers=4, hidden_size=64, feed_forward_size=256, attention_heads=4, vocabulary_size=512, sequence_length=32,
        tensor_parallel=tensor, pipeline_parallel=stages, data_parallel=2, micro_batch_size=1, micro_batches=3,
        schedule="1f1b", activation_bytes=2, gradient_bytes=4, recompute=True, flop_per_s=1e10, utilisation=0.5,
        optimizer_s=0.0, gpus_per_node=None,
    )  # fmt: skip
    small = layout_workload(layout, "small")
    with pytest.raises(UsageError, match="change batch, model and ranks in its TOML file"):
        scale(small, Scaling(8))
    del small.about["layout"]
    wanted = next(name for name, ranks in small.groups.items() if ranks == [0, tensor])
    scaled = scale(small, Scaling(6 * tensor * stages, data_parallel=(wanted,)))
    large = layout_workload(replace(layout, data_parallel=6), "large")
    assert sorted(len(ranks) for ranks in scaled.groups.values()) == sorted(len(each) for each in large.groups.values())
    assert iteration_s(scaled) == pytest.approx(iteration_s(large), rel=1e-9)
    assert iteration_s(scaled) > 1.01 * iteration_s(small)


def test_the_command_takes_names_and_descriptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_workload(tensor_parallel(described=False), tmp_path / "w")
    arguments = ["workload", "scale", str(tmp_path / "w"), "--workers", "64", "-o", str(tmp_path / "large")]
    assert main(arguments) == 2
    assert "--data-parallel" in capsys.readouterr().err
    assert main([*arguments, "--data-parallel", "3"]) == 0
    assert "32 replicas of the model, with 2 ranks each, instead of 2" in capsys.readouterr().out
    assert read_workload(tmp_path / "large").groups["3"] == list(range(0, 64, 2))
    again = [*arguments[:3], "--compute", "2x", "-o", str(tmp_path / "x"), "--data-parallel", "3"]
    assert main(again) == 2
    assert "--data-parallel goes with --workers" in capsys.readouterr().err


def test_a_part_of_the_replicas_is_copied() -> None:
    """Of two replicas on ranks 0, 2 and 1, 3, the first one is copied: to ranks 4 and 5."""
    scaled = scale(pipeline(), Scaling(6, data_parallel=("1",)))
    assert scaled.groups == {"1": [0, 1, 4], "2": [2, 3, 5]}
    assert [node.attributes["comm_dst"] for trace in scaled.traces for node in trace if node.type == SEND] == [2, 3, 5]
    assert iteration_s(scaled) == pytest.approx(0.010 + 0.008 + 0.005 + 0.008 * 4 / 3)
