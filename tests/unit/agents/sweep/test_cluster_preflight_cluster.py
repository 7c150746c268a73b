"""What the hosts of a cluster answer, and which counters tell the cross traffic from the training."""

import subprocess
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ringtap import open_run
from ringtap.agents.hosts import LocalHosts
from ringtap.agents.hosts.remote import Hosts
from ringtap.agents.sweep.cluster_preflight import HostAnswer, _torch_problems, ask_hosts, cluster_roles
from ringtap.agents.sweep.cross_traffic import CrossTraffic
from ringtap.agents.sweep.cross_traffic import free_port as cross_free_port
from ringtap.agents.sweep.host_connections import LostHostError, check_alive, check_lost, losses_named
from ringtap.agents.sweep.host_facts import free_port, host_facts
from ringtap.agents.sweep.tcp_reachability import TcpPath, _sentences, check_reachability
from ringtap.agents.sweep.traffic_precheck import check_host
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.run_directory import read_json, write_json
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from tests.gold.analysis_sweep import edit_info, write_sweep

pytestmark = pytest.mark.shares

PLAN = """\
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
[[models]]
name = "mine"
parameters = 1
command = ["true"]
[[hosts]]
name = "a"
training = "10.0.0.1"
[[hosts]]
name = "b"
training = "10.0.0.2"
[[hosts]]
name = "c"
training = "10.0.0.3"
"""


def plan_of(tmp_path: Path, text: str = PLAN) -> SweepPlan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path)


def nic(*addresses: str, below: tuple[str, ...] = (), mtu: int = 9000) -> dict[str, Any]:
    return {"addresses": list(addresses), "below": list(below), "mtu": mtu}


def answer(name: str, boot: str = "one", **nics: dict[str, Any]) -> HostAnswer:
    facts = {"boot_id": boot, "iperf3": "/usr/bin/iperf3", "modules": ["torch"], "interfaces": nics}
    return HostAnswer(name, facts, ())


def counter(node: str, name: str, direction: str) -> dict[str, str]:
    return {"node": node, "nic": name, "direction": direction}


def plain(boots: tuple[str, str, str] = ("one", "one", "one")) -> list[HostAnswer]:
    hosts = zip("abc", ("10.0.0.1", "10.0.0.2", "10.0.0.3"), boots, strict=True)
    return [answer(name, boot, ens1=nic(address)) for name, address, boot in hosts]


def test_one_interface_each_the_sender_counts_the_cross_traffic(tmp_path: Path) -> None:
    stage = cluster_roles(plan_of(tmp_path), plain())
    assert stage.bottleneck["total"] == [counter("a", "ens1", "rx")]
    assert stage.bottleneck["cross"] == [counter("c", "ens1", "tx")]
    assert stage.bottleneck["mtu"] == 9000
    assert stage.interface == {"a": "ens1", "b": "ens1"}
    assert stage.recorded == ("a", "b", "c")
    assert stage.timekeeper == "a"


def test_hosts_of_one_kernel_have_one_clock(tmp_path: Path) -> None:
    assert cluster_roles(plan_of(tmp_path), plain()).clock() == {"one_clock": True}
    assert cluster_roles(plan_of(tmp_path), plain(("one", "two", "two"))).clock() == {"reference": "a"}


@pytest.mark.parametrize(
    ("below", "total"),
    [
        ((), [counter("a", "ens1", "rx"), counter("a", "ens2", "rx")]),
        (("ens1",), [counter("a", "ens1", "rx")]),  # a VLAN on it: its frames are counted there, too
    ],
)
def test_an_interface_of_its_own_counts_the_cross_traffic(
    tmp_path: Path, below: tuple[str, ...], total: list[dict[str, str]]
) -> None:
    plan = plan_of(tmp_path, PLAN.replace('"10.0.0.1"', '"10.0.0.1"\ncross = "10.1.0.1"'))
    answers = plain()
    answers[0] = answer("a", ens1=nic("10.0.0.1"), ens2=nic("10.1.0.1", below=below, mtu=1500))
    stage = cluster_roles(plan, answers)
    assert stage.bottleneck["cross"] == [counter("a", "ens2", "rx")]
    assert [stage.mtu(counter(host, name, "rx")) for host, name in (("a", "ens1"), ("a", "ens2"), ("b", "ens2"))] == [
        9000, 1500, None
    ]  # fmt: skip
    assert stage.bottleneck["total"] == total
    assert stage.cross["a"] == "10.1.0.1"


def test_a_sender_that_trains_has_the_bottleneck_in_front_of_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN.replace('cross_from = "c"\ncross_to = "a"', 'cross_from = "a"\ncross_to = "c"'))
    stage = cluster_roles(plan, plain())
    assert stage.bottleneck["total"] == [counter("a", "ens1", "tx")]
    assert stage.bottleneck["cross"] == [counter("c", "ens1", "rx")]


def test_two_that_train_by_one_interface_count_what_the_receiver_acknowledges(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PLAN.replace('["a", "b"]', '["a", "b", "c"]'))
    expected = {"cross": "acknowledged", "total": [counter("c", "ens1", "tx")], "mtu": 9000}
    assert cluster_roles(plan, plain()).bottleneck == expected
    # the training's own interface stands on the one of the cross traffic, which so counts both
    vlan = PLAN.replace('["a", "b"]', '["a", "b", "c"]').replace('"10.0.0.1"', '"10.0.0.1"\ncross = "10.1.0.1"')
    answers = plain()
    answers[0] = answer("a", ens1=nic("10.0.0.1", below=("ens0",)), ens0=nic("10.1.0.1"))
    assert cluster_roles(plan_of(tmp_path, vlan), answers).bottleneck == expected


def test_every_problem_of_every_host_is_said(tmp_path: Path) -> None:
    answers = [HostAnswer("a", {}, ("a is ill",)), HostAnswer("b", {}, ()), HostAnswer("c", {}, ("c is dead",))]
    with pytest.raises(UsageError, match="a is ill; c is dead"):
        cluster_roles(plan_of(tmp_path), answers)


def test_this_machine_answers_for_itself(tmp_path: Path) -> None:
    (own,) = [name for name, item in host_facts()["interfaces"].items() if "127.0.0.1" in item["addresses"]]
    text = PLAN[PLAN.index("[[models]]") : PLAN.index("[[hosts]]")]
    text += '[sweep]\ncapacity = "10gbit"\nloads = [0]\n[cluster]\nreach = "local"\nworkers = ["a"]\n'
    text += f'[[hosts]]\nname = "a"\ntraining = "127.0.0.1"\ninterface = "{own}"\n'
    plan = plan_of(tmp_path, text)
    with closing(LocalHosts(["a"])) as hosts:
        stage = cluster_roles(plan, ask_hosts(plan, hosts))
    assert stage.interface == {"a": own}
    assert (stage.bottleneck["cross"], stage.one_clock) == ([], True)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ('training = "192.0.2.7"', r"host a does not have its training address 192\.0\.2\.7: it has .*127\.0\.0\.1"),
        ('training = "127.0.0.1"\ninterface = "nic7"', "host a has no interface nic7: it has .*lo"),
    ],
)
def test_addresses_that_a_host_has_not_are_named(tmp_path: Path, host: str, words: str) -> None:
    text = PLAN[PLAN.index("[[models]]") : PLAN.index("[[hosts]]")]
    text += '[sweep]\ncapacity = "10gbit"\nloads = [0]\n[cluster]\nreach = "local"\nworkers = ["a"]\n'
    plan = plan_of(tmp_path, text + f'[[hosts]]\nname = "a"\n{host}\n')
    with closing(LocalHosts(["a"])) as hosts, pytest.raises(UsageError, match=words):
        cluster_roles(plan, ask_hosts(plan, hosts))


def test_free_ports_come_in_a_row() -> None:
    port = free_port("127.0.0.1", 3)
    assert 1024 <= port <= 65535 - 2
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.7")


class Recording(LocalHosts):
    """This machine, keeping what it is asked to start, and starting another command."""

    def __init__(self, *started: str) -> None:
        super().__init__(["a", "b", "c"])
        self.started = list(started or ["true"])
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def start(self, host: str, name: str, command: list[str], log: Path, **kept: Any) -> Any:
        self.commands.append(command)
        self.environments.append(kept.get("environment") or {})
        return super().start(host, name, self.started, log, **kept)

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 0, "5001\n", "")

    def wait_for_port(self, *about: Any) -> bool:
        return True

    wait_for_connection = wait_for_port


@pytest.mark.parametrize(("kind", "cap"), [("iperf", "--fq-rate 2500000000"), ("consistent", "--pacing 5000000000bit")])
def test_the_sender_is_capped_and_never_asked_for_more(tmp_path: Path, kind: str, cap: str) -> None:
    plan, hosts = plan_of(tmp_path), Recording()
    cross = CrossTraffic(plan, kind, hosts, cluster_roles(plan, plain()), tmp_path / "run")
    cross.start_receiver()
    cross.start_sender(4e9, "001", 1.0, streams=2)
    assert cap in " ".join(hosts.commands[-1])
    if kind == "iperf":  # it ends by itself after the step's time, whoever is left to tell it
        assert "--time 1 " in " ".join(hosts.commands[-1])
    else:
        assert PlanFile(tmp_path / "run/nodes/c/sent/001.plan").duration_ns == 10**9
    with pytest.raises(UsageError, match="more than the plan's most_load"):
        cross.start_sender(5.1e9, "002", 1.0)
    assert len(hosts.commands) == 2
    # a share of the capacity may come out a little above what the plan, which is rounded, was found to ask for
    cross.start_sender(5e9 + 1e-6, "003", 1.0, streams=2)
    hosts.close()


def test_a_sweeps_token_is_in_no_command_line(tmp_path: Path) -> None:
    plan, hosts = plan_of(tmp_path), Recording()
    cross = CrossTraffic(plan, "consistent", hosts, cluster_roles(plan, plain()), tmp_path / "run")
    cross.start_receiver()
    cross.start_sender(4e9, "001", 1.0, streams=2)
    (token,) = {environment["RINGTAP_TOKEN"] for environment in hosts.environments}
    assert len(token) >= 16
    assert not [command for command in hosts.commands if token in " ".join(command)]
    hosts.close()


class Unconnected(Recording):
    """The same, but no sender connects."""

    def wait_for_connection(self, *about: Any) -> bool:
        return False


def test_a_sender_that_does_not_connect_is_named(tmp_path: Path) -> None:
    plan, hosts = plan_of(tmp_path), Unconnected("sleep", "60")
    cross = CrossTraffic(plan, "consistent", hosts, cluster_roles(plan, plain()), tmp_path / "run")
    cross.start_receiver()
    words = "the consistent sender on c has not connected to port 5001 of its receiver within 60 s: no output$"
    with pytest.raises(MeasurementError, match=words):
        cross.start_sender(4e9, "001", 1.0)
    hosts.close()


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (
            {"receiver": "kill -9 $$", "sender": "echo no receiver answers; exit 1"},
            "receiver on a ended early: SIGKILL",
        ),
        ({"receiver": "sleep 60", "sender": "kill -9 $$"}, "sender on c ended early: SIGKILL ended it, without output"),
        ({"receiver": "sleep 60", "sender": "exit 3"}, "sender on c ended early: no output, exit code 3"),
        ({"receiver": "sleep 60", "sender": "echo gone >&2; exit 1"}, "sender on c ended early: gone"),
    ],
)
def test_who_of_the_cross_traffic_has_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: dict[str, str], words: str
) -> None:
    wait_s = 0.01 if "sleep" in ends["receiver"] else 20.0
    monkeypatch.setattr("ringtap.agents.sweep.cross_traffic._RECEIVER_S", wait_s)
    plan, hosts = plan_of(tmp_path), Recording()
    cross = CrossTraffic(plan, "consistent", hosts, cluster_roles(plan, plain()), tmp_path / "run")
    hosts.started = ["sh", "-c", ends["receiver"]]
    cross.start_receiver()
    hosts.started = ["sh", "-c", ends["sender"]]
    cross.start_sender(4e9, "001", 1.0)
    assert cross._sender is not None
    assert cross._sender.has_ended(20)
    with pytest.raises(MeasurementError, match=f"the consistent {words}"):
        cross.check()
    hosts.close()


class Saying(LocalHosts):
    """Three hosts that answer everything with the same words."""

    def __init__(self, words: str) -> None:
        super().__init__(["a", "b", "c"])
        self.words = words
        self.asked: list[list[str]] = []

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> "subprocess.CompletedProcess[str]":
        self.asked.append(command)
        return subprocess.CompletedProcess(command, 0, self.words, "")


@pytest.mark.parametrize(
    "words",
    ["", "x", "[]", "{}", "null", "1e999", "-1", "70000", '"a"', "[" * 100_000, '{"interfaces": 3}', '{"failed": 1}'],
    ids=lambda words: words[:20],
)
def test_hosts_that_answer_anything_are_named_in_a_sentence(tmp_path: Path, words: str) -> None:
    plan, hosts = plan_of(tmp_path, PLAN.replace("iperf", "consistent")), Saying(words)
    for one in ask_hosts(plan, hosts):
        assert f"host {one.host} gives an answer that cannot be understood" in " ".join(one.problems)
    for ask in (
        lambda: cross_free_port(hosts, "a", "10.0.0.1"),
        lambda: check_reachability(cluster_roles(plan, plain()), hosts),
        lambda: check_host(plan, False, lambda _: None, hosts),
    ):
        with pytest.raises(MeasurementError, match=r"host [abc] gives an answer that cannot be understood"):
            ask()


def test_connections_that_fail_alike_are_told_together_and_the_remedy_once(tmp_path: Path) -> None:
    stage = replace(cluster_roles(plan_of(tmp_path), plain()), kernel_ports={"a": ["32768", "60999"]})
    address = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}

    def way(one: str, other: str) -> TcpPath:
        return TcpPath(one, address[one], other, address[other], "training")

    failed = {way("b", "a"): "No route", way("c", "a"): "No route", way("a", "b"): "slow", way("a", "c"): "slow"}
    at = dict(zip(failed, (7001, 7001, 7002, 7003), strict=True))
    assert _sentences(stage, {}, at) == []
    assert _sentences(stage, failed, at) == [
        "b and c cannot reach a (10.0.0.1, TCP port 7001) for training: No route",
        (
            "a cannot reach b (10.0.0.2, TCP port 7002) and c (10.0.0.3, TCP port 7003) for training: slow; "
            "open the ports that the kernel picks (32768-60999, net.ipv4.ip_local_port_range) and the ports that the "
            "kernel picks between these hosts"
        ),
    ]


def test_a_host_whose_interpreter_lacks_what_another_host_has_is_named(tmp_path: Path) -> None:
    jobs = {name: {"jobs": {"own": {"problems": [], "torch": name == "a"}}} for name in "ab"}
    answers = [HostAnswer(name, facts, ()) for name, facts in jobs.items()]
    pythons = {"a": "/conda/python", "b": "/usr/bin/python3"}
    assert _torch_problems(answers[0], answers, pythons) == []
    assert _torch_problems(answers[1], answers, pythons) == [
        (
            "host b, model own: the job's interpreter /usr/bin/python3 has no torch, and /conda/python on a has: "
            "install it, or name another interpreter as job_python in [[hosts]]"
        )
    ]


def test_no_question_to_a_host_shows_a_secret_of_the_plan(tmp_path: Path) -> None:
    text = PLAN.replace('command = ["true"]', 'command = ["true", "--token", "pineapple"]\nenvironment = {VARIABLES}')
    plan = plan_of(tmp_path, text.replace("VARIABLES", 'HF_TOKEN = "pineapple", LD_LIBRARY_PATH = "/opt/x"'))
    hosts = Saying("")
    ask_hosts(plan, hosts)
    questions = [" ".join(command) for command in hosts.asked]
    assert any("/opt/x" in question for question in questions)
    assert not [question for question in questions if "pineapple" in question]


class Losing(Hosts):
    """Two hosts, one of which no longer answers."""

    def __init__(self, known: bool, also: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(["a", "b"])
        self._known, self._also = known, also

    def lost(self) -> dict[str, str]:
        return {"b": "its power is off", **self._also} if self._known else {}

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> "subprocess.CompletedProcess[str]":
        if host == "b":
            raise MeasurementError("no answer")
        return subprocess.CompletedProcess(command, 0, "", "")


def test_a_failure_of_the_job_is_told_from_the_loss_behind_it() -> None:
    with pytest.raises(LostHostError, match="host b was lost: its power is off"):
        check_lost(Losing(known=True))
    check_lost(Losing(known=False))
    also = {"c": "its power  is off", "d": "no answer"}
    words = r"^hosts b, c were lost: its power is off; host d was lost: no answer$"
    with pytest.raises(LostHostError, match=words):
        check_lost(Losing(known=True, also=also))
    with pytest.raises(LostHostError, match="host b was lost: no answer"):
        check_alive(Losing(known=False))
    with (
        pytest.raises(LostHostError, match=r"host b was lost: no answer \(rank 0 ended\)"),
        losses_named(Losing(False)),
    ):
        raise MeasurementError("rank 0 ended")
    with pytest.raises(MeasurementError, match=r"^rank 0 ended$"), losses_named(LocalHosts(["a"])):
        raise MeasurementError("rank 0 ended")


def test_the_analysis_reads_a_clusters_counters(tmp_path: Path) -> None:
    write_sweep(tmp_path / "run", [("vgg16", "iperf")], loads_gbps=(0.0, 10.0))
    plain = open_run(tmp_path / "run").points

    info = read_json(tmp_path / "run" / "run.json")
    topology = {"reach": "ssh", "hosts": ["S0", "S1", "S2", "S3"], "workers": ["S0", "S1", "S3"]}
    total = [counter("S0", "eth0", "rx"), counter("S0", "cross0", "rx")]
    bottleneck = info["bottleneck"] | {"total": total, "mtu": 9000}
    edit_info(tmp_path / "run", plan=info["plan"] | {"topology": topology}, bottleneck=bottleneck)
    lacking = open_run(tmp_path / "run").points
    assert lacking["unscaled_cross_bps"].isna().all()
    assert "the MTU of cross0 of node S0 was not recorded" in lacking["reasons"].iloc[0]

    facts = {"nics": {"eth0": {"mtu": 9000}, "cross0": {"mtu": 1500}}}
    for node in (tmp_path / "run").glob("series/*/nodes/S0"):
        write_json(node / "node.json", {"before": facts})
    summed = open_run(tmp_path / "run").points
    # eth0 and cross0 together take in what the switch lets out to them
    assert list(summed["unscaled_total_bps"]) == pytest.approx(list(plain["unscaled_total_bps"]), rel=0.05)
    assert list(summed["unscaled_cross_bps"]) == pytest.approx(list(plain["unscaled_cross_bps"]), rel=0.05)

    edit_info(tmp_path / "run", bottleneck=bottleneck | {"cross": []})
    unloaded = open_run(tmp_path / "run").points
    assert list(unloaded["unscaled_cross_bps"]) == [0, 0], "nobody sent any"
    edit_info(tmp_path / "run", bottleneck={"total": total})
    assert open_run(tmp_path / "run").points["unscaled_cross_bps"].isna().all(), "not known is not none"
