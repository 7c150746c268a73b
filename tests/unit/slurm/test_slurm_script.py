"""Batch scripts: words survive bash, shellcheck has nothing to say, and the pieces say what was asked for."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.slurm.paths import SubmitPaths
from ringtap.slurm.request import Environment, Request, Resources
from ringtap.slurm.script import command_script, header, modules, words
from ringtap.slurm.sites import load_site, site_names

GENERIC = load_site("generic", {})
ASKED = Request(
    command=("python", "train.py"),
    folder=Path("/code"),
    resources=Resources(),
    environment=Environment("/v/bin/python"),
)
# whatever a command line can hold, bytes that are no text included
TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\udcff'\"$`\\\n\t!*")
)


def script(request: Request, run: str = "/runs/a", site: str = "generic") -> str:
    return command_script(request, load_site(site, {}), SubmitPaths(Path(run)))


@given(st.lists(TEXT, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_bash_reads_the_words_that_were_written(given_words: list[str]) -> None:
    text = words(given_words)
    assert "\n" not in text
    line = f"printf '%s\\0' {text}".encode(errors="surrogateescape")
    done = subprocess.run(["bash"], input=line, capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode(errors="surrogateescape") + b"\0" for word in given_words)


@pytest.mark.parametrize(
    ("request_", "site"),
    [
        (ASKED, "generic"),
        (
            replace(ASKED, horovod=True, keep=("a b/*.pt", "-x", "it's [ab]?"), command=("a\nb", "$c", "`d`", "")),
            "narval",
        ),
        (replace(ASKED, environment=Environment(None, ("cuda",), Path("/r q.txt"), Path("/w'h"))), "fir"),
        (replace(ASKED, resources=Resources(stop_before_s=0, cpus_per_task=3), folder=Path("/a\nb $c")), "trillium"),
    ],
    ids=["plain", "everything", "offline", "unstopped"],
)
def test_shellcheck_has_nothing_to_say(request_: Request, site: str) -> None:
    text = script(request_, '/scratch/it\'s "my" run\n$HOME', site)
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_header_has_what_is_asked_for_and_no_more() -> None:
    asked = Resources(nodes=2, time="1-0", account="def-x", sbatch=("--partition=debug", "qos=high"), drop=("signal",))
    lines = header(asked, GENERIC).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=ringtap",
        "account=def-x",
        "time=1-0",
        "nodes=2",
        "ntasks-per-node=1",
        "partition=debug",
        "qos=high",
    ]


def test_a_module_takes_the_place_of_the_sites_own() -> None:
    environment = Environment("/v/bin/python", ("python/3.12", "cuda/12.6"))
    assert modules(load_site("narval", {}), environment).split("||")[0].split() == [
        *("module", "load", "StdEnv/2023", "python/3.12", "cuda/12.6")
    ]
    assert modules(GENERIC, ASKED.environment) == ""


def test_a_sites_interface_is_that_of_gloo_and_nccl() -> None:
    assert "IFNAME" not in script(ASKED)
    text = command_script(ASKED, replace(GENERIC, interface="ib0"), SubmitPaths(Path("/r")))
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in text


def test_an_environment_is_made_only_where_one_is_wanted() -> None:
    assert "pip" not in script(ASKED)
    offline = replace(ASKED, environment=Environment(None, (), Path("/r.txt"), Path("/wheels")))
    text = script(offline, site="rorqual")
    assert 'virtualenv --no-download "$SLURM_TMPDIR/env"' in text
    assert "pip install --quiet --disable-pip-version-check --no-index --find-links /wheels ringtap" in text


def test_every_sites_script_names_it() -> None:
    for name in site_names({}):
        assert f"for the site {name}." in script(ASKED, site=name)
