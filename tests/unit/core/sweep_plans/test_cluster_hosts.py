"""Plans for real hosts: what they may say, and every refusal."""

from pathlib import Path

import pytest

from ringtap.agents.sweep.host_connections import nodes_of
from ringtap.agents.sweep.sweep_estimate import estimate, resolved
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import load_plan

pytestmark = pytest.mark.computes

GOOD = """\
[sweep]
capacity = "10gbit"
loads = [0, 0.4]
traffic = ["iperf"]
[cluster]
reach = "ssh"
workers = ["a", "b"]
cross_from = "c"
cross_to = "a"
i_may_load_these_links = true
most_load = "5gbit"
[[hosts]]
name = "a"
ssh = "me@a.lab"
training = "10.0.0.1"
cross = "10.1.0.1"
[[hosts]]
name = "b"
training = "10.0.0.2"
interface = "ens1"
[[hosts]]
name = "c"
training = "10.0.0.3"
python = "/opt/env/bin/python"
workdir = "/scratch/me"
[[models]]
name = "vgg16"
"""
LAST = "[[models]]"


def plan_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def cluster_of(tmp_path: Path, text: str) -> Cluster:
    cluster = load_plan(plan_file(tmp_path, text)).topology
    assert isinstance(cluster, Cluster)
    return cluster


def test_a_real_link_has_the_capacity_that_it_has(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, GOOD))
    assert (plan.scale, plan.capacity_bps, plan.window.retries) == (1, 10_000_000_000, 2)
    scaled = load_plan(plan_file(tmp_path, GOOD.replace("[sweep]", "[sweep]\nscale = 100")))
    assert (scaled.scale, scaled.capacity_bps) == (100, 10_000_000_000)


def test_hosts_have_what_the_plan_says_and_defaults(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, GOOD)
    first, second, third = cluster.hosts
    assert (first.ssh, first.cross) == ("me@a.lab", "10.1.0.1")
    assert (second.ssh, second.cross, second.interface) == ("b", "10.0.0.2", "ens1")
    assert (third.python, third.workdir) == ("/opt/env/bin/python", "/scratch/me")
    assert cluster.most_load_bps == 5_000_000_000


def test_run_json_names_hosts_and_roles_as_for_a_testbed(tmp_path: Path) -> None:
    topology = resolved(load_plan(plan_file(tmp_path, GOOD)))["topology"]
    assert topology["hosts"] == ["a", "b", "c"]
    assert topology["workers"] == ["a", "b"]
    assert (topology["cross_from"], topology["cross_to"], topology["reach"]) == ("c", "a", "ssh")
    assert topology["machines"][0]["training"] == "10.0.0.1"


def test_without_cross_traffic_nothing_needs_to_be_allowed(tmp_path: Path) -> None:
    text = GOOD.replace("[0, 0.4]", "[0]")
    for line in ("i_may_load_these_links = true\n", 'most_load = "5gbit"\n', 'cross_from = "c"\n', 'cross_to = "a"\n'):
        text = text.replace(line, "")
    cluster = cluster_of(tmp_path, text)
    assert (cluster.may_load, cluster.most_load_bps, cluster.cross_to) == (False, 0, "")


def test_bursts_count_with_their_height_up_to_the_whole_link(tmp_path: Path) -> None:
    text = GOOD.replace('["iperf"]', '["iperf", "burst"]')
    with pytest.raises(UsageError, match=r"line 11: cluster\.most_load = 5 Gbit/s .*asks for \(10 Gbit/s\)"):
        load_plan(plan_file(tmp_path, text))
    assert cluster_of(tmp_path, text.replace("5gbit", "10gbit")).most_load_bps == 10_000_000_000


def test_slurm_finds_addresses_by_their_interface_and_nodes_in_order(tmp_path: Path) -> None:
    text = GOOD.replace('"ssh"', '"slurm"', 1).replace('ssh = "me@a.lab"\n', "").replace("workdir", "# ")
    text = text.replace('training = "10.0.0.2"\n', "").replace('name = "c"', 'name = "c"\nnode = "n1"')
    cluster = cluster_of(tmp_path, text)
    assert (cluster.host("b").training, cluster.host("b").interface) == ("", "ens1")
    assert nodes_of(cluster, ["n1", "n2", "n3", "n4"]) == {"a": "n2", "b": "n3", "c": "n1"}
    with pytest.raises(UsageError, match="3 hosts, but this allocation only has the nodes n1, n2"):
        nodes_of(cluster, ["n1", "n2"])


@pytest.mark.parametrize(
    ("change", "to", "words"),
    [
        (
            "i_may_load_these_links = true",
            "",
            "line 5: cluster.i_may_load_these_links is not true, but the plan's loads",
        ),
        ("i_may_load_these_links = true", "i_may_load_these_links = false", "line 10: .*or plan loads = \\[0\\]"),
        ("i_may_load_these_links = true", 'i_may_load_these_links = "yes"', "line 10: .*not true or false"),
        ('most_load = "5gbit"', "", "line 5: cluster.most_load is missing"),
        ('most_load = "5gbit"', 'most_load = "3gbit"', "line 11: .*3 Gbit/s is less .*asks for \\(4 Gbit/s\\)"),
        ('most_load = "5gbit"', 'most_load = "5"', "line 11: .*is not understood"),
        ('capacity = "10gbit"\n', "", "line 1: sweep.capacity is missing"),
        ('workers = ["a", "b"]', 'workers = ["a", "d"]', "line 7: cluster.workers names 'd', which is no"),
        ('workers = ["a", "b"]', "workers = []", "line 7: .*is empty: name at least one host"),
        ('workers = ["a", "b"]', 'workers = ["a", "a"]', "line 7: .*twice"),
        ('cross_from = "c"', 'cross_from = "x"', "line 8: cluster.cross_from names 'x'"),
        ('cross_from = "c"\n', "", "line 5: cluster.cross_from is missing"),
        ('cross_to = "a"', 'cross_to = "c"', "line 9: .*the sender of the cross traffic itself"),
        ('reach = "ssh"', 'reach = "shs"', "line 6: .*one of ssh, slurm, local; did you mean ssh"),
        ('reach = "ssh"', "", "line 5: cluster.reach is missing"),
        ('reach = "ssh"', 'reach = "slurm"', 'line 14: hosts.ssh is for reach = "ssh"; this plan\'s is "slurm"'),
        ('training = "10.0.0.2"\n', "", "line 17: hosts.training is missing: give the address"),
        ('training = "10.0.0.2"', 'training = "10.0.0"', "line 19: .*not an IPv4 address"),
        ('training = "10.0.0.2"', 'training = "fe80::1"', "line 19: .*not an IPv4 address"),
        ('training = "10.0.0.2"', 'training = "10.0.0.1"', "line 19: hosts.training = '10.0.0.1' is that of a host"),
        ('name = "b"', 'name = "a"', "line 18: hosts.name = 'a' is that of a host above"),
        ('name = "b"', 'name = "b/c"', "line 18: .*plain name"),
        ('name = "b"', 'name = "b"\nnode = "n3"', 'line 19: hosts.node is for reach = "slurm"'),
        ('name = "b"', 'name = "b"\naddress = "n3"', "line 19: hosts.address is not a key of this table"),
        ('"me@a.lab"', '"-oProxyCommand=x"', "line 14: .*an option to ssh"),
        ('workdir = "/scratch/me"', 'workdir = "scratch"', "line 25: .*not an absolute path"),
        (LAST, '[testbed]\nconfiguration = "A"\n[[models]]', "line 26: a plan has a \\[testbed\\] or a \\[cluster\\]"),
        (LAST, "[[host]]\n[[models]]", "line 26: \\[host\\] is not a known table; did you mean \\[\\[hosts\\]\\]"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, change: str, to: str, words: str) -> None:
    assert change in GOOD
    path = plan_file(tmp_path, GOOD.replace(change, to, 1))
    with pytest.raises(UsageError, match=words) as caught:
        load_plan(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_cluster_without_hosts_and_hosts_without_a_cluster(tmp_path: Path) -> None:
    start, hosts = GOOD.index("[[hosts]]"), GOOD.index(LAST)
    with pytest.raises(UsageError, match=r"line 6: cluster\.reach has no hosts to reach"):
        load_plan(plan_file(tmp_path, GOOD[:start] + GOOD[hosts:]))
    cluster = GOOD.index("[cluster]")
    with pytest.raises(UsageError, match=r"line 5: \[\[hosts\]\] needs a \[cluster\]"):
        load_plan(plan_file(tmp_path, GOOD[:cluster] + GOOD[start:]))


def test_this_machine_alone_has_no_link_to_load(tmp_path: Path) -> None:
    text = GOOD.replace('"ssh"', '"local"', 1).replace('ssh = "me@a.lab"\n', "").replace("workdir", "# ")
    with pytest.raises(UsageError, match=r"line 6: .*no link that cross traffic could load"):
        load_plan(plan_file(tmp_path, text))


def test_the_estimate_of_one_series(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, GOOD.replace('["iperf"]', '["iperf", "consistent"]')))
    both, one = estimate(plan), estimate(plan, "vgg16-consistent")
    assert [point["series"] for point in one] == ["vgg16-consistent"] * 2
    assert [point["requested_bps"] for point in one] == [point["requested_bps"] for point in both[2:]]


def test_chosen_loads_stay_below_most_load_and_need_a_budget(tmp_path: Path) -> None:
    text = GOOD.replace("loads = [0, 0.4]", 'loads = "auto"')
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.toml line 1: sweep\.budget is missing: .* on a cluster, say how long"):
        load_plan(path)
    path.write_text(text.replace('loads = "auto"', 'loads = "auto"\nbudget = "10min"'))
    plan = load_plan(path)
    assert plan.loads[-1] == 0.5, "half of the link is the limit"
    assert list(plan.loads) == sorted(set(plan.loads))
    path.write_text(path.read_text().replace('traffic = ["iperf"]', 'traffic = ["burst"]'))
    assert load_plan(path).loads[-1] == 0.16, "in its bursts, three times as much"
    path.write_text(path.read_text().replace('"5gbit"', '"1gbit"'))
    with pytest.raises(UsageError, match="needs a most_load of 10% of the capacity at least"):
        load_plan(path)


def test_a_host_may_have_one_rank_or_many_but_not_none(tmp_path: Path) -> None:
    for ranks in (1, 1024):
        text = GOOD.replace('ssh = "me@a.lab"\n', f'ssh = "me@a.lab"\nranks = {ranks}\n')
        assert cluster_of(tmp_path, text).host("a").ranks == ranks
    for ranks in (0, 1025):
        text = GOOD.replace('ssh = "me@a.lab"\n', f'ssh = "me@a.lab"\nranks = {ranks}\n')
        with pytest.raises(UsageError, match="ranks"):
            load_plan(plan_file(tmp_path, text))
