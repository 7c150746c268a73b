"""The doctor on every host of a plan: the plan's testbed is built, and each host asked in turn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.agents.doctor.checks import Question
from ringtap.agents.estimate import layout
from ringtap.agents.interrupt import termination_as_interrupt
from ringtap.agents.lab.up import Lab
from ringtap.errors import MeasurementError
from ringtap.plan import load_plan

_HOST_S = 20.0


def diagnose_plan(path: Path, question: Question, say: Callable[[str], None]) -> dict[str, Any]:
    """Build the plan's testbed, ask every host, take the testbed down.

    Returns:
        ``plan``, ``recordable`` (every worker can be recorded, and the plan's tools are there), ``missing`` (tools of
        the plan that are not there) and ``hosts``, a list of what `doctor.diagnose` returns, in the plan's order.

    Raises:
        UsageError: a plan that is wrong, or no testbed can be built here.
        MeasurementError: a host gave no answer.
    """
    plan = load_plan(path)
    spec, roles = layout(plan)
    spec = replace(spec, name=f"dr{os.getpid() % 10**8:08d}")
    hosts = []
    with termination_as_interrupt(), Lab(spec, verify=False):
        for host in spec.hosts:
            say(f"asking {host}")
            hosts.append(_ask(spec.name, host, question))
    missing = ["iperf3"] if "iperf" in plan.traffic and shutil.which("iperf3") is None else []
    workers = [item for item in hosts if item["host"] in roles.workers]
    return {
        "plan": plan.name,
        "recordable": not missing and all(item["recordable"] for item in workers),
        "missing": missing,
        "hosts": hosts,
    }


def _ask(lab: str, host: str, question: Question) -> dict[str, Any]:
    enter = [sys.executable, "-m", "ringtap.agents.lab.enter", lab, host]
    command = [sys.executable, "-m", "ringtap.cli", "doctor", "--json", "-o", str(question.runs)]
    command += ["--python", question.python] if question.python else []
    try:
        done = subprocess.run(
            enter + command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_HOST_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"host {host} gave no answer within {_HOST_S:g} s") from error
    try:
        item = json.loads(done.stdout)
    except ValueError as error:
        words = done.stderr.strip().splitlines()
        raise MeasurementError(f"host {host} gave no answer: {words[-1] if words else 'no words'}") from error
    assert isinstance(item, dict)
    return item | {"host": host}
