"""The sockets of one node: who owns them, and what they moved in each iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.job.logs import NodeLogs
from ringtap.analysis.job.sockets import COUNTERS, socket_log
from ringtap.analysis.job.spread import Borders, Integers, Numbers, add_up, shares
from ringtap.rundir import OWNER

AMOUNTS = ("payload_bytes", "retransmitted_bytes", "retransmissions", "ce_marked")


@dataclass(frozen=True)
class Known:
    """The sockets of a node, with their owners, and how often they are sampled: busy ones, and at least all."""

    sockets: pd.DataFrame
    every_s: float
    all_every_s: float


def sockets_of(node: NodeLogs) -> Known | None:
    """A node's sockets; None where none were recorded."""
    log = socket_log(node)
    if log is None or not len(log.sockets):
        return None
    owners = _owners(node)
    owner = [owners.get(inode, (None, None)) for inode in log.sockets["inode"].tolist()]
    table = log.sockets.assign(node=node.name, number=np.arange(len(owner)))
    table["rank"] = pd.array([rank for rank, _ in owner], "Int64")
    table["command"] = np.array([command for _, command in owner], object)
    return Known(table, log.every_s, log.all_every_s)


def _owners(node: NodeLogs) -> dict[int, tuple[int | None, str | None]]:
    """Rank and command of each inode; where several processes had a socket, the one that is a rank."""
    found: dict[int, tuple[int | None, str | None]] = {}
    for line in node.lines("sockets/owners.jsonl", OWNER):
        inode, rank, command = line["inode"], line.get("rank"), line.get("command")
        if line.get("pid") is not None:
            rank = node.rank_of_pid.get(line["pid"], rank)
        other = found.get(inode, (None, None))[0]
        if inode not in found or (rank is not None and (other is None or rank < other)):
            words = " ".join(map(str, command)) if isinstance(command, list) else str(command)
            found[inode] = rank, words
    return found


@dataclass(frozen=True)
class Moved:
    """What the sockets of a node moved.

    Attributes:
        groups: the groups that they belong to.
        amounts: by name of `AMOUNTS`, what each of these moved in each bin, shape (groups, bins).
        sums: growth of each of `COUNTERS`, one number a socket.
        covered: the bins that the log covers.
    """

    groups: Integers
    amounts: dict[str, Numbers]
    sums: dict[str, Numbers]
    covered: npt.NDArray[np.bool_]


def moved_on(node: NodeLogs, borders: Borders, out_of: Integers, into: Integers) -> Moved:
    """What a node's sockets moved; ``out_of`` and ``into`` are the groups that they send to and receive from, or -1."""
    groups = np.unique(np.concatenate((out_of, into)))
    groups = groups[groups >= 0]
    sends, takes = (np.where(side < 0, -1, np.searchsorted(groups, side)) for side in (out_of, into))
    bins = borders.bins
    amounts = {name: np.zeros((len(groups), bins)) for name in AMOUNTS}
    sums = {name: np.zeros(len(out_of)) for name in COUNTERS}
    log = socket_log(node)
    for grown in log.growth() if log is not None else ():
        for counter in COUNTERS:
            sums[counter] += np.bincount(grown.end, grown.amounts[counter], len(out_of))
        if not bins:
            continue
        span, place, share = shares(grown.begin_ns, grown.end_ns, borders.edges_ns)
        part = {counter: grown.amounts[counter][span] * share for counter in COUNTERS}
        moved = {
            "payload_bytes": part["bytes_acked"],
            "retransmitted_bytes": part["bytes_retrans"],
            "retransmissions": part["total_retrans"],
            "ce_marked": part["delivered_ce"],
        }
        end = grown.end[span]
        for amount, values in moved.items():
            amounts[amount] += add_up(sends[end], place, values, len(groups), bins)
        keep = takes[end] >= 0
        values = part["bytes_received"][keep]
        amounts["payload_bytes"] += add_up(takes[end][keep], place[keep], values, len(groups), bins)
    return Moved(groups, amounts, sums, node.covers("sockets/sockets.rec", borders))
