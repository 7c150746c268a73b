"""What a testbed can be: plans that ask for anything else are refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringtap.agents.sweep.sweep_estimate import layout
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.core.testbed_options import SWITCHES
from ringtap.workload.topologies import fat_tree, leaf_spine

pytestmark = pytest.mark.computes

LEAVES = 'topology = "leaf-spine"\n'


def plan_file(folder: Path, testbed: str, sweep: str = "") -> Path:
    path = folder / "plan.toml"
    lines = ["[sweep]", "loads = [0, 0.5]", 'traffic = ["consistent"]', sweep, "[[models]]", 'name = "vgg16"']
    path.write_text("\n".join([*lines, "[testbed]", testbed, ""]))
    return path


def custom(*hosts: str, more: str = "") -> str:
    roles = f'workers = {json.dumps(hosts[:2])}\ncross_from = "{hosts[0]}"\ncross_to = "{hosts[1]}"\n{more}'
    return f'configuration = "custom"\nhosts = {json.dumps(hosts)}\n{roles}'


@pytest.mark.parametrize(
    ("testbed", "line", "words"),
    [
        (f"{LEAVES}spines = 20", 9, "spines = 20 is not a whole number from 1 to 16"),
        (f"{LEAVES}oversubscription = 500", 9, "oversubscription = 500 is not a number from 1 to 100"),
        (f"{LEAVES}per_leaf = 3", 9, "per_leaf = 3, and 4 hosts do not fill two or more leaves"),
        (f'{LEAVES}servers = ["P"]', 7, "per_leaf = 2, and 5 hosts do not fill"),
        ('delay = "20s"', 8, "delay = 20 s is outside 0 to 10 s"),
        ('queue = "1kB"', 8, "queue = 1000 bytes is too small: it must hold 4 packets in one piece, 6014 bytes"),
        ('burst = "1kB"', 8, "burst = 1000 bytes is too small"),
        ('topology = "leafspine"', 8, "topology = 'leafspine' is unknown: did you mean 'leaf-spine'"),
        ('topology = ["star", "clos"]', 8, "topology = 'clos' is unknown"),
        ('topology = ["star", "fat-tree"]', 8, "has k³/4 hosts (2, 16, 54, 128), not 4"),
        ('topology = "torus"', 7, "sides is missing"),
        (
            'topology = "torus"\nsides = "3x4"',
            9,
            "sides = '3x4' are not two or more lengths above 2 with the product 4",
        ),
        ('topology = "torus"\nsides = "3by3"', 9, "sides is not understood: sides '3by3'"),
        ('servers = ["x y"]', 8, "servers names 'x y', which is not a valid name"),
        (custom("a b", "c"), 9, "hosts names 'a b', which is not a valid name"),
        (custom("switch", "c"), 9, "hosts names 'switch', which is not a valid name"),
        (custom("a", "b", "a"), 9, "hosts names 'a' twice"),
        (custom(*(f"x{number}" for number in range(201))), 9, "hosts has 201: a testbed needs 2 to 200 hosts"),
        (custom("a", "b", more='topology = "ring"'), 9, "hosts has 2: a ring needs three or more hosts"),
        (custom("a", "b").replace('workers = ["a", "b"]', 'workers = ["a", "a"]'), 10, "workers names a host twice"),
        (custom("leaf0", "b", "c", "d", more=LEAVES), 9, "hosts names 'leaf0', which is the name of a switch"),
    ],
)
def test_a_plan_of_a_testbed_that_cannot_be_is_refused_with_its_line(
    testbed: str, line: int, words: str, tmp_path: Path
) -> None:
    path = plan_file(tmp_path, testbed)
    with pytest.raises(UsageError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path} line {line}: testbed.")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sweep", "testbed", "rate"),
    [
        ('capacity = "1mbit"', "", "10 kbit/s"),
        ('capacity = "4tbit"', "", "40 Gbit/s"),
        ('capacity = "2tbit"', f"{LEAVES}oversubscription = 4", "40 Gbit/s"),  # of the hosts' links
    ],
)
def test_a_plan_of_links_that_cannot_be_is_refused_with_its_line(
    sweep: str, testbed: str, rate: str, tmp_path: Path
) -> None:
    path = plan_file(tmp_path, testbed, sweep)
    with pytest.raises(UsageError) as caught:
        load_plan(path)
    limits = "those of a testbed have 100 kbit/s to 30 Gbit/s"
    assert str(caught.value) == f"{path} line 4: sweep.capacity gives links of {rate}: {limits}"


@pytest.mark.parametrize(
    "testbed", [f"{LEAVES}spines = 16\noversubscription = 8", 'topology = ["star", "leaf-spine"]', ""]
)
def test_a_plan_that_is_read_can_be_built(testbed: str, tmp_path: Path) -> None:
    spec, _ = layout(load_plan(plan_file(tmp_path, testbed)))
    assert min(link.rate_bps for link in spec.links) == 250_000_000


def test_switches_have_the_names_that_hosts_cannot_have() -> None:
    for network in (leaf_spine(4, 1e9, 2), fat_tree(4, 1e9)):
        nodes = {end.rstrip("0123456789") for ends in network.ends for end in ends}
        assert nodes == {"h", *SWITCHES[network.name]}
