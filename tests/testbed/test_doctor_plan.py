"""The doctor on every host of a plan's testbed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ringtap.agents.testbed import registry
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
COMMAND = [sys.executable, "-m", "ringtap.cli", "doctor", "--plan"]
PLAN = Path(__file__).resolve().parents[2] / "examples" / "demo.toml"


def name_of(process: "subprocess.Popen[str]") -> str:
    """The name of a doctor's testbed."""
    return f"dr{process.pid % 10**8:08d}"


def in_testbed(name: str) -> list[int]:
    """The processes that run a command on a host of a testbed."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if {"ringtap.agents.testbed.run_on_host", name} <= set(process.info["cmdline"] or ())
    ]


def test_every_host_of_a_plan_answers_for_itself() -> None:
    process = subprocess.Popen([*COMMAND, PLAN, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, out + errors
    item = json.loads(out)
    assert item["recordable"] is True
    assert item["missing"] == []
    assert [host["host"] for host in item["hosts"]] == ["S0", "S1", "S2", "S3"]
    for host in item["hosts"]:
        found = {check["name"]: check for check in host["checks"]}
        assert found["nic"]["state"] == "ok"
        assert "eth0" in found["network"]["reason"]
        assert "cross0" in found["network"]["reason"], "the host's own interfaces, not this machine's"
    assert name_of(process) not in [lab.spec.name for lab in registry.all_testbeds()]


def test_a_plan_that_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[nonsense]\nx = 1\n")
    done = subprocess.run([*COMMAND, plan], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_job_whose_script_is_not_there_cannot_run(tmp_path: Path) -> None:
    job = '[[models]]\nname = "mine"\nparameters = 1\ncommand = ["{python}", "train.py"]\n'
    (tmp_path / "plan.toml").write_text(f"[sweep]\nloads = [0]\n{job}")
    done = subprocess.run(
        [*COMMAND, "plan.toml"], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("The plan cannot run: model mine: the job's script train.py is not")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_testbed(number: signal.Signals) -> None:
    command = [*COMMAND, PLAN]
    with ended(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "asking S0\n"
        process.send_signal(number)
        assert process.wait(20) != 0
    name = name_of(process)
    end_s = time.monotonic() + 10
    while any(lab.spec.name == name and lab.alive() for lab in registry.all_testbeds()) and time.monotonic() < end_s:
        time.sleep(0.05)
    left = [lab for lab in registry.all_testbeds() if lab.spec.name == name]
    for lab in left:
        registry.remove(lab)
    assert left == []
    # the process that was in the testbed sees its end
    while in_testbed(name) and time.monotonic() < end_s:
        time.sleep(0.05)
