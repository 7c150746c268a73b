"""Jobs on real hosts: what is asked of these, the offsets of their clocks, and traffic that is of none of the jobs."""

from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep.clock_offsets import ClockOffset, _offset, clock_offsets
from ringtap.agents.sweep.cluster_preflight import _gpu_problems, _question, _tool_problems, cluster_roles
from ringtap.agents.sweep.detect_disturbances import PortRates, Watch
from ringtap.agents.sweep.measure_sharing_jobs import SharedLinks
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.run_directory_schema import CLOCK_JSON
from ringtap.core.sweep_plans.cluster_hosts import Cluster, ClusterHost
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from tests.unit.agents.sweep.test_cluster_preflight_cluster import answer, nic

pytestmark = pytest.mark.shares

HOSTS = "".join(f'[[hosts]]\nname = "{name}"\ntraining = "10.0.0.{n}"\n' for n, name in enumerate("xyz", 1))
PLAN = f"""\
[sweep]
capacity = "1gbit"
[cluster]
reach = "ssh"
ports = "20000-20010"
{HOSTS}
[[jobs]]
name = "a"
model = "mine"
parameters = 1
command = ["true", "{{host}}"]
workers = ["x", "y"]
[[jobs]]
name = "b"
model = "mine"
parameters = 1
command = ["false"]
workers = ["y", "z"]
"""


def plan_of(tmp_path: Path, text: str = PLAN) -> SweepPlan:
    (tmp_path / "plan.toml").write_text(text)
    return load_plan(tmp_path / "plan.toml")


def host_of(plan: SweepPlan, name: str) -> ClusterHost:
    assert isinstance(plan.topology, Cluster)
    return plan.topology.host(name)


def answers(boots: str = "123") -> list[Any]:
    return [
        answer(name, boot, eth1=nic(f"10.0.0.{n}")) for n, (name, boot) in enumerate(zip("xyz", boots, strict=True), 1)
    ]


def test_hosts_are_asked_about_the_jobs_that_they_run(tmp_path: Path) -> None:
    plan, hosts = plan_of(tmp_path), LocalHosts(["x", "y", "z"])
    asked = {name: _question(plan, host_of(plan, name), hosts)["jobs"] for name in "xyz"}
    assert {name: sorted(jobs) for name, jobs in asked.items()} == {"x": ["a"], "y": ["a", "b"], "z": ["b"]}
    assert asked["y"]["a"]["command"] == ["true", "y"]
    scale_model = plan_of(
        tmp_path, PLAN.replace('model = "mine"\nparameters = 1\ncommand = ["false"]', 'model = "vgg16"')
    )
    assert _tool_problems(scale_model, "x", {"modules": []}) == []
    (said,) = _tool_problems(scale_model, "z", {"modules": []})
    assert said == "host z has no torch for the scale model: install ringtap[demo] there"


def test_jobs_that_may_take_the_same_gpu_are_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    (said,) = _gpu_problems(plan, host_of(plan, "y"), {"gpus": 1})
    assert said.startswith("host y has 1 GPU, which several jobs may take, and the plan does not give a, b any: set")
    assert _gpu_problems(plan, host_of(plan, "y"), {"gpus": 0}) == []
    assert _gpu_problems(plan, host_of(plan, "x"), {"gpus": 1}) == [], "one job only"
    given = [f'command = ["{word}"' for word in ("true", "false")]
    text = PLAN
    for number, words in enumerate(given):
        text = text.replace(words, f'environment = {{ CUDA_VISIBLE_DEVICES = "{number}" }}\n{words}')
    own = plan_of(tmp_path, text)
    assert _gpu_problems(own, host_of(own, "y"), {"gpus": 2}) == []


def test_the_links_of_shared_hosts_are_counted_there(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for boots, without in (("123", ["x"]), ("111", [])):
        network = cluster_roles(plan, answers(boots))
        run = RunDirectory.create(tmp_path / f"run{boots}", "sweep", [], 0)
        links = SharedLinks(plan, run, LocalHosts(["x", "y", "z"]), network, None, Path, print, print)
        assert links._ports == [{"node": "y", "nic": "eth1", "direction": way} for way in ("rx", "tx")]
        a, b = plan.jobs
        assert links._recorders(0, a) == []
        assert links._recorders(1, b) == without, "the reference of both runs, unless all have one clock"


def clock(run: RunDirectory, node: str, **item: Any) -> None:
    (run.node(node) / "clock").mkdir()
    write_json(run.node(node) / CLOCK_JSON, {"reference": "x", **item})


def test_the_best_burst_is_the_offset_and_none_is_a_sentence(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    clock(run, "y", measurements=[{"offset_ns": 900, "error_ns": 500}, {"offset_ns": 700, "error_ns": 90}])
    clock(run, "z", measurements=[], fit={"offset_ns": 0, "error_ns": 4_000_000}, source="time daemons")
    clock(run, "w", measurements=[], fit=None, reason="the reference answers no ping at 10.0.0.1, UDP port 1")
    assert _offset(run, "y") == ClockOffset(700, 90)
    assert _offset(run, "z") == ClockOffset(0, 4_000_000)
    with pytest.raises(MeasurementError, match="clock of host w cannot be compared with that of x"):
        _offset(run, "w")
    one_clock = cluster_roles(plan_of(tmp_path), answers("111"))
    found = clock_offsets(LocalHosts(["x", "y"]), one_clock, ["x", "y"], tmp_path / "none")
    assert found == {"x": ClockOffset(0, 0), "y": ClockOffset(0, 0)}
    assert not (tmp_path / "none").exists(), "there is nothing to measure"


class Counted(Watch):
    """A watch of a job that has these rates at each host; ValueError stands for connections that were not recorded."""

    def __init__(self, tmp_path: Path, plan: SweepPlan, own: dict[str, float], total: dict[str, float]) -> None:
        super().__init__(tmp_path, cluster_roles(plan, answers()), plan.capacity_bps, 0)
        self._own, self._total = own, total

    def rates(self, node: str, start_ns: int, end_ns: int) -> PortRates:
        if node not in self._own:
            raise UsageError(f"the connections of {node} were not recorded")
        return PortRates({"rx": self._total[node], "tx": 0.0}, {"rx": self._own[node], "tx": 0.0}, 0.0)


def test_other_traffic_is_what_is_of_none_of_the_jobs(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    total = {"x": 200e6, "y": 500e6, "z": 400e6}
    first = Counted(tmp_path, plan, {"x": 190e6, "y": 250e6}, total)
    second = Counted(tmp_path, plan, {"y": 240e6}, total)
    jobs = [(first, ("x", "y")), (second, ("y", "z"))]
    assert first.others(jobs, 0, 1) == [], "of 1 Gbit/s; z was not recorded"
    alone = first.others(jobs[:1], 0, 1)
    assert alone == ["y took in 250 Mbit/s of other traffic (25% of the capacity)"]
