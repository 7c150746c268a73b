"""What a job may ask a site for, and the sentence that refuses the rest."""

from dataclasses import replace

import pytest

from ringtap.core.errors import UsageError
from ringtap.slurm.site_profiles import load_site
from ringtap.slurm.submission_request import (
    Environment,
    Resources,
    check_resources,
    describe_resources,
    parse_time_s,
)

pytestmark = pytest.mark.shares

WHOLE = Resources(time="3:00:00", account="def-x")


def check(site: str, resources: Resources = WHOLE, environment: dict[str, str] | None = None) -> Resources:
    return check_resources(resources, load_site(site, {}), environment or {})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("3:00:00", 10_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("2-00:00:01", 172_801),
    ],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "3h", "one", "1:2:3:4", "-5", "1-", "3 hours", "1.5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time: write it as Slurm does"):
        check("generic", replace(WHOLE, time=text) if text else replace(WHOLE, time=" "))


@pytest.mark.parametrize(
    ("site", "asked", "given"),
    [
        ("narval", "4", "a100:4"),
        ("narval", "a100:1", "a100:1"),
        ("tamia", "8", "h200:8"),
        ("tamia", "4", "h100:4"),
        ("killarney", "8", "h100:8"),
        ("killarney", "2", "l40s:2"),
        ("generic", "2", "2"),
        ("generic", "gtx:2", "gtx:2"),
        # a slice of a GPU: Slurm knows them
        ("nibi", "nvidia_h100_80gb_hbm3_1g.10gb:1", "nvidia_h100_80gb_hbm3_1g.10gb:1"),
    ],
)
def test_gpus_get_the_sites_type(site: str, asked: str, given: str) -> None:
    assert check(site, replace(WHOLE, gpus_per_node=asked)).gpus_per_node == given


@pytest.mark.parametrize(
    ("site", "change", "words"),
    [
        ("narval", {"account": None}, "narval wants a job to have --account"),
        ("trillium", {"time": None}, r"trillium wants a job to have --time: add it \(at most 1-00:00:00\)"),
        ("narval", {"time": "8-0"}, "--time 8-0 is longer than narval allows: 7-00:00:00 at most"),
        ("generic", {"time": "2"}, "--time 2 leaves nothing before the stop 120 s ahead of it"),
        ("narval", {"gpus_per_node": "5"}, r"5 is not what a job gets on a node of narval \(a100: 1 or 2 or 3 or 4\)"),
        ("trillium", {"gpus_per_node": "2"}, r"is not what a job gets on a node of trillium \(h100: 1 or 4\)"),
        ("tamia", {"gpus_per_node": "h200:4"}, r"\(h200: 8\)"),
        ("narval", {"gpus_per_node": "h100:2"}, "narval has no GPUs of type 'h100': did you mean a100"),
        ("narval", {"gpus_per_node": "many"}, "'many' is not understood"),
        ("narval", {"gpus_per_node": "0"}, "'0' is not understood"),
        (
            "narval",
            {"tasks_per_node": 13, "cpus_per_task": 5},
            "you ask for 65 cores per node, and a node of narval has 64",
        ),
        (
            "narval",
            {"tasks_per_node": 49, "gpus_per_node": "1"},
            "you ask for 49 cores per node, and a node of narval with a100 has 48",
        ),
        ("generic", {"nodes": 0}, "--nodes 0 is not a number from 1 on"),
        ("generic", {"mem": "much"}, "--mem 'much' is not a size"),
        ("generic", {"drop": ("memory",)}, "--drop 'memory' is not a directive that ringtap writes: did you mean mem"),
        ("generic", {"job_name": "a\nb"}, "--job-name .* has a character that a line of a batch script cannot hold"),
        ("generic", {"sbatch": ("x\ty",)}, "--sbatch .* has a character"),
        ("generic", {"sbatch": ("--",)}, "--sbatch '--' is not a directive"),
        ("generic", {"sbatch": ("array=0-2",)}, "--sbatch array=0-2: the tasks of an array are jobs of their own"),
        ("generic", {"sbatch": ("--array 1,2",)}, "the tasks of an array"),
        ("generic", {"sbatch": ("-a0-2",)}, "the tasks of an array"),
        ("generic", {"stop_before_s": -1}, "--stop-before takes a time from 0 on"),
    ],
)
def test_what_a_site_cannot_give_is_refused_in_one_sentence(site: str, change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        check(site, replace(WHOLE, **change))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_account_and_time_may_be_set_in_the_environment_or_dropped() -> None:
    variables = {"SBATCH_ACCOUNT": "def-y", "SBATCH_TIMELIMIT": "60"}
    found = check("narval", Resources(), variables)
    assert (found.account, found.time) == ("def-y", "60")
    found = check("narval", WHOLE, variables)
    assert (found.account, found.time) == ("def-x", "3:00:00")
    assert check("narval", replace(WHOLE, account=None, drop=("account",))).account is None
    check("trillium", replace(WHOLE, account=None))
    check("generic", Resources())


def test_the_user_is_told_what_a_job_gets_and_when_it_is_stopped() -> None:
    asked = Resources(nodes=2, time="1:00:00", stop_before_s=90)
    told = describe_resources(asked, Environment(None))
    assert told == (
        "2 nodes, 1 task per node, time limit 1:00:00, stopped 90 s before the time limit, "
        "a Python environment made on each node"
    )
    assert "stopped" not in describe_resources(replace(asked, stop_before_s=0), Environment(None))
