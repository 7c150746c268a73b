"""Batch scripts: what a user of a cluster would have written, in words that bash reads as they were given."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.isolated_python import RUN_MODULE
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.slurm.batch_script import command_script, header, modules, words
from ringtap.slurm.site_profiles import load_site, site_names
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.slurm.submission_request import Environment, Recording, Request, Resources
from ringtap.slurm.submit_arrays import _Request, plan_script

pytestmark = pytest.mark.shares

GENERIC = load_site("generic", {})
WHOLE = Resources(
    nodes=2, tasks_per_node=4, cpus_per_task=2, gpus_per_node="h100:4", mem="64G", time="3:00:00", account="def-x"
)
MADE = Environment(None, ("cuda/12.6",), Path("/r q.txt"), Path("/w'h"))
ASKED = Request(
    command=("python", "train.py"),
    folder=Path("/code"),
    resources=Resources(),
    environment=Environment("/v/bin/python"),
)
EVERYTHING = replace(
    ASKED,
    command=("a\nb", "$c", "`d`", ""),
    resources=WHOLE,
    environment=MADE,
    recording=Recording("default,packets", "10ms,nic=1s", "p99:5s", "2GB"),
    keep=("a b/*.pt", "-x", "it's [ab]?"),
    horovod=True,
)
PLAN = """\
[sweep]
capacity = "1gbit"
loads = [0]
traffic = ["iperf"]
[cluster]
reach = "slurm"
workers = ["S0", "S1"]
[[hosts]]
name = "S0"
node = "n1"
interface = "eth0"
[[hosts]]
name = "S1"
interface = "eth0"
[[models]]
name = "vgg16"
"""
# whatever a command line can hold, bytes that are no text included
TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\udcff'\"$`\\\n\t!*")
)


def script(request: Request, run: str = "/runs/a", site: str = "generic") -> str:
    return command_script(request, load_site(site, {}), SubmitPaths(Path(run)))


@pytest.fixture
def scripts(tmp_path: Path) -> dict[str, dict[str, str]]:
    """The scripts of all sites: of commands, and of a plan with all that it may ask for."""
    (tmp_path / "plan.toml").write_text(PLAN)
    plan, paths = load_plan(tmp_path / "plan.toml"), SubmitPaths(Path('/scratch/it\'s "my" run\n$HOME'))
    found = {}
    for name in site_names({}):
        site = load_site(name, {})
        sweep = _Request(plan, Path("/a\nb $c"), WHOLE, MADE, site)
        found[name] = {
            "command": command_script(ASKED, site, paths),
            "everything": command_script(EVERYTHING, replace(site, interface="ib0"), paths),
            "array": plan_script(sweep, paths, [0, 1, 3], ["7", "8"]),
        }
    return found


def test_a_script_is_short_and_has_no_logic_of_its_own(scripts: dict[str, dict[str, str]]) -> None:
    assert len(scripts) == 9
    for text in (text for kinds in scripts.values() for text in kinds.values()):
        lines = text.splitlines()
        assert len(lines) <= 25, text
        assert not re.search(r"\btrap\b|\bfunction\b|\(\)|^\s*(if|for|while|until|case)\b|&\s*$", text, re.MULTILINE), (
            text
        )
        assert [line for line in lines if "ringtap.slurm" in line] == lines[-1:]
        assert re.match(r"exec \S*python -c '.*' ringtap\.slurm\.run_job_steps ", lines[-1])


def test_shellcheck_has_nothing_to_say(scripts: dict[str, dict[str, str]], tmp_path: Path) -> None:
    files = []
    for site, kinds in scripts.items():
        for kind, text in kinds.items():
            files.append(tmp_path / f"{site}-{kind}.sh")
            files[-1].write_text(text)
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@given(st.lists(TEXT, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_bash_reads_the_words_that_were_written(given_words: list[str]) -> None:
    text = words(given_words)
    assert "\n" not in text
    line = f"printf '%s\\0' {text}".encode(errors="surrogateescape")
    done = subprocess.run(["bash"], input=line, capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode(errors="surrogateescape") + b"\0" for word in given_words)


def test_the_header_has_what_is_asked_for_and_no_more() -> None:
    asked = Resources(nodes=2, time="1-0", account="def-x", sbatch=("--partition=debug", "qos=high"), drop=("signal",))
    assert [line.removeprefix("#SBATCH --") for line in header(asked, ["requeue"])] == [
        "job-name=ringtap",
        "account=def-x",
        "time=1-0",
        "nodes=2",
        "ntasks-per-node=1",
        "requeue",
        "partition=debug",
        "qos=high",
    ]


def test_a_module_takes_the_place_of_the_sites_own() -> None:
    environment = Environment("/v/bin/python", ("python/3.12", "cuda/12.6"))
    (line,) = modules(load_site("narval", {}), environment)
    assert line == "module load StdEnv/2023 python/3.12 cuda/12.6 || exit"
    assert modules(GENERIC, ASKED.environment) == []


def test_a_sites_interface_is_that_of_gloo_and_nccl() -> None:
    assert "IFNAME" not in script(ASKED)
    text = command_script(ASKED, replace(GENERIC, interface="ib0"), SubmitPaths(Path("/r")))
    assert "\nexport GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0\n" in text


def test_an_environment_is_made_only_where_one_is_wanted() -> None:
    text = script(ASKED)
    assert "pip" not in text
    last = "/runs/a --collect=default --every=100ms --grace=60 -- python train.py"
    assert text.endswith(
        f"\nexport PATH=/v/bin:\"$PATH\"\nexec /v/bin/python -c '{RUN_MODULE}' ringtap.slurm.run_job_steps {last}\n"
    )
    text = script(replace(ASKED, environment=Environment(None, (), Path("/r.txt"), Path("/wheels"))), site="rorqual")
    assert " virtualenv --no-download " in text
    wanted = "--no-index ringtap --find-links /wheels --requirement /r.txt"
    assert f" pip install --quiet --disable-pip-version-check {wanted} || exit\n" in text
    assert f"\nexec python -c '{RUN_MODULE}' ringtap.slurm.run_job_steps " in text


def test_only_what_is_asked_to_be_recorded_is_in_the_script(scripts: dict[str, dict[str, str]]) -> None:
    recorded = "--collect=default,packets --every=10ms,nic=1s --packets-around-slow=p99:5s --disk-limit=2GB --grace=60"
    assert all(f" {recorded} " in kinds["everything"] for kinds in scripts.values())
    assert not any("around-slow" in kinds["command"] or "disk-limit" in kinds["command"] for kinds in scripts.values())


def test_half_of_the_time_before_the_limit_is_for_the_job() -> None:
    for stop_before_s, grace in ((120, 60), (1, 1), (0, 30)):
        text = script(replace(ASKED, resources=Resources(stop_before_s=stop_before_s)))
        assert f" --grace={grace} -- python" in text
        assert (f"--signal=B:USR1@{stop_before_s}" in text) == bool(stop_before_s)


def test_every_sites_script_names_it(scripts: dict[str, dict[str, str]]) -> None:
    for name, kinds in scripts.items():
        assert all(f"for the site {name}." in text for text in kinds.values())


def test_the_script_in_the_documentation_is_one() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "commands" / "submit.md").read_text()
    resources = replace(
        WHOLE, job_name="ringtap-python", cpus_per_task=None, gpus_per_node="a100:4", mem=None, account="def-me"
    )
    environment = Environment("/home/me/env/bin/python")
    asked = replace(ASKED, folder=Path("/home/me/code"), resources=resources, environment=environment)
    assert f"```\n{script(asked, '/scratch/me/runs/first', 'narval')}```\n" in page
