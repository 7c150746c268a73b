"""Finds out why a job of a sweep failed: the most telling output lines of its hosts, the cause first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtap.agents.hosts import HostProcess, Hosts
from ringtap.agents.sweep.cluster_preflight import room_problem
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import AGENT_LOG
from ringtap.core.sweep_plans.sweep_plan import SweepPlan
from ringtap.core.untrusted_files import read_tail

_TAIL_BYTES = 65_536
_MAX_MESSAGE_LENGTH = 300
_FIRST_HAND = 3  # score of a line that names a cause
# messages of a rank after another rank has ended, and of a launcher after a rank has ended
_SECOND_HAND = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out waiting|\bChildFailedError\b|elastic|SIGTERM|heartbeat|"
    r"store.*timeout|remote process exited",
    re.IGNORECASE,
)
# warnings, which jobs without a failure also print; those of glog begin with a letter and the date
_WARNING = re.compile(r"(\[rank\d+\]:)?\s*\[?[IW]\d{4} |\bwarning\b|Warning:", re.IGNORECASE)
_TELLING = re.compile(
    r"\w(Error|Exception|Interrupt)\b|\berror\b|no space left|disk quota|cannot|can't|not found|no such file|"
    r"refused|denied|out of memory|killed|no route|unreachable|timed out|failed|not recorded",
    re.IGNORECASE,
)


def failure_line(text: str) -> tuple[int, str]:
    """Return the line of an output that says most about a failure.

    Returns:
        A score (3: a cause; 2: a possible consequence of a failure elsewhere; 1: other output; 0: none), and the line.
    """
    # only printable characters are kept, as an output may contain anything
    printable = "".join(character if character.isprintable() else "\n" for character in text)
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    causes = [line for line in lines if _TELLING.search(line) and not _WARNING.search(line)]
    first_hand = [line for line in causes if not _SECOND_HAND.search(line)]
    # the last cause is the error of the last traceback; a launcher's own output after it is second-hand
    for score, found in ((_FIRST_HAND, first_hand), (2, causes), (1, lines)):
        if found:
            return score, found[-1][:_MAX_MESSAGE_LENGTH]
    return 0, "no output"


def failure_messages(
    plan: SweepPlan, hosts: Hosts, run: RunDirectory, processes: Mapping[str, Sequence[HostProcess]]
) -> tuple[bool, str]:
    """Return the most telling output line of every host with its file, best first; equal lines are joined.

    Args:
        plan: the sweep.
        hosts: the hosts.
        run: run directory of the job.
        processes: processes that were started on each host.

    Returns:
        True if a host names a cause, and the text.
    """
    found: list[tuple[float, str, str, Path | None]] = []
    silent: list[str] = []
    for host, started in processes.items():
        lost = hosts.lost().get(host)
        full = "" if lost else room_problem(plan, hosts, host)  # which may be why the host wrote no output
        if lost or full:
            found.append((4, host, lost or f"{full}: free some, then resume", None))
            continue
        logs = list(dict.fromkeys(process.log for process in started))
        candidates = [(*failure_line(read_tail(log, _TAIL_BYTES)), log) for log in logs]
        agent_log = run.node(host) / AGENT_LOG
        if (agent := failure_line(read_tail(agent_log, _TAIL_BYTES)))[0] > 1:  # at score 1, it only reports its start
            candidates.append((*agent, agent_log))
        best, line, log = max(candidates, key=lambda candidate: candidate[0])
        if not best:
            silent.append(host)
            continue
        ended = any(process.exit_code() not in (None, 0) for process in started)
        found.append((best + (0.5 if ended else 0), host, line, log))
    # a host whose process failed comes before hosts with the same score that still run
    found.sort(key=lambda item: -item[0])
    is_known = bool(found) and found[0][0] >= _FIRST_HAND
    by_line: dict[str, tuple[list[str], Path | None]] = {}
    for score, name, line, file in found:
        if not is_known or not 2 <= score < _FIRST_HAND:  # if a cause is known, its consequences are left out
            by_line.setdefault(line, ([], file))[0].append(name)
    texts = [f"{', '.join(names)}: {line}{f' ({file})' if file else ''}" for line, (names, file) in by_line.items()]
    if silent and not is_known:
        texts.append(f"no output from {', '.join(silent)}")
    return is_known, "; ".join(texts)
