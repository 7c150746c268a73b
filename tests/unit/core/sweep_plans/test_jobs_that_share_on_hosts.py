"""Plans of jobs that share links of the hosts of a cluster: what they are, and what is refused in one sentence."""

import re
from pathlib import Path

import pytest

from ringtap.agents.sweep.sweep_estimate import estimate, resolved
from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.jobs_that_share import gpus_of, sharing
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from tests.unit.core.sweep_plans.test_sweep_plan import plan_file

pytestmark = pytest.mark.computes

PLAN = """\
[sweep]
capacity = "10gbit"
offsets = ["free", "cassini"]

[cluster]
reach = "ssh"

[[hosts]]
name = "s0"
training = "10.0.0.10"

[[hosts]]
name = "s1"
training = "10.0.0.11"
ranks = 2

[[hosts]]
name = "s2"
training = "10.0.0.12"

[[jobs]]
name = "a"
model = "resnet50"
workers = ["s0", "s1"]
environment = { CUDA_VISIBLE_DEVICES = "0" }

[[jobs]]
name = "b"
model = "vgg16"
workers = ["s1", "s2"]
environment = { CUDA_VISIBLE_DEVICES = "1, 2" }
"""


def cluster_of(plan: SweepPlan) -> Cluster:
    assert isinstance(plan.topology, Cluster)
    return plan.topology


def test_the_workers_of_a_cluster_are_those_of_the_jobs(tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, PLAN))
    cluster = cluster_of(plan)
    assert (cluster.workers, cluster.cross_from, cluster.may_load) == (("s0", "s1", "s2"), "", False)
    assert (plan.scale, plan.capacity_bps) == (1.0, 10_000_000_000)
    assert {host: [job.name for job in users] for host, users in sharing(plan.jobs).items()} == {"s1": ["a", "b"]}
    assert [gpus_of(job, cluster, "s1") for job in plan.jobs] == [("0",), ("1", "2")]
    assert list(plan.models_on("s1")) == ["a", "b"]
    assert list(plan.models_on("s2")) == ["b"]
    # interface counters do not see RDMA
    assert {job.model.environment["NCCL_IB_DISABLE"] for job in plan.jobs} == {"1"}
    assert [point["series"] for point in estimate(plan)] == ["a alone", "b alone", "free", "cassini"]
    assert [machine["name"] for machine in resolved(plan)["topology"]["machines"]] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '["s1", "s2"]',
            '["s1", "s3"]',
            "line 30: jobs.workers names 's3', which is not a [[hosts]] entry; known: s0, s1, s2",
        ),
        ('capacity = "10gbit"', "", "sweep.capacity is missing"),
        ('reach = "ssh"', 'reach = "local"', '"local" has no link that jobs could share'),
        ('reach = "ssh"', 'reach = "ssh"\nworkers = ["s0"]', "cluster.workers is for [[models]]"),
        ('reach = "ssh"', 'reach = "ssh"\ncross_from = "s0"', "cluster.cross_from is for [[models]]"),
        ('reach = "ssh"', 'reach = "ssh"\nmost_load = "1gbit"', "[[jobs]] have their own workers and no cross traffic"),
        ('reach = "ssh"', 'reach = "ssh"\n\n[testbed]\nmtu = 9000', "a plan with [cluster] has no [testbed]"),
        ('"1, 2"', '"0"', "jobs.environment gives b GPU 0 of s1, which a has"),
        ("ranks = 2", "gpus = [3]", "gives b GPU 3 of s1, which a has: give each job GPUs of its own"),
        ('"vgg16"', '"vgg16"\nframework = "horovod"', '"horovod" needs the same number of ranks on every worker'),
        ('"vgg16"', '"vgg16"\ntransport = "rdma"', "jobs that share links use TCP"),
        ('DEVICES = "0"', 'DEVICES = "0", NCCL_NET = "IB"', "of s0 sets NCCL_NET = 'IB': jobs that share links use"),
        ('training = "10.0.0.12"', "", "hosts.training is missing"),
    ],
)
def test_jobs_that_hosts_cannot_have_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert PLAN.count(old) == 1
    with pytest.raises(UsageError, match=re.escape(said)):
        load_plan(plan_file(tmp_path, PLAN.replace(old, new)))
