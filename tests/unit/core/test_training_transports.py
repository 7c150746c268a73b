"""Transports in a plan: labels, the variables that they imply, and plans that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.sweep.sweep_estimate import estimate, series_names
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from ringtap.core.training_transports import VARIABLES, carrier_of, is_rdma, label_problem

pytestmark = pytest.mark.computes

CLUSTER: dict[str, Any] = {
    "cluster": {"reach": "ssh", "workers": ["a", "b"]},
    "hosts": [{"name": "a", "training": "10.0.0.1"}, {"name": "b", "training": "10.0.0.2"}],
}
OWN = {"name": "mine", "parameters": 1, "command": ["train"]}


def plan_of(*models: dict[str, Any], traffic: tuple[str, ...] = ("iperf",), real: bool = True) -> SweepPlan:
    sweep: dict[str, Any] = {"loads": [0], "traffic": traffic}
    if not real:
        return load_plan({"sweep": sweep, "models": models})
    return load_plan(CLUSTER | {"sweep": sweep | {"capacity": 25e9}, "models": models})


def test_a_model_stands_once_per_transport_in_series_of_their_own() -> None:
    plan = plan_of(*({"name": "resnet50", "transport": label} for label in ("tcp", "tcp-small-window")), real=False)
    names = ["resnet50-iperf-tcp", "resnet50-iperf-tcp-small-window"]
    assert series_names(plan) == [point["series"] for point in estimate(plan)] == names
    assert [model.environment for model in plan.models] == [VARIABLES["tcp"]] * 2
    assert [model.label for model in plan.models] == ["resnet50 over tcp", "resnet50 over tcp-small-window"]


def test_a_model_without_a_transport_is_as_before() -> None:
    plan = plan_of({"name": "resnet50"}, real=False)
    assert (series_names(plan), plan.models[0].environment) == (["resnet50-iperf"], {})


def test_a_transport_implies_variables_that_a_plan_may_give() -> None:
    rdma = plan_of(OWN | {"transport": "rdma", "environment": {"NCCL_NET": "AWS Libfabric"}}).models[0]
    assert rdma.environment == {"NCCL_IB_DISABLE": "0", "NCCL_NET": "AWS Libfabric"}
    horovod = plan_of(OWN | {"transport": "rdma", "framework": "horovod"}).models[0]
    assert horovod.environment == VARIABLES["rdma"]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (({"name": "resnet50", "transport": "rmda"},), "is not a transport: did you mean .rdma."),
        (({"name": "resnet50", "transport": "cubic"},), "is not a transport: give tcp or rdma, or a label that begins"),
        (({"name": "resnet50", "transport": "TCP"},), "did you mean .tcp.[?] give tcp or rdma"),
        (({"name": "resnet50", "transport": "tcp-a/b"},), "is not a transport"),
        (({"name": "resnet50", "transport": "rdma"},), "the scale model synchronises over gloo, which has TCP only"),
        ((OWN | {"transport": "rdma", "environment": {"NCCL_IB_DISABLE": 1}},), "NCCL_IB_DISABLE = '1' contradicts"),
        ((OWN | {"transport": "tcp", "environment": {"NCCL_NET": "IB"}},), "NCCL_NET = 'IB' contradicts it"),
        (({"name": "vgg16", "transport": "tcp"},) * 2, "two models have the same name, vgg16 over tcp: give each a"),
        (
            ({"name": "vgg16", "transport": "tcp"}, {"name": "vgg16", "layers": 4, "transport": "tcp-b"}),
            "two models named vgg16 differ in more than their transport",
        ),
        (
            (OWN | {"name": "a", "transport": "tcp-burst"}, OWN | {"name": "a-iperf-tcp"}),
            "two series have the name a-iperf-tcp-burst",
        ),
    ],
)
def test_what_cannot_be_measured_or_told_apart_is_refused(models: tuple[dict[str, Any], ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(*models, traffic=("iperf", "burst"))


def test_a_testbed_has_no_rdma() -> None:
    with pytest.raises(UsageError, match="model mine over rdma: a testbed's links carry TCP only"):
        plan_of(OWN | {"transport": "rdma"}, real=False)


def test_a_hosts_variables_may_not_contradict_a_transport_either() -> None:
    hosts = [CLUSTER["hosts"][0], CLUSTER["hosts"][1] | {"environment": {"NCCL_NET": "Socket"}}]
    plan = CLUSTER | {"sweep": {"loads": [0], "capacity": 25e9}, "models": [OWN | {"transport": "rdma"}]}
    with pytest.raises(UsageError, match="NCCL_NET = 'Socket' on b contradicts it"):
        load_plan(plan | {"hosts": hosts})


def test_a_dry_run_prints_the_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[sweep]\nloads = [0]\n[[models]]\nname = "vgg16"\ntransport = "tcp-a"\nenvironment = { API_KEY = "x" }\n'
    (tmp_path / "plan.toml").write_text(text)
    assert main(["sweep", str(tmp_path / "plan.toml"), "--dry-run"]) == 0
    assert "\nvgg16 over tcp-a: NCCL_IB_DISABLE=1 NCCL_NET=Socket API_KEY=***\n" in capsys.readouterr().out
    assert main(["sweep", str(tmp_path / "plan.toml"), "--dry-run", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["transports"]
    assert (shown["model"], shown["transport"]) == ("vgg16", "tcp-a")
    assert shown["environment"] == VARIABLES["tcp"] | {"API_KEY": "***"}


@pytest.mark.parametrize("label", ["tcp", "rdma", "tcp-bbr", "rdma-mtu.4096-b"])
def test_labels_begin_with_what_they_are(label: str) -> None:
    assert label_problem(label) == ""
    assert is_rdma(label) == label.startswith("rdma")
    assert carrier_of(label) in VARIABLES
