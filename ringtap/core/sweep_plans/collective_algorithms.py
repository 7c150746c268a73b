"""Reads the collectives of a sweep: the plan's ``collective`` and what goes with it (docs/reference/plan.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtap.core.errors import did_you_mean

if TYPE_CHECKING:
    from ringtap.core.toml_tables import TomlTable

PARAMETER_SERVER, IN_NETWORK, HIERARCHICAL = "parameter-server", "in-network", "hierarchical"
ALL_REDUCE = ("ring", "halving-doubling", "tree", "double-tree", HIERARCHICAL, PARAMETER_SERVER, IN_NETWORK)
# a parameter server with a shard of the gradients on each server of the plan; without the word, one server has all
SHARDED = f"sharded-{PARAMETER_SERVER}"
COLLECTIVES = (*ALL_REDUCE, SHARDED)
_PASSES_ON = ("tree", "double-tree", IN_NETWORK)


@dataclass(frozen=True)
class Collectives:
    """Collectives by which a sweep's jobs exchange their gradients, each measured in turn.

    Attributes:
        names: of `COLLECTIVES`; empty: the all-reduce of the job's own backend.
        group: workers of a group, for ``hierarchical``; None: the ranks of a host, or 2 if each host has one.
        pieces: pieces in which trees and the switch pass on gradients.
    """

    names: tuple[str, ...] = ()
    group: int | None = None
    pieces: int = 1

    def algorithm(self, name: str, servers: int, ranks_per_host: int) -> tuple[str, dict[str, int]]:
        """Return the algorithm of a collective and its numbers, by the names of `ringtap.workload.collectives.Shape`.

        Args:
            name: one of `COLLECTIVES`.
            servers: parameter servers of the plan.
            ranks_per_host: ranks of the first worker.
        """
        if name == SHARDED:
            return PARAMETER_SERVER, {"shards": servers}
        if name == HIERARCHICAL:
            return name, {"group": self.group or (ranks_per_host if ranks_per_host > 1 else 2)}
        return name, {"pieces": self.pieces} if name in _PASSES_ON else {}


def read_collectives(sweep: TomlTable) -> Collectives:
    """Read the keys of [sweep] about collectives.

    Raises:
        UsageError: a wrong value, with its line.
    """
    asked = sweep.take(
        "collective", (list, str), [], lambda value: all(isinstance(one, str) for one in value), "a list of texts"
    )
    names = tuple(dict.fromkeys([asked] if isinstance(asked, str) else asked))
    for name in names:
        if name not in COLLECTIVES:
            hint = did_you_mean(name, COLLECTIVES)
            sweep.fail("collective", f"holds {name!r}, which is unknown: {hint}choose {', '.join(COLLECTIVES)}")
    group = sweep.integer("collective_group", 0, 1, 100_000) or None
    pieces = sweep.integer("collective_pieces", 1, 1, 100_000)
    for key, users in (("collective_group", (HIERARCHICAL,)), ("collective_pieces", _PASSES_ON)):
        if sweep.has(key) and not set(users) & set(names):
            sweep.fail(key, f"is for {', '.join(users)}, and the plan's collective has none of them")
    return Collectives(names, group, pieces)


def check_places(sweep: TomlTable, names: Sequence[str], servers: Sequence[str], topology: str) -> None:
    """Refuse collectives for which a plan has too few servers, or no switch that adds.

    Args:
        sweep: the plan's [sweep].
        names: the collectives.
        servers: hosts of parameter servers.
        topology: that of the testbed; empty for a cluster.

    Raises:
        UsageError: with the line of ``collective``.
    """
    table = "[testbed]" if topology else "[cluster]"
    for name, least in ((PARAMETER_SERVER, 1), (SHARDED, 2)):
        if name in names and len(servers) < least:
            hosts = '["S4"]' if least == 1 else '["S4", "S5"]'
            needs = "a server" if least == 1 else "two servers at least"
            sweep.fail("collective", f"= {name!r} needs {needs}: add, for example, servers = {hosts} to {table}")
    if IN_NETWORK in names and topology in ("", "ring", "torus"):
        sweep.fail(
            "collective",
            f"= {IN_NETWORK!r} needs a switch that adds gradients, which only a [testbed] with switches has: a star, "
            "leaf-spine or fat tree",
        )
