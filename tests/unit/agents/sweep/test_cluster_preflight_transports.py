"""Sweeps over RDMA: the counters that see it, hosts that cannot take part, jobs' variables, and resumed plans."""

from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep.cluster_preflight import HostAnswer, _rdma_problems, cluster_roles
from ringtap.agents.sweep.detect_disturbances import collect_options
from ringtap.agents.sweep.job_launch_commands import processes
from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.sweep_estimate import resolved
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from tests.unit.agents.sweep.test_cluster_preflight_cluster import PLAN, answer, counter, nic, plan_of

pytestmark = pytest.mark.shares

WINDOW = '[window]\nmin_time = "25s"\nmax_time = "60s"\n'
RDMA = WINDOW + PLAN.replace('command = ["true"]', 'command = ["true"]\ntransport = "rdma"')


def roce(address: str, device: str = "mlx5_1", **rest: Any) -> dict[str, Any]:
    port = {"device": device, "port": 1, "link_layer": "Ethernet", "interfaces": ["ens1"], "counts_all": False}
    return nic(address, **rest) | {"phy": True, "rdma": port}


def infiniband(address: str) -> dict[str, Any]:
    port = {"device": "mlx5_0", "port": 2, "link_layer": "InfiniBand", "interfaces": ["ib0"], "counts_all": True}
    return nic(address, mtu=4092) | {"phy": False, "rdma": port}


def answers(kind: Any) -> list[HostAnswer]:
    return [answer(name, ens1=kind(address)) for name, address in zip("abc", addresses(), strict=True)]


def addresses() -> tuple[str, str, str]:
    return "10.0.0.1", "10.0.0.2", "10.0.0.3"


def test_an_ethernet_port_is_counted_by_its_driver(tmp_path: Path) -> None:
    roles = cluster_roles(plan_of(tmp_path, RDMA), answers(roce))
    assert roles.bottleneck["total"] == [counter("a", "ens1", "rx") | {"source": "ethtool"}]
    assert roles.bottleneck["cross"] == [counter("c", "ens1", "tx") | {"source": "ethtool"}]
    assert roles.rdma == {"a": "mlx5_1:1", "b": "mlx5_1:1"}
    assert (roles.period_s, roles.sources("a"), roles.sources("b")) == (1.0, ["ethtool"], [])
    expected = ["--collect", "nic,sockets,steps,ethtool", "--every", "0.01s,ethtool=1s,sockets=0.1s"]
    assert collect_options(roles, "a", "sockets", "steps") == expected
    assert collect_options(roles, "b", "steps") == ["--collect", "nic,steps", "--every", "0.01s"]


def test_an_infiniband_port_is_counted_by_itself(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RDMA.replace("25s", "3s"))  # it is read ten times a second
    roles = cluster_roles(plan, answers(infiniband))
    port = {"source": "infiniband", "port": "mlx5_0-2"}
    assert roles.bottleneck["total"] == [counter("a", "ens1", "rx") | port]
    assert roles.rdma["b"] == "mlx5_0:2"


def test_over_tcp_the_interfaces_count_as_before(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN.replace('["true"]', '["true"]\ntransport = "tcp"'))
    roles = cluster_roles(plan, answers(roce))
    assert roles.bottleneck["total"] == [counter("a", "ens1", "rx")]
    assert roles.sources("a") == []


def test_a_vlan_is_counted_at_the_port_below_and_its_cross_traffic_by_itself(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RDMA.replace('"10.0.0.1"', '"10.0.0.1"\ncross = "10.1.0.1"'))
    first = answer("a", ens1=roce("10.0.0.1"), vlan7=nic("10.1.0.1", below=("ens1",)))
    roles = cluster_roles(plan, [first, *answers(roce)[1:]])
    assert roles.bottleneck["total"] == [counter("a", "ens1", "rx") | {"source": "ethtool"}]
    assert roles.bottleneck["cross"] == [counter("a", "vlan7", "rx")]
    # the training address is that of the VLAN
    above = answer("a", vlan7=nic("10.0.0.1", below=("ens1",)), ens1=roce("10.9.0.1"))
    roles = cluster_roles(plan_of(tmp_path, RDMA), [above, *answers(roce)[1:]])
    assert roles.bottleneck["total"] == [counter("a", "ens1", "rx") | {"source": "ethtool"}]
    assert roles.rdma["a"] == "mlx5_1:1"


def test_ports_that_no_counter_sees_and_short_windows_are_refused(tmp_path: Path) -> None:
    virtual = answers(lambda address: roce(address) | {"phy": False})
    with pytest.raises(UsageError, match=r"host a: no counter of ens1 sees RDMA: it has no \*_phy counters"):
        cluster_roles(plan_of(tmp_path, RDMA), virtual)
    with pytest.raises(UsageError, match=r"min_time = 24 s is too short: the counters .* every 1 s, so give 25s"):
        cluster_roles(plan_of(tmp_path, RDMA.replace("25s", "24s")), answers(roce))


def test_a_worker_without_a_device_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RDMA)
    found = {name: _rdma_problems(plan, plan.topology.host(name), answers(nic)[0].facts) for name in "ac"}  # type: ignore[union-attr]
    assert found["c"] == [], "it does not train"
    words = "ens1, which has the training address, belongs to no RDMA device: give another, or use tcp"
    assert found["a"] == [f"host a, model mine over rdma: {words}"]
    assert _rdma_problems(plan, plan.topology.host("a"), answers(roce)[0].facts) == []  # type: ignore[union-attr]


def test_a_job_over_rdma_uses_the_port_of_its_address(tmp_path: Path) -> None:
    two = RDMA.replace("[[hosts]]", f"{RDMA[RDMA.index('[[models]]') : RDMA.index('[[hosts]]')]}\n[[hosts]]", 1)
    plan = plan_of(tmp_path, two.replace('"rdma"', '"tcp"', 1))
    roles, hosts = cluster_roles(plan, answers(roce)), LocalHosts(["a", "b", "c"])
    try:
        over = {model.transport: processes(plan, model, roles, hosts, 1)[0].environment for model in plan.models}
    finally:
        hosts.close()
    assert (over["rdma"]["NCCL_IB_HCA"], over["rdma"]["NCCL_NET"]) == ("=mlx5_1:1", "IB")
    assert "NCCL_IB_HCA" not in over["tcp"]
    assert over["tcp"]["NCCL_NET"] == "Socket"


def test_what_resumes_depends_on_the_transport_of_the_points() -> None:
    def plan(*transports: str, **environment: str) -> dict[str, Any]:
        models = [{"name": "vgg16", "transport": one, "environment": environment} for one in transports]
        loaded: SweepPlan = load_plan({"sweep": {"loads": [0, 0.3], "traffic": ["iperf"]}, "models": models})
        return resolved(loaded)

    def point(transport: str) -> dict[str, Any]:
        name = "-".join(part for part in ("vgg16-iperf", transport) if part)
        return {"series": name, "model": "vgg16", "traffic": "iperf", "step": 0, "requested_bps": 0} | (
            {"transport": transport} if transport else {}
        )

    added = plan_changes(plan("tcp"), plan("tcp", "tcp-b"), [point("tcp")])
    assert added.touching == []
    assert "models.vgg16 over tcp-b.environment" in added.free
    changed = plan("tcp", "tcp-b"), plan("tcp", "tcp-b", A="1")
    assert plan_changes(*changed, [point("tcp")]).touching == ["models.vgg16 over tcp.environment"]
    assert plan_changes(plan("tcp", "tcp-b"), plan("tcp"), [point("tcp-b")]).touching
    # a run of a version without transports
    old = plan("")
    for model in old["models"]:
        del model["transport"]
    assert plan_changes(old, plan(""), [point("")]) == ([], [])
