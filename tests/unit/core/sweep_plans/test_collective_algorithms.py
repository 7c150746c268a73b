"""Collectives of a plan: the series that they make, the words that jobs get, and what is refused."""

from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep.host_roles import testbed_roles as roles_of
from ringtap.agents.sweep.job_launch_commands import check_collectives, processes
from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.sweep_estimate import estimate, layout, resolved, series_names
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.collective_algorithms import COLLECTIVES
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from ringtap.slurm.read_array_parts import planned_series

pytestmark = pytest.mark.computes


def plan_of(collective: Any, servers: list[str] | None = None, **tables: Any) -> SweepPlan:
    sweep = {"loads": [0], "traffic": ["iperf"], "collective": collective, **tables.pop("sweep", {})}
    models = tables.pop("models", [{"name": "vgg16"}])
    testbed = {"configuration": "A", "servers": servers or []}
    return load_plan({"sweep": sweep, "models": models, **({"testbed": testbed} | tables)})


def test_all_collectives_make_a_matrix_of_series() -> None:
    plan = plan_of(list(COLLECTIVES), ["S4", "S5"], models=[{"name": "vgg16"}, {"name": "resnet50"}])
    names = series_names(plan)
    assert len(names) == len(set(names)) == 2 * 8
    assert names[:2] == ["vgg16-iperf-ring", "vgg16-iperf-halving-doubling"]
    assert planned_series(resolved(plan)) == names
    assert layout(plan)[0].hosts == ("S0", "S1", "S2", "S3", "S4", "S5")
    check_collectives(plan)
    assert plan_of([], []).models[0].label == "vgg16"


def test_several_topologies_make_a_matrix_with_collectives() -> None:
    testbed = {
        "topology": ["star", "leaf-spine"], "oversubscription": 2, "configuration": "custom", "servers": ["S3"],
        "hosts": ["S0", "S1", "S2", "S3"], "workers": ["S0", "S2"], "cross_from": "S1", "cross_to": "S0",
    }  # fmt: skip
    plan = plan_of(["ring", "in-network"], models=[{"name": "vgg16"}, {"name": "resnet50"}], testbed=testbed)
    names = series_names(plan)
    assert len(names) == len(set(names)) == 2 * 2 * 2
    assert names[0] == "vgg16-iperf-ring-star"
    assert planned_series(resolved(plan)) == names
    assert plan.models[0].label == "vgg16 by ring on star"
    star, leaves = plan.parts()
    assert [layout(part)[0].topology for part in (star, leaves, plan)] == ["star", "leaf-spine", "star"]
    assert (layout(star)[0].oversubscription, layout(leaves)[0].oversubscription) == (1.0, 2.0)
    assert [point["series"] for point in estimate(plan)] == [name for name in names for _ in plan.loads]
    network = roles_of(*layout(leaves), "")
    assert (network.aggregator, network.interface["spine0"]) == ("spine0", "to-leaf0")
    assert plan_of([], [], testbed={"topology": ["star"]}).models[0].label == "vgg16"


@pytest.mark.parametrize(
    ("testbed", "said"),
    [
        ({"topology": ["star", "star"]}, "must be a topology, or a list of different ones"),
        ({"topology": []}, "must be a topology, or a list of different ones"),
        ({"topology": ["star", "ring"], "per_leaf": 3}, 'per_leaf is for topology = "leaf-spine"'),
        ({"topology": ["star", "ring"]}, "'in-network' needs a switch that adds gradients"),
    ],
)
def test_topologies_that_a_plan_cannot_have(testbed: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_of("in-network", testbed=testbed)


def test_jobs_get_the_words_and_servers_run_where_the_plan_says() -> None:
    numbers = {"collective_pieces": 4, "collective_group": 2}
    plan = plan_of(list(COLLECTIVES), ["S4", "S1"], sweep=numbers)
    spec, roles = layout(plan)
    hosts = LocalHosts(list(spec.hosts))
    try:
        found = {
            model.collective: processes(plan, model, roles_of(spec, roles, ""), hosts, 29500) for model in plan.models
        }
    finally:
        hosts.close()
    words = {name: job[0].environment["RINGTAP_COLLECTIVE"] for name, job in found.items()}
    assert words == {
        "ring": "ring",
        "halving-doubling": "halving-doubling",
        "tree": "tree pieces=4",
        "double-tree": "double-tree pieces=4",
        "hierarchical": "hierarchical group=2",
        "parameter-server": "parameter-server",
        "sharded-parameter-server": "parameter-server shards=2",
        "in-network": "in-network pieces=4",
    }
    beside = {name: [process.host for process in job[4:]] for name, job in found.items() if len(job) > 4}
    assert beside == {"parameter-server": ["S4"], "sharded-parameter-server": ["S4", "S1"], "in-network": ["switch"]}
    switch, second = found["in-network"][4], found["sharded-parameter-server"][5]
    assert switch.environment["GLOO_SOCKET_IFNAME"] == "bridge"
    assert "RINGTAP_COLLECTIVE" not in switch.environment
    assert " ".join(second.command).endswith("parameter-server --shards 2 --workers 4 --number 1")


@pytest.mark.parametrize(
    ("collective", "tables", "says"),
    [
        (["double_tree"], {}, r"'double_tree', which is unknown: did you mean 'double-tree'\? choose ring"),
        ([3], {}, "is not a list of texts"),
        ("parameter-server", {}, r"needs a server: add, for example, servers = \[\"S4\"\] to \[testbed\]"),
        ("sharded-parameter-server", {"servers": ["S4"]}, "needs two servers at least"),
        ("parameter-server", {"servers": ["S4", "S4"]}, "testbed.servers names a host twice"),
        ("ring", {"sweep": {"collective_pieces": 2}}, "is for tree, double-tree, in-network"),
        ("ring", {"models": [{"name": "vgg16", "framework": "horovod"}]}, "brings collectives of its own"),
    ],
)
def test_what_a_plan_cannot_have_is_refused(collective: Any, tables: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_of(collective, **tables)


def test_only_a_testbed_has_a_switch_that_adds() -> None:
    hosts = [{"name": name, "training": f"10.0.0.{number}"} for number, name in enumerate("abc", 1)]
    cluster = {"reach": "ssh", "workers": ["a", "b"], "servers": ["c"]}
    keys = {"sweep": {"loads": [0], "capacity": "10gbit"}, "models": [{"name": "vgg16"}], "hosts": hosts}
    plan = load_plan(keys | {"sweep": keys["sweep"] | {"collective": "parameter-server"}, "cluster": cluster})  # type: ignore[operator]
    assert plan.topology.servers == ("c",)
    with pytest.raises(UsageError, match="needs a switch that adds gradients"):
        load_plan(keys | {"sweep": keys["sweep"] | {"collective": "in-network"}, "cluster": cluster})  # type: ignore[operator]
    with pytest.raises(UsageError, match="'d', which is not a"):
        load_plan(keys | {"cluster": cluster | {"servers": ["d"]}})


@pytest.mark.parametrize(
    ("collective", "says"),
    [
        ("halving-doubling", "collective 'halving-doubling': .* needs a power of two of workers, not 3: use ring"),
        ("hierarchical", "collective 'hierarchical': 3 workers in groups of 2 do not make"),
    ],
)
def test_workers_that_cannot_have_a_collective_are_counted(collective: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_collectives(plan_of(collective, testbed={"configuration": "B"}))


def test_a_collective_may_be_added_to_a_measured_sweep() -> None:
    point = {"series": "vgg16-iperf-ring", "model": "vgg16", "traffic": "iperf", "step": 0, "requested_bps": 0}
    before, now = resolved(plan_of("ring")), resolved(plan_of(["ring", "tree"]))
    assert plan_changes(before, now, [point | {"collective": "ring"}]).touching == []
    changed = plan_changes(now, resolved(plan_of(["tree"])), [point | {"collective": "ring"}])
    assert any(key.startswith("models.vgg16 by ring.") for key in changed.touching)
