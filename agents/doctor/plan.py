"""The doctor on every host of a plan: a testbed is built, a cluster gone to, and each host asked in turn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.agents.doctor.checks import Question
from ringtap.agents.estimate import layout
from ringtap.agents.hosts import Hosts, LabHosts
from ringtap.agents.interrupt import termination_as_interrupt
from ringtap.agents.lab.up import Lab
from ringtap.agents.lease import lease_problem
from ringtap.agents.reach import reached
from ringtap.agents.roll_call import Answer, call_roll, cluster_stage, needs_iperf3
from ringtap.agents.tcp_paths import check_ways
from ringtap.errors import MeasurementError, UsageError
from ringtap.plan import SweepPlan, load_plan
from ringtap.plan_cluster import Cluster
from ringtap.shapes import check, parse_json

_HOST_S = 20.0
_REPORT = {
    **dict.fromkeys(("ringtap", "host", "user", "kernel", "python"), str),
    "uid": int,
    "recordable": bool,
    "checks": [dict.fromkeys(("group", "name", "state", "reason", "remedy"), str)],
}


def diagnose_plan(path: Path, question: Question, say: Callable[[str], None]) -> dict[str, Any]:
    """Ask every host of a plan.

    Returns:
        ``plan``, ``recordable`` (every worker can be recorded, and nothing else keeps the plan from running),
        ``missing`` (tools of the plan that are not there), ``problems`` (what else keeps it from running, a sentence
        each) and ``hosts``, a list of what `doctor.diagnose` returns, in the plan's order; a host with a problem of
        its own is left out.

    Raises:
        UsageError: a plan that is wrong, or no testbed can be built here.
        MeasurementError: a host of a testbed gave no answer.
    """
    plan = load_plan(path)
    workers, problems, silent = plan.topology.workers, [], set()
    missing = []
    with termination_as_interrupt(), _hosts_of(plan) as hosts:
        if isinstance(plan.topology, Cluster):
            say(f"calling {', '.join(hosts.names)}")
            answers = call_roll(plan, hosts)
            problems = [problem for answer in answers for problem in answer.problems]
            with suppress(AttributeError):  # a host may say anything
                users = lease_problem({answer.host: answer.facts.get("lease", {}) for answer in answers})
                problems += [users] if users else []
            silent = {answer.host for answer in answers if not answer.facts}
            if not problems:
                say("trying the connections between them")
                problems = _ways(plan, hosts, answers)
        else:
            workers = layout(plan)[1].workers
            if needs_iperf3(plan) and shutil.which("iperf3") is None:
                missing = ["iperf3"]
                problems = ["iperf3 is not on the PATH: install it, or plan without it"]
        found = []
        for host in hosts.names:
            if host not in silent:
                say(f"asking {host}")
                try:
                    found.append(_ask(hosts, host, _question_of(plan, hosts, host, question)))
                except MeasurementError as error:
                    if not isinstance(plan.topology, Cluster):
                        raise
                    problems.append(str(error))
    problems += [_unrecordable(item) for item in found if item["host"] in workers and not item["recordable"]]
    return {
        "plan": plan.name,
        "recordable": not problems,
        "missing": missing,
        "problems": problems,
        "hosts": found,
    }


def _ways(plan: SweepPlan, hosts: Hosts, answers: Sequence[Answer]) -> list[str]:
    """Return the obstacles between hosts that are each ready by themselves."""
    try:
        return check_ways(cluster_stage(plan, answers), hosts)
    except (UsageError, MeasurementError) as error:
        return [str(error)]


def _unrecordable(item: dict[str, Any]) -> str:
    """Return the reason that a worker cannot record a job."""
    needed = [check for check in item["checks"] if check["name"] in ("steps", "nic") and check["state"] != "ok"]
    why = "; ".join(f"{check['name']}: {check['reason']}" for check in needed)
    return f"host {item['host']} cannot record a job" + (f" ({why})" if why else "")


@contextmanager
def _hosts_of(plan: SweepPlan) -> Iterator[Hosts]:
    if isinstance(plan.topology, Cluster):
        with reached(plan.topology, all_needed=False) as hosts:
            yield hosts
        return
    spec = replace(layout(plan)[0], name=f"dr{os.getpid() % 10**8:08d}")
    with Lab(spec, verify=False), closing(LabHosts(spec)) as hosts:
        yield hosts


def _question_of(plan: SweepPlan, hosts: Hosts, host: str, question: Question) -> Question:
    """The question as it is for a host: in a cluster the scale model runs by its Python, and ssh shares no files."""
    if not isinstance(plan.topology, Cluster):
        return question
    runs = Path(plan.topology.host(host).workdir or "/tmp") if plan.topology.reach == "ssh" else question.runs
    return Question(runs, question.python or hosts.python(host))


def _ask(hosts: Hosts, host: str, question: Question) -> dict[str, Any]:
    """A host's own diagnosis."""
    command = [*hosts.ringtap(host), "doctor", "--json", "-o", str(question.runs)]
    command += ["--python", question.python] if question.python else []
    done = hosts.ask(host, command, _HOST_S)
    try:
        item: dict[str, Any] = parse_json(done.stdout)
        check(item, _REPORT)
    except ValueError as error:
        words = done.stderr.strip().splitlines()
        raise MeasurementError(f"host {host} gave no answer: {words[-1] if words else 'no words'}") from error
    return item | {"host": host}
