"""Copies the replicas of a model, so that more ranks train it in data parallel.

A replica is the ranks that one copy of the model needs: those that tensor, pipeline, context or expert parallelism
connects. Groups within a replica are copied with it. Groups that span the replicas grow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.units import counted
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.workload import GROUP_DESCRIPTIONS, MAX_NODES, SPLITS, Workload, kind_of, peer_of, size_of

# parts of the names that device meshes of PyTorch and Megatron-LM give to groups
_DATA = {"dp", "ddp", "fsdp", "data", "replicate"}
_MODEL = {"tp", "pp", "cp", "sp", "ep", "tensor", "pipeline", "context", "sequence", "expert", "model", "embedding"}
_SHOWN = 6
ALL = "all"  # name of what has no group
_LAYOUT = "describe the larger job in a file for ringtap workload new --layout, or keep the number of ranks"
_NAME = "name one of each data-parallel kind with ringtap workload scale --data-parallel"


class Replicas(NamedTuple):
    """Division of the ranks of a workload into replicas of its model.

    Attributes:
        ranks: ranks of each replica in order; those at the same place of their replicas do the same.
        spanning: names of groups that span the replicas; the empty name is all ranks.
    """

    ranks: list[list[int]]
    spanning: set[str]

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return len(self.ranks[0])

    def check_number(self, ranks: int) -> None:
        """Check that a number of ranks is that of whole replicas.

        Raises:
            UsageError: it is not.
        """
        if ranks % self.size:
            raise UsageError(
                f"{ranks} ranks are no whole replicas of the model, which have {self.size} each: name a multiple"
            )


def group_of(node: Node) -> str:
    """Return the name of a collective's group; the empty name is all ranks."""
    return str(node.attributes.get("pg_name", ""))


def find_replicas(workload: Workload, data_parallel: Collection[str] = ()) -> Replicas:
    """Return the replicas of the model in a workload.

    Args:
        workload: the workload.
        data_parallel: names or descriptions of groups that span replicas, one of those with the same distances
            between ranks; none: as their descriptions say. Collectives without a group do unless these deny it.

    Raises:
        UsageError: it cannot be told which groups span replicas, or the replicas are not alike.
    """
    used = {group_of(node): workload.members(node)
            for trace in workload.traces for node in trace if node.type == NodeType.COMM_COLL}  # fmt: skip
    spanning = _spanning(workload, used, data_parallel)
    linked = list(range(workload.ranks))  # to a lower rank of the same replica, or to itself

    def first(rank: int) -> int:
        while linked[rank] != rank:
            linked[rank] = rank = linked[linked[rank]]
        return rank

    pairs = [(members[0], other) for name, members in used.items() if name not in spanning for other in members]
    pairs += [(rank, peer_of(node)) for rank, trace in enumerate(workload.traces)
              for node in trace if node.type == NodeType.COMM_SEND]  # fmt: skip
    for one, other in pairs:
        low, high = sorted((first(one), first(other)))
        linked[high] = low
    by_first = defaultdict[int, list[int]](list)
    for rank in range(workload.ranks):
        by_first[first(rank)].append(rank)
    found = Replicas(list(by_first.values()), spanning)
    _check(workload, used, found)
    return found


def copy_replicas(workload: Workload, found: Replicas, ranks: int) -> Workload:
    """Return a workload of another number of ranks, in which each further replica does what one of the first ones does.

    The ranks of a workload are copied as a block: the first ranks after them are copies of its first ranks.

    Raises:
        UsageError: there are too many nodes.
    """
    found.check_number(ranks)
    if max(map(len, workload.traces)) * ranks > MAX_NODES:
        raise UsageError(f"{ranks:,} ranks have more than {MAX_NODES:,} nodes, which are too many")
    before = len(found.ranks)
    chosen = sorted((number // before, rank) for number in range(ranks // found.size)
                    for rank in found.ranks[number % before])  # fmt: skip
    new = {each: number for number, each in enumerate(chosen)}
    places = {rank: place for replica in found.ranks for place, rank in enumerate(replica)}
    groups: dict[str, list[int]] = {}
    names: dict[tuple[int, str], str] = {}  # of a group in a block
    fresh = count(1 + max((int(name) for name in workload.groups if re.fullmatch(r"[0-9]{1,9}", name)), default=0))
    for name, members in workload.groups.items():
        if name in found.spanning:
            spanned = {places[rank] for rank in members}
            groups[name] = [new[each] for each in chosen if places[each[1]] in spanned]
            continue
        for block in range(chosen[-1][0] + 1):
            if all((block, rank) in new for rank in members):
                names[block, name] = str(next(fresh)) if block else name
                groups[names[block, name]] = [new[block, rank] for rank in members]
    traces = [[_moved(node, block, names, new) for node in workload.traces[rank]] for block, rank in chosen]
    about = dict(workload.about)
    if described := about.get(GROUP_DESCRIPTIONS):
        old = {new_name: name for (_, name), new_name in names.items()}
        about[GROUP_DESCRIPTIONS] = {
            name: described[old.get(name, name)] for name in ["", *groups] if old.get(name, name) in described
        }
    return Workload(traces, groups, about)


def _moved(node: Node, block: int, names: dict[tuple[int, str], str], new: dict[tuple[int, int], int]) -> Node:
    """Return a node in another copy of the ranks, with the groups and ranks there."""
    attributes = dict(node.attributes)
    if node.type == NodeType.COMM_COLL and (block, group_of(node)) in names:
        attributes["pg_name"] = names[block, group_of(node)]
    elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        ends = {name: int(attributes[name]) for name in ("comm_src", "comm_dst") if name in attributes}  # type: ignore[arg-type]
        attributes |= {name: new[block, rank] for name, rank in ends.items()}
    return node if attributes == node.attributes else replace(node, attributes=attributes)


def _spanning(workload: Workload, used: dict[str, Sequence[int]], data_parallel: Collection[str]) -> set[str]:
    """Return the names of the groups that span replicas."""
    described: dict[str, list[str]] = workload.about.get(GROUP_DESCRIPTIONS, {})
    several = {name: members for name, members in used.items() if len(members) > 1}
    named: set[tuple[int, ...]] = set()
    for wanted in data_parallel:
        chosen = [members for name, members in several.items()
                  if wanted in (name if name in workload.groups else ALL, *described.get(name, []))]  # fmt: skip
        if not chosen:
            raise UsageError(f"--data-parallel {wanted}: no such group; there are {_listed(several, described)}")
        named.update(map(_distances, chosen))
    found = set()
    # other programs describe nothing, and some of their jobs are model-parallel over all ranks
    of_all = True if named or not workload.is_eager else None
    for name, members in several.items():
        is_grouped = name in workload.groups
        is_data = _is_data_parallel(described.get(name, []), otherwise=None if is_grouped else of_all)
        if named and (is_grouped or _distances(members) in named):
            is_data = _distances(members) in named
        if is_data is None:
            raise UsageError(
                f"it cannot be told which collectives are data-parallel: there are {_listed(several, described)}; "
                f"{_NAME}"
            )
        if is_data:
            found.add(name)
    return found


def _distances(members: Sequence[int]) -> tuple[int, ...]:
    """Return the distances of ranks from the first one, which all groups of a kind have in common."""
    return tuple(rank - members[0] for rank in members)


def _is_data_parallel(descriptions: Collection[str], *, otherwise: bool | None = None) -> bool | None:
    """Return True if the descriptions of a group say so, False if they name another parallelism, else None.

    Args:
        descriptions: what frameworks call the group.
        otherwise: what the group is if no description tells; None: each one has to tell.
    """
    found = set()
    for text in descriptions:
        parts = set(re.findall("[a-z]+", text.lower()))
        found.add(True if parts & _DATA else False if parts & _MODEL else None)
    if otherwise is not None:
        found = (found - {None}) or {otherwise}
    return found.pop() if len(found) == 1 else None


def _listed(groups: dict[str, Sequence[int]], described: dict[str, list[str]]) -> str:
    """Return the groups as text, one of each kind."""
    kinds = defaultdict[tuple[int, ...], list[str]](list)
    for name, members in groups.items():
        kinds[_distances(members)].append(name)
    texts = []
    for name, *others in kinds.values():
        ranks = ", ".join(map(str, groups[name][:_SHOWN])) + (", …" if len(groups[name]) > _SHOWN else "")
        text = " ".join([name or ALL, f"[{ranks}]", *(f"({each})" for each in described.get(name, []))])
        texts.append(f"{text} and {len(others)} more like it" if others else text)
    return "; ".join(texts[:_SHOWN]) + ("; …" if len(texts) > _SHOWN else "")


def _check(workload: Workload, used: dict[str, Sequence[int]], found: Replicas) -> None:
    """Check that replicas are alike, and that there are several."""
    if len(found.ranks) == 1 and workload.ranks > 1:
        raise UsageError(
            "all ranks belong to one replica of the model, so that it is not known what data-parallel replicas would "
            f"exchange: {_LAYOUT}"
        )
    places = {rank: (number, place) for number, replica in enumerate(found.ranks) for place, rank in enumerate(replica)}
    if any(len(replica) != found.size for replica in found.ranks):
        another = next(replica for replica in found.ranks if len(replica) != found.size)
        raise UsageError(
            f"replicas of the model have {found.size} and {counted(len(another), 'rank')} (those of ranks "
            f"{found.ranks[0][0]} and {another[0]}): {_NAME}"
        )
    for name in found.spanning:
        spanned = [set[int]() for _ in found.ranks]
        for rank in used[name]:
            number, place = places[rank]
            spanned[number].add(place)
        if any(each != spanned[0] for each in spanned):
            raise UsageError(
                f"group {_listed({name: used[name]}, workload.about.get(GROUP_DESCRIPTIONS, {}))} does not have the "
                f"same ranks of all {len(found.ranks)} replicas of the model, which have {found.size} each: {_NAME}"
            )
    for rank, trace in enumerate(workload.traces):
        for node in trace:
            if SPLITS in node.attributes and group_of(node) in found.spanning:
                where = workload.where(rank, node)
                raise UsageError(f"{where} is an all-to-all with bytes for each rank, which further ranks do not have")
    for replica in found.ranks:
        for one, other in zip(found.ranks[0], replica, strict=True):
            _check_alike(workload, places, one, other)


def _check_alike(workload: Workload, places: dict[int, tuple[int, int]], one: int, other: int) -> None:
    shapes = []
    for rank in (one, other):
        shape: list[tuple[object, ...]] = []
        for node in workload.traces[rank]:
            if node.type == NodeType.COMM_COLL:
                within = tuple(sorted({places[each][1] for each in workload.members(node)}))
                size_bytes = None if SPLITS in node.attributes else size_of(node)  # which depends on the data
                shape.append((kind_of(node), size_bytes, within))
            elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                shape.append((node.type, size_of(node), places[peer_of(node)][1]))
        shapes.append(shape)
    if shapes[0] != shapes[1]:
        raise UsageError(f"ranks {one} and {other} take part in different collectives or messages: {_LAYOUT}")
