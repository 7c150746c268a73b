"""Paths of jobs through topologies, the links that they share, and the choice of paths by Crux."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.sweep.choose_network_paths import (
    crux_paths,
    flow_capacity_bps,
    flows,
    limiting_links,
    random_paths,
    used_links,
)
from ringtap.agents.sweep.sweep_estimate import layout, sharing_steps
from ringtap.agents.testbed.shortest_path_routes import hops, links_on_path, path_count, path_routes
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.workload.interleaving import InterleavedLink, PeriodicJob, Phase

pytestmark = [pytest.mark.computes, pytest.mark.together]

RATE_BPS = 100_000_000


def spec(topology: str, hosts: int, **keys: Any) -> TestbedSpec:
    return TestbedSpec("t", tuple(f"S{host}" for host in range(hosts)), RATE_BPS, topology=topology, jobs=2, **keys)


# uplinks of 100 Mbit/s; and of 150 Mbit/s, which four hosts share
SPINES = spec("leaf-spine", 8, per_leaf=4, spines=2, oversubscription=2)
ONE_SPINE = spec("leaf-spine", 8, per_leaf=4, oversubscription=8 / 3)
TOPOLOGIES = {
    "star": (spec("star", 3), 1),
    "leaf-spine": (SPINES, 2),
    "fat-tree": (spec("fat-tree", 16), 4),
    "ring": (spec("ring", 4), 2),
    "torus": (spec("torus", 9, sides="3x3"), 2),
}


@given(st.sampled_from(sorted(TOPOLOGIES)), st.integers(0, 40), st.data())
def test_routes_of_a_path_lead_along_one_shortest_path(kind: str, path: int, data: st.DataObject) -> None:
    one, count = TOPOLOGIES[kind]
    assert path_count(one) == count
    source, target = data.draw(st.permutations(one.hosts))[:2]
    links = links_on_path(one, source, target, path)
    assert len(links) == hops(one, target)[source]
    assert [link.source for link in links[1:]] == [link.target for link in links[:-1]]
    by_node = path_routes(one, path)
    for link in links:
        to_host = {route.host: route.links for route in by_node[link.source]}
        assert to_host.get(target, to_host.get(None)) == (link,)
    destinations = {node: [route.host for route in routes] for node, routes in path_routes(one, 0).items()}
    assert {node: [route.host for route in routes] for node, routes in by_node.items()} == destinations


def test_paths_of_a_leaf_spine_are_its_spines_and_those_of_a_fat_tree_its_cores() -> None:
    for path in (0, 1):
        assert links_on_path(SPINES, "S0", "S4", path)[1].target == f"spine{path}"
    tree = TOPOLOGIES["fat-tree"][0]
    cores = {links_on_path(tree, "S0", "S15", path)[2].target for path in range(4)}
    assert cores == {"core0", "core1", "core2", "core3"}


def plan(workers: list[list[str]], **keys: Any) -> dict[str, Any]:
    jobs = [
        {"name": name, "model": "vgg16", "workers": own, "flop": 1e12}
        for name, own in zip("abcd", workers, strict=False)
    ]
    testbed = {"topology": "leaf-spine", "hosts": list(SPINES.hosts), "per_leaf": 4, "spines": 2, "oversubscription": 2}
    return {"sweep": {"offsets": ["free", "free", "crux"]}, "jobs": jobs, "testbed": testbed | keys}


def test_flows_of_a_ring_and_the_links_that_jobs_share() -> None:
    # S0 S1 | S4 S5: one flow up and one down; S0 S4 S1 S5: two of each
    up = SPINES.links[16]
    assert up.place == ("leaf0", "to spine0")
    assert flows(SPINES, ["S0", "S1", "S4", "S5"], 0)[up] == 1
    assert flows(SPINES, ["S0", "S4", "S1", "S5"], 0)[up] == 2
    assert up not in flows(SPINES, ["S0", "S1", "S4", "S5"], 1)
    assert flow_capacity_bps(SPINES, ["S0", "S4", "S1", "S5"]) == RATE_BPS / 2
    jobs = load_plan(plan([["S0", "S4"], ["S1", "S5"], ["S1", "S2"]])).jobs
    shared = used_links(SPINES, dict(enumerate(jobs)), [1, 1, 0])
    assert {one.link.place: dict(one.flows) for one in shared} == {
        ("leaf0", "to spine1"): {0: 1, 1: 1},
        ("leaf1", "to spine1"): {0: 1, 1: 1},
        ("spine1", "to leaf0"): {0: 1, 1: 1},
        ("spine1", "to leaf1"): {0: 1, 1: 1},
        ("S1", "to leaf0"): {1: 1, 2: 1},
        ("leaf0", "to S1"): {1: 1, 2: 1},
    }
    counters = {port["link"]: port for port in (one.counter(SPINES, jobs) for one in shared)}
    own = counters["spine1 to leaf0"]
    assert (own["node"], own["nic"], own["direction"], own["jobs"]) == ("leaf0", "to-spine1", "rx", ["a", "b"])
    assert (counters["S1 to leaf0"]["node"], counters["S1 to leaf0"]["direction"]) == ("leaf0", "rx")
    apart = used_links(SPINES, dict(enumerate(jobs[:2])), [0, 1])
    assert {len(one.flows) for one in apart} == {1}, "they share none, and all links are there"
    star, _ = TOPOLOGIES["star"]
    alone = used_links(star, {0: load_plan(plan([["S0", "S1"], ["S0", "S1"]])).jobs[0]}, [0])
    assert [(port["node"], port["nic"], port["direction"]) for port in (one.counter(star, jobs) for one in alone)] == [
        ("switch", "to-S0", "rx"), ("switch", "to-S1", "rx"), ("switch", "to-S0", "tx"), ("switch", "to-S1", "tx")
    ]  # fmt: skip


def test_links_that_limit_nothing_are_left_out() -> None:
    links = [
        InterleavedLink("host", 1e8, (0, 1)),
        InterleavedLink("back", 1e8, (0, 1)),
        InterleavedLink("up", 1.5e8, (0, 1, 2)),
        InterleavedLink("x", 2e8, (0, 2)),
    ]
    assert limiting_links(links) == [links[0], links[2]]


def test_crux_gives_the_most_intense_job_the_least_congested_path() -> None:
    workers = [["S0", "S4"], ["S1", "S5"], ["S2", "S6"], ["S2", "S3"]]
    jobs = load_plan(plan(workers)).jobs
    # they send for 60, 50, 20 and 90 of 100 ms; the last one within a leaf
    alone = [PeriodicJob("j", 10**8, (Phase(0, ms * 10**6, 1e8),)) for ms in (60, 50, 20, 90)]
    assert crux_paths(SPINES, jobs, alone, [3.0, 2.0, 1.0, 4.0])[:3] == [0, 1, 1]
    assert crux_paths(SPINES, jobs, alone, [1.0, 2.0, 3.0, 4.0])[:3] == [0, 1, 0]


def test_random_paths_come_from_the_seed_and_change_with_repeats() -> None:
    draws = [random_paths(SPINES, 1, 6, draw) for draw in range(20)]
    assert draws == [random_paths(SPINES, 1, 6, draw) for draw in range(20)]
    assert len(set(map(tuple, draws))) > 5
    assert {path for draw in draws for path in draw} == {0, 1}
    steps = sharing_steps(load_plan(plan([["S0", "S4"], ["S1", "S5"]])))
    assert [(step.offset, step.repeat) for step in steps[2:]] == [("free", 0), ("free", 1), ("crux", 0)]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (plan([["S0", "S1"], ["S4", "S5"]]), "a has no link of the leaf-spine in common with another job"),
        (plan([["S0", "S1"], ["S0", "S5"]], topology=["star", "ring"]), "jobs share the links of one topology"),
        (plan([["S0", "S1"], ["S0", "S5"]], topology="torus"), "is for topology"),
        (plan([["S0", "S1"], ["S0", "S9"]]), "lacks S9"),
        (plan([["S0", "S1"], ["S0", "S5"]], per_leaf=3), "8 hosts do not fill"),
        (
            plan([["S0", "S1"], ["S0", "S5"]], delay="1ms"),
            "'crux', whose classes would take the place of the links' delay",
        ),
    ],
)
def test_testbeds_that_jobs_cannot_have_are_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        layout(load_plan(tables))
    assert said in str(error.value)


def test_the_place_of_hosts_must_be_given() -> None:
    tables = plan([["S0", "S1"], ["S0", "S5"]])
    del tables["testbed"]["hosts"]
    with pytest.raises(UsageError, match="hosts is missing: in a leaf-spine"):
        load_plan(tables)
