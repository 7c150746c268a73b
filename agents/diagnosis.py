"""Why a series failed: the words of every host, the most telling first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtap.agents.hosts import HostProcess, Hosts
from ringtap.agents.roll_call import room_problem
from ringtap.plan import SweepPlan
from ringtap.plan_cluster import Cluster
from ringtap.rundir import RunDirectory

_TAIL_BYTES = 65_536
_LONGEST = 300
_FIRST_HAND = 3  # how much a cause says
# what a rank says because another has gone, and what launchers say because a rank has
_SECOND_HAND = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out waiting|\bChildFailedError\b|elastic|SIGTERM|heartbeat|"
    r"store.*timeout|remote process exited",
    re.IGNORECASE,
)
# warnings are printed by jobs that run well, too; glog's begin with their letter and date
_WARNING = re.compile(r"(\[rank\d+\]:)?\s*\[?[IW]\d{4} |\bwarning\b|Warning:", re.IGNORECASE)
_TELLING = re.compile(
    r"\w(Error|Exception|Interrupt)\b|\berror\b|no space left|disk quota|cannot|can't|not found|no such file|"
    r"refused|denied|out of memory|killed|no route|unreachable|timed out|failed|not recorded",
    re.IGNORECASE,
)


def telling_line(text: str) -> tuple[int, str]:
    """The line of an output that says most about a failure.

    Returns:
        How much it says (3: a cause; 2: what may have a cause elsewhere; 1: something; 0: nothing), and the line.
    """
    # an output may hold anything, and only printable words are passed on
    printable = "".join(character if character.isprintable() else "\n" for character in text)
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    causes = [line for line in lines if _TELLING.search(line) and not _WARNING.search(line)]
    first_hand = [line for line in causes if not _SECOND_HAND.search(line)]
    # of a traceback, and of several, the last line is the error; a launcher's own words come after it
    for score, found in ((3, first_hand), (2, causes), (1, lines)):
        if found:
            return score, found[-1][:_LONGEST]
    return 0, "no output"


def words_of_hosts(
    plan: SweepPlan, hosts: Hosts, run: RunDirectory, processes: Mapping[str, Sequence[HostProcess]]
) -> tuple[bool, str]:
    """The words of every host, the most telling first, with the file that they are in; hosts that say the same in one.

    Args:
        plan: the sweep.
        hosts: the hosts.
        run: the series' run directory.
        processes: what was started on each host.

    Returns:
        Whether one of them tells a cause, and the words.
    """
    found: list[tuple[float, str, str, Path | None]] = []
    silent: list[str] = []
    for host, started in processes.items():
        lost = hosts.lost().get(host)
        full = "" if lost else _room(plan, hosts, host)
        if lost or full:
            found.append((4, host, lost or f"{full}: free some, then resume", None))
            continue
        logs = list(dict.fromkeys(process.log for process in started))
        said = [(*telling_line(_tail(log)), log) for log in logs]
        agent = run.node(host) / "log" / "agent.log"
        if (heard := telling_line(_tail(agent)))[0] > 1:  # it says when it starts, too
            said.append((*heard, agent))
        score, line, log = max(said, key=lambda one: one[0])
        if not score:
            silent.append(host)
            continue
        ended = any(process.exit_code() not in (None, 0) for process in started)
        found.append((score + (0.5 if ended else 0), host, line, log))
    # a host that failed by itself comes before those that say as much and still run
    found.sort(key=lambda one: -one[0])
    is_told = bool(found) and found[0][0] >= _FIRST_HAND
    alike: dict[str, tuple[list[str], Path | None]] = {}
    for says, name, words, file in found:
        if not is_told or not 2 <= says < _FIRST_HAND:  # the cause is known, and what it led to is not told
            alike.setdefault(words, ([], file))[0].append(name)
    told = [f"{', '.join(names)}: {words}{f' ({file})' if file else ''}" for words, (names, file) in alike.items()]
    if silent and not is_told:
        told.append(f"no output from {', '.join(silent)}")
    return is_told, "; ".join(told)


def _room(plan: SweepPlan, hosts: Hosts, host: str) -> str:
    """The full disk of a host, which may have kept it from saying anything."""
    return room_problem(plan, hosts, host) if isinstance(plan.topology, Cluster) else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
