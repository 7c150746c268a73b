"""``ringtap doctor``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.terminal import shell_word, unguarded, visible

_COLUMNS = 80
_NAME_AT, _REASON_AT = 11, 26
_WORDS = {"ok": "ok", "degraded": "less", "unavailable": "no", "failed": "broken"}
_COLOURS = {"ok": "32", "degraded": "33", "unavailable": "31", "failed": "35"}
_TITLES = {"collectors": "Collectors", "run": "Run", "node": "Node", "software": "Other verbs"}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}. Exit code 0: steps and interface counters of a job can be recorded; 1: they cannot.",
    )
    parser.add_argument("--plan", type=Path, metavar="PLAN.toml", help="ask on every host of a plan")
    parser.add_argument("--python", default="", metavar="PROGRAM", help="the job's interpreter (default: the PATH's)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("runs"), metavar="DIR", help="where runs would be (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ringtap.agents.doctor.checks import Question, diagnose

    try:
        question = Question(options.output.absolute(), options.python)
    except OSError as error:
        raise UsageError(f"the working directory is gone: {error.strerror}; change to another") from error
    if options.plan:
        from ringtap.agents.doctor.plan import diagnose_plan

        item = diagnose_plan(options.plan, question, lambda text: print(text, file=sys.stderr))
        reports = item["hosts"]
    else:
        item = diagnose(question)
        reports = [item]
    if options.json:
        print(json.dumps(item))
    else:
        colour = sys.stdout.isatty()
        text = "\n\n".join("\n".join(table(report, colour)) for report in reports)
        print(text, file=unguarded(sys.stdout))  # with colours; what others said in it is made plain there
        if options.plan:
            print("\n" + "\n".join(verdict(options.plan, item["problems"])))
    return 0 if item["recordable"] else 1


def verdict(plan: Path, problems: list[str]) -> list[str]:
    """Say in the last line that a plan can run, or name the first obstacle."""
    if not problems:
        return [f"The plan can run. Next: ringtap sweep {shell_word(plan)}"]
    if len(problems) == 1:
        return [f"The plan cannot run: {_plain(problems[0])}."]
    listed = [f"  {number}. {_plain(problem)}" for number, problem in enumerate(problems, 1)]
    return [*listed, "", f"The plan cannot run: {len(problems)} things prevent it, the first: {_plain(problems[0])}."]


def table(report: dict[str, Any], colour: bool) -> list[str]:
    """A report as lines of at most 80 columns."""
    about = (
        f"ringtap {report['ringtap']} on {report['host']}, user {report['user']} ({report['uid']}), "
        f"kernel {report['kernel']}, Python {report['python']}"
    )
    lines = textwrap.wrap(_plain(about), _COLUMNS)
    group = ""
    for check in report["checks"]:
        if check["group"] != group:
            group = check["group"]
            lines += ["", _plain(_TITLES.get(group, group))]
        lines += _rows(check, colour)
    return [*lines, "", *textwrap.wrap(_plain(_verdict(report)), _COLUMNS)]


def _rows(check: dict[str, str], colour: bool) -> list[str]:
    reason = _plain(check["reason"]) or "-"
    rows = _wrap(reason, _REASON_AT)
    if check["remedy"]:
        remedy = _wrap(_plain(check["remedy"]), _REASON_AT + 3)
        rows += [f"-> {remedy[0]}", *(f"   {row}" for row in remedy[1:])]
    word = _plain(_WORDS.get(check["state"], check["state"])).ljust(_NAME_AT - 3)
    if colour:
        word = f"\033[{_COLOURS.get(check['state'], '0')}m{word}\033[0m"
    first = f"  {word} {_plain(check['name']).ljust(_REASON_AT - _NAME_AT - 1)} {rows[0]}"
    return [first, *(" " * _REASON_AT + row for row in rows[1:])]


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _COLUMNS - indent, break_on_hyphens=False) or [""]


def _plain(text: str) -> str:
    """A text of a driver, a file or another host as one line without control characters."""
    return visible(" ".join(text.split()))


def _verdict(report: dict[str, Any]) -> str:
    less = [check["name"] for check in report["checks"] if check["state"] != "ok" and check["group"] == "collectors"]
    if not report["recordable"]:
        return "A job cannot be recorded here: see steps and nic above."
    rest = f" Missing or less than it could be: {', '.join(less)}." if less else ""
    return f"A job can be recorded here.{rest} Next: ringtap run -- YOUR COMMAND"
