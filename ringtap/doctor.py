"""Implements ``ringtap doctor``: checks this node, a site's facts, or every host of a plan."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringtap.agents.doctor.run_checks import NEEDED, Question, diagnose, run_apart
from ringtap.agents.hosts import Hosts, TestbedHosts
from ringtap.agents.job.foreground_command import termination_as_interrupt
from ringtap.agents.sweep.cluster_preflight import (
    HostAnswer,
    ask_hosts,
    cluster_roles,
    local_job_problems,
    needs_iperf3,
)
from ringtap.agents.sweep.host_connections import reached
from ringtap.agents.sweep.sweep_estimate import layout
from ringtap.agents.sweep.sweep_lock import lease_problem
from ringtap.agents.sweep.tcp_reachability import check_reachability
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.collectors.registry import plug_in_names
from ringtap.core.command_options import add_json
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.json_validation import check, parse_json
from ringtap.core.run_directory_schema import NOT_NEEDED
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from ringtap.core.terminal_escaping import shell_word, unguarded, visible

_HOST_S = 20.0
_REPORT = {
    **dict.fromkeys(("ringtap", "host", "user", "kernel", "python"), str),
    "uid": int,
    "recordable": bool,
    "checks": [dict.fromkeys(("group", "name", "state", "reason", "remedy"), str)],
}


def diagnose_plan(path: Path, question: Question, say: Callable[[str], None]) -> dict[str, Any]:
    """Check every host of a plan.

    Returns:
        ``plan``, ``recordable`` (every worker can be recorded, and no other problem prevents the plan from running),
        ``missing`` (missing programs of a plan on a testbed), ``problems`` (all reasons that the plan cannot run, one
        sentence each) and ``hosts``, a list of results of `ringtap.agents.doctor.run_checks.diagnose` in the plan's
        order; a host of a cluster without a usable answer is left out.

    Raises:
        UsageError: the plan is wrong, or no testbed can be built here.
        MeasurementError: a host of a testbed did not answer.
    """
    plan = load_plan(path)
    workers, problems, silent = plan.topology.workers, [], set()
    missing = []
    with termination_as_interrupt(), _hosts_of(plan) as hosts:
        if isinstance(plan.topology, Cluster):
            say(f"calling {', '.join(hosts.names)}")
            answers = ask_hosts(plan, hosts)
            problems = [problem for answer in answers for problem in answer.problems]
            with suppress(AttributeError):  # a host may send anything
                users = lease_problem({answer.host: answer.facts.get("lease", {}) for answer in answers})
                problems += [users] if users else []
            silent = {answer.host for answer in answers if not answer.facts}
            if not problems:
                say("trying the connections between them")
                problems = _connection_problems(plan, hosts, answers)
        else:
            workers = layout(plan)[1].workers
            if needs_iperf3(plan) and shutil.which("iperf3") is None:
                missing = ["iperf3"]
                problems = ["iperf3 is not on the PATH: install it, or plan without it"]
            problems += local_job_problems(plan)
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
    return {"plan": plan.name, "recordable": not problems, "missing": missing, "problems": problems, "hosts": found}


def _connection_problems(plan: SweepPlan, hosts: Hosts, answers: Sequence[HostAnswer]) -> list[str]:
    try:
        return check_reachability(cluster_roles(plan, answers), hosts)
    except (UsageError, MeasurementError) as error:
        return [str(error)]


def _unrecordable(item: dict[str, Any]) -> str:
    """Return the reason that a worker cannot record a job, or that this is not known."""
    needed = [check for check in item["checks"] if check["name"] in NEEDED and check["state"] != "ok"]
    why = "; ".join(f"{check['name']}: {check['reason']}" for check in needed)
    host = item["host"]
    words = f"cannot tell whether host {host} can" if _is_unknown(item) else f"host {host} cannot"
    return f"{words} record a job" + (f" ({why})" if why else "")


def _is_unknown(report: dict[str, Any]) -> bool:
    """Return True if checks on which the verdict depends gave no answer, and the others found nothing missing."""
    states = {check["state"] for check in report["checks"] if check["name"] in NEEDED}
    return "failed" in states and "unavailable" not in states


@contextmanager
def _hosts_of(plan: SweepPlan) -> Iterator[Hosts]:
    if isinstance(plan.topology, Cluster):
        with reached(plan.topology, all_needed=False) as hosts:
            yield hosts
        return
    spec = replace(layout(plan)[0], name=f"dr{os.getpid() % 10**8:08d}")
    with RunningTestbed(spec, verify=False), closing(TestbedHosts(spec)) as hosts:
        yield hosts


def _question_of(plan: SweepPlan, hosts: Hosts, host: str, question: Question) -> Question:
    """Return the question for a host: a cluster's host has its own Python, and over ssh its own folder for runs."""
    if not isinstance(plan.topology, Cluster):
        return question
    runs = Path(plan.topology.host(host).workdir or "/tmp") if plan.topology.reach == "ssh" else question.runs
    return Question(runs, question.python or hosts.python(host))


def _ask(hosts: Hosts, host: str, question: Question) -> dict[str, Any]:
    """Run ``ringtap doctor`` on a host and return its report."""
    command = [*hosts.ringtap(host), "doctor", "--json", "-o", str(question.runs)]
    command += ["--python", question.python] if question.python else []
    done = hosts.ask(host, command, _HOST_S)
    try:
        item: dict[str, Any] = parse_json(done.stdout)
        check(item, _REPORT)
    except ValueError as error:
        lines = done.stderr.strip().splitlines()
        raise MeasurementError(f"host {host} gave no answer: {lines[-1] if lines else 'no words'}") from error
    return item | {"host": host}


_COLUMNS = 80
_NAME_AT, _REASON_AT = 14, 29
_COLOURS = {"ok": "32", "degraded": "33", "unavailable": "31", "failed": "35"}
_TITLES = {"collectors": "Collectors", "run": "Run", "node": "Node", "software": "Other verbs", "site": "Site"}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``doctor`` subcommand."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}. Exit code 0: steps and interface counters of a job can be recorded; 1: they "
        "cannot, or this is not known.",
    )
    parser.add_argument("--plan", type=Path, metavar="PLAN.toml", help="ask on every host of a plan")
    parser.add_argument(
        "--site",
        metavar="SITE",
        help="check the facts of a site's profile, too: a name as for ringtap submit, or a file",
    )
    parser.add_argument("--python", default="", metavar="PROGRAM", help="the job's interpreter (default: the PATH's)")
    parser.add_argument(
        "--collector", action="append", default=[], metavar="MODULE:CLASS", help="ask a collector of your own, too"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("runs"), metavar="DIR", help="where runs would be (default: runs)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show every check")
    add_json(parser)
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    try:
        added = tuple(dict.fromkeys((*plug_in_names(), *options.collector)))
        question = Question(options.output.absolute(), options.python, added)
    except OSError as error:
        raise UsageError(f"the working directory is gone: {error.strerror}; change to another") from error
    if options.plan and options.site:
        raise UsageError("--plan asks the hosts of a plan, and --site this machine: give one of them")
    if options.plan:
        item = diagnose_plan(options.plan, question, lambda text: print(text, file=sys.stderr))
    else:
        item = _diagnose_here(question, options.site)
    if options.json:
        print(json.dumps(item))
    else:
        colour = sys.stdout.isatty()
        if options.plan:
            lines = verdict(options.plan, item["problems"])
            alike: dict[tuple[str, ...], list[str]] = {}
            for report in item["hosts"]:
                alike.setdefault(tuple(table(report, colour, options.verbose)), []).append(_plain(report["host"]))
            for rows, hosts in alike.items():
                lines += ["", *_wrap(f"{', '.join(hosts)}:"), *rows]
        else:
            more = [] if options.verbose else ["Every check: ringtap doctor -v"]
            more += ["Next: ringtap run -- YOUR COMMAND"] if item["recordable"] else []
            lines = [*table(item, colour, options.verbose), *(["", "   ".join(more)] if more else [])]
        print("\n".join(lines), file=unguarded(sys.stdout))  # with colours; other text is without control characters
    return 0 if item["recordable"] else 1


def _diagnose_here(question: Question, given: str | None) -> dict[str, Any]:
    if given is None:
        return diagnose(question)
    from ringtap.slurm.site_checks import TIMEOUT_S, site_tasks
    from ringtap.slurm.site_profiles import load_site

    site = load_site(given)
    item = diagnose(question)
    print(f"checking the facts of {site.name}: this can take a minute", file=sys.stderr)
    item["site"] = site.name
    item["checks"] += [asdict(finding) for finding in run_apart(site_tasks(site, given), TIMEOUT_S)]
    return item


def verdict(plan: Path, problems: list[str]) -> list[str]:
    """Return lines that say whether a plan can run, and what prevents it."""
    if not problems:
        return [f"The plan can run. Next: ringtap sweep {shell_word(plan)}"]
    if len(problems) == 1:
        return [f"The plan cannot run: {_plain(problems[0])}."]
    listed = [f"  {number}. {_plain(problem)}" for number, problem in enumerate(problems, 1)]
    return [f"The plan cannot run: {len(problems)} things prevent it.", *listed]


def table(report: dict[str, Any], colour: bool, every: bool = False) -> list[str]:
    """Format a report as lines of at most 80 columns: the verdict, what is lacking, and what is fine.

    Args:
        report: as from `ringtap.agents.doctor.run_checks.diagnose`.
        colour: colour the states.
        every: show every check.
    """
    lines, checks = _wrap(_plain(_verdict(report))), report["checks"]
    if every:
        for group in dict.fromkeys(item["group"] for item in checks):
            lines += ["", _plain(_TITLES.get(group, group))]
            for item in checks:
                lines += _rows([item], colour) if item["group"] == group else []
        return [*lines, "", *_about(report)]
    lacking = [item for item in checks if item["state"] != "ok"]
    elsewhere = [item["name"] for item in lacking if item["remedy"].startswith(NOT_NEEDED)]
    by_remedy: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for number, item in enumerate(lacking):
        if item["name"] not in elsewhere:  # what one remedy mends is one row
            by_remedy.setdefault((item["remedy"],) if item["remedy"] else ("", str(number)), []).append(item)
    for rows in by_remedy.values():
        lines += ["", *_rows(rows, colour)]
    fine = [item["name"] for item in checks if item["state"] == "ok"]
    lines += ["", *_wrap(_plain(f"Fine: {', '.join(fine) or 'nothing'}."))]
    only = _plain(f"Only where there is such a device or job: {', '.join(elsewhere)}.")
    lines += _wrap(only) if elsewhere else []
    return lines


def _about(report: dict[str, Any]) -> list[str]:
    about = (
        f"ringtap {report['ringtap']} on {report['host']}, user {report['user']} ({report['uid']}), "
        f"kernel {report['kernel']}, Python {report['python']}"
    )
    return _wrap(_plain(about))


def _rows(checks: Sequence[dict[str, str]], colour: bool) -> list[str]:
    """Return the lines of checks with one remedy."""
    first, *others = checks
    reason = _plain(first["reason"]) or "-"
    reason += f" (also: {', '.join(_plain(item['name']) for item in others)})" if others else ""
    rows = _wrap(reason, _REASON_AT)
    if first["remedy"]:
        remedy = _wrap(_plain(first["remedy"]), _REASON_AT + 3)
        rows += [f"-> {remedy[0]}", *(f"   {row}" for row in remedy[1:])]
    word = _plain(first["state"]).ljust(_NAME_AT - 3)
    if colour:
        word = f"\033[{_COLOURS.get(first['state'], '0')}m{word}\033[0m"
    head = f"  {word} {_plain(first['name']).ljust(_REASON_AT - _NAME_AT - 1)} {rows[0]}"
    return [head, *(" " * _REASON_AT + row for row in rows[1:])]


def _wrap(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _COLUMNS - indent, break_on_hyphens=False) or [""]


def _plain(text: str) -> str:
    """Return text from a driver, a file or another host as one line without control characters."""
    return visible(" ".join(text.split()))


def _verdict(report: dict[str, Any]) -> str:
    if _is_unknown(report):
        return "Cannot tell whether a job can be recorded here: steps or nic gave no answer, see below."
    if not report["recordable"]:
        return "A job cannot be recorded here: see steps and nic below."
    steps = next((check for check in report["checks"] if check["name"] == "steps"), {"state": "ok"})
    limits = "" if steps["state"] == "ok" else f", but {_plain(steps['reason'])}"
    return f"A job can be recorded here{limits}."
