"""Reads and writes workloads: a directory with a Chakra execution trace per rank, groups of ranks, and assumptions."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError, error_message, file_errors
from ringtap.core.run_directory import write_json
from ringtap.core.units import counted
from ringtap.workload.execution_trace import Collective, Node, NodeType, message_classes, read_trace, write_trace

GROUPS_JSON, WORKLOAD_JSON = "comm_group.json", "workload.json"
PREFIX = "rank"
_ALL_RANKS = ("", "0")  # names of a group of all ranks, as in PyTorch and ASTRA-sim
CARRIED_OUT_AS = "carried_out_as"
GROUP_DESCRIPTIONS = "group_descriptions"  # in workload.json: name of a group -> what frameworks call it
MAX_NODES = 20_000_000
_TRACE = re.compile(r"(?P<prefix>.*)\.(?P<rank>\d{1,7})\.et")
_COMMUNICATION = {NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL}
_TIMED = {NodeType.COMP, NodeType.MEM_LOAD, NodeType.MEM_STORE}
WORK = ("num_ops", "tensor_size")  # attributes of nodes whose time follows from a processor or a memory
# attribute of an all-to-all: bytes to each rank of its group, in order; without it, all are alike
SPLITS = "comm_split_bytes"
UNITS = 3  # of a rank


@dataclass
class Workload:
    """Computations and communication of the ranks of a job in an iteration.

    Attributes:
        traces: the nodes of each rank, in an order in which a node comes after those that it waits for.
        groups: name -> ranks. Collectives without a group are of all ranks.
        about: what is known and assumed, as in workload.json.
        names: files of the ranks, for messages.
    """

    traces: list[list[Node]]
    groups: dict[str, list[int]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.traces)

    @property
    def is_eager(self) -> bool:
        """True if a send does not wait for its receive, as in ASTRA-sim; with gloo and NCCL, it does."""
        return self.about.get("sends") == "eager"

    def members(self, node: Node) -> Sequence[int]:
        """Ranks of a collective."""
        name = str(node.attributes.get("pg_name", ""))
        return self.groups.get(name) or range(self.ranks)

    def where(self, rank: int, node: Node) -> str:
        """Return a node's place for a message."""
        name = self.names[rank] if self.names else f"rank {rank}"
        return f"{name} node {node.id}"


def read_workload(path: Path, *, needs_times: bool = True) -> Workload:
    """Read the workload of a directory, ours or any directory of Chakra execution traces.

    Args:
        path: the directory.
        needs_times: False if nodes may have operations or bytes instead of a duration.

    Raises:
        UsageError: it cannot be read, is inconsistent, or does not say how long its computations take.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory: a workload is one, with a trace per rank (NAME.RANK.et)")
    every = [(match["prefix"], int(match["rank"]), each) for each in sorted(path.iterdir())
             if (match := _TRACE.fullmatch(each.name))]  # fmt: skip
    if not every:
        raise UsageError(f"{path} has no execution traces (NAME.RANK.et)")
    prefixes = sorted({prefix for prefix, _, _ in every})
    if len(prefixes) > 1:
        raise UsageError(
            f"{path} has traces of {len(prefixes)} workloads ({', '.join(prefixes[:3])}): keep one of them"
        )
    found: dict[int, Path] = {}
    for _, rank, each in every:
        if found.setdefault(rank, each) != each:
            raise UsageError(f"{path} has two traces of rank {rank}: keep one of {found[rank].name} and {each.name}")
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise UsageError(f"{path} has {counted(len(found), 'trace')} but none of rank {missing[0]}")
    traces, total = [], 0
    for rank in range(len(found)):
        nodes = []
        for node in read_trace(found[rank]):
            total += 1
            if total > MAX_NODES:
                raise UsageError(f"{path} has more than {MAX_NODES:,} nodes, which is too many to read")
            nodes.append(node)
        traces.append(nodes)
    names = [found[rank].name for rank in range(len(found))]
    about, groups = _json(path / WORKLOAD_JSON), path / GROUPS_JSON
    if not (path / WORKLOAD_JSON).exists() or _are_groups(about):
        about = {"sends": "eager", "assumptions": [*_of_others(traces), *_without_absent_callers(traces)]}
        groups = groups if groups.exists() else path / f"{prefixes[0]}.json"  # as STAGE names it
    workload = Workload(traces, _groups(groups, len(found)), about, names)
    check_workload(workload)
    if needs_times:
        check_times(workload)
    return workload


def assumed_of_others(workload: Workload) -> list[str]:
    """Return what is assumed of traces that another program wrote; nothing of others."""
    return list(workload.about.get("assumptions", [])) if workload.is_eager else []


def _of_others(traces: Sequence[Sequence[Node]]) -> list[str]:
    """Return what is assumed of traces that other programs wrote: they are made for ASTRA-sim."""
    text = (
        "a send does not wait for its receive, and of the computations of a rank that are ready, the one with the "
        "lowest number runs first, as in ASTRA-sim; other than there, collectives and sends run at once and share links"
    )
    found = [text]
    nodes = [node for trace in traces for node in trace]
    computations = [node for node in nodes if node.type == NodeType.COMP]
    idle = sum(not node.duration_us and not is_untimed(node) for node in computations)
    if idle:
        found.append(f"{idle:,} of {counted(len(computations), 'computation')} without a duration: they take no time")
    if memory := sum(node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE) for node in nodes):
        found.append(f"{counted(memory, 'load or store', 'loads and stores')} of memory: one at a time, without a link")
    if recorded := sum(node.type not in _TIMED and node.duration_us > 0 for node in nodes):
        found.append(
            f"{counted(recorded, 'duration')} of communication or metadata: left out, as the network gives the times"
        )
    return found


def _without_absent_callers(traces: Sequence[Sequence[Node]]) -> list[str]:
    """Leave out control dependencies on nodes that are not there, and say so.

    Chakra's converter of PyTorch's traces removes operations that only call others, but not what names them.
    """
    absent = 0
    for trace in traces:
        ids = {node.id for node in trace}
        for node in trace:
            known = [dep for dep in node.control_deps if dep in ids]
            absent += len(node.control_deps) - len(known)
            node.control_deps = known
    what = counted(absent, "control dependency", "control dependencies")
    return (
        [f"{what} on nodes that the traces do not have: left out, as Chakra's converter leaves these out"]
        if absent
        else []
    )


def split_bytes(parts: Parts) -> tuple[tuple[int, ...], ...]:
    """Return the bytes from each rank to each rank of an uneven all-to-all; none: all of them are alike."""
    if not any(SPLITS in node.attributes for _, node in parts):
        return ()
    from ringtap.workload.message_graph import divided  # which needs NumPy, unlike the help of a command

    found = []
    for _, node in parts:
        given = node.attributes.get(SPLITS)
        found.append(tuple(given if isinstance(given, list) else divided(size_of(node), len(parts)).tolist()))
    return tuple(found) if len({size for each in found for size in each}) > 1 else ()


def check_even(workload: Workload, reader: str) -> None:
    """Check that a workload has no uneven all-to-all, for a reader that knows none.

    Raises:
        UsageError: it has one.
    """
    for parts in collectives_of(workload):
        if split_bytes(parts):
            raise UsageError(
                f"{workload.where(*parts[0])} is an all-to-all with other bytes for each rank, which {reader} does not "
                "have: lower the workload first (ringtap workload lower)"
            )


def is_untimed(node: Node) -> bool:
    """Return True if a node has operations or bytes of memory, but no duration."""
    return node.type in _TIMED and not node.duration_us and any(node.attributes.get(name) for name in WORK)


def is_communication(node: Node) -> bool:
    """Return True for a collective, a send or a receive."""
    return node.type in _COMMUNICATION


def length_us(node: Node) -> int:
    """Return the time that a node takes without a network: of a computation, a load or a store."""
    return node.duration_us if node.type in _TIMED else 0


def unit_of(rank: int, node: Node) -> int:
    """Return the number of what runs a node of a rank, one at a time: its processor, its host, or its memory."""
    is_memory = node.type in (NodeType.MEM_LOAD, NodeType.MEM_STORE)
    return UNITS * rank + (2 if is_memory else bool(node.attributes.get("is_cpu_op")))


def check_times(workload: Workload) -> None:
    """Check that a workload says how long each of its computations takes.

    Raises:
        UsageError: nodes have operations or bytes of memory, but no duration.
    """
    for rank, trace in enumerate(workload.traces):
        untimed = [node for node in trace if is_untimed(node)]
        if not untimed:
            continue
        node, more = untimed[0], len(untimed) - 1
        has = " and ".join(name for name in WORK if node.attributes.get(name))
        advice = "give it a duration"
        if node.type == NodeType.COMP:
            rates = "--flop-per-s F" if node.attributes.get(WORK[0]) else "--flop-per-s F --bytes-per-s B"
            advice = f"give rates of its processor to ringtap workload scale ({rates})"
        raise UsageError(
            f"{workload.where(rank, node)}{f' (and {more:,} others of its rank)' if more else ''} has {has} but no "
            f"duration, so that its time is not known: {advice}"
        )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error_message(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object")
    return found


def _are_groups(content: dict[str, Any]) -> bool:
    """Return True if a file has groups of ranks alone: of traces named workload.R.et, STAGE writes workload.json."""
    lists = [members for members in content.values() if isinstance(members, list) and members]
    return 0 < len(content) == len(lists) and all(type(rank) is int for members in lists for rank in members)


def _groups(path: Path, ranks: int) -> dict[str, list[int]]:
    groups = _json(path)
    for name, members in groups.items():
        if not isinstance(members, list) or not all(type(rank) is int for rank in members) or not members:
            raise UsageError(f"{path}: group {name!r} is not a list of ranks")
        absent = [rank for rank in members if not 0 <= rank < ranks]
        if absent:
            raise UsageError(f"{path}: group {name!r} names rank {absent[0]}, but there are ranks 0 to {ranks - 1}")
        if len(set(members)) < len(members):
            raise UsageError(f"{path}: group {name!r} names a rank twice")
    return groups


def write_workload(workload: Workload, path: Path) -> None:
    """Write a workload into a new directory.

    Raises:
        UsageError: the directory exists, or cannot be written.
    """
    message_classes()  # before there is a directory
    with file_errors(path, "cannot be created"):
        path.mkdir(parents=True)
    with file_errors(path, "cannot be written"):
        for rank, nodes in enumerate(workload.traces):
            write_trace(nodes, path / f"{PREFIX}.{rank}.et")
        if workload.groups:
            write_json(path / GROUPS_JSON, workload.groups)
        write_json(path / WORKLOAD_JSON, workload.about)


def check_workload(workload: Workload) -> None:
    """Check that a workload can be run, and put the nodes of each rank in an order of their dependencies.

    Raises:
        UsageError: sends without receives, cycles, collectives that differ between ranks, or wrong nodes.
    """
    for rank, nodes in enumerate(workload.traces):
        workload.traces[rank] = _ordered(workload, rank, nodes)
    _check_pairs(workload)
    _check_collectives(workload)


def _check_node(workload: Workload, rank: int, node: Node) -> None:
    where = workload.where(rank, node)
    if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        peer = peer_of(node)
        if type(node.attributes.get("comm_tag", 0)) is not int:
            raise UsageError(f"{where} has a comm_tag that is not a whole number")
        if type(peer) is not int or not 0 <= peer < workload.ranks or peer == rank:
            raise UsageError(f"{where} names rank {peer} as its peer: there are ranks 0 to {workload.ranks - 1}")
        own = node.attributes.get("comm_src" if node.type == NodeType.COMM_SEND else "comm_dst", rank)
        if own != rank:
            raise UsageError(f"{where} names rank {own} as its own, but the trace is of rank {rank}")
    for name in WORK if node.type in _TIMED else ():
        amount = node.attributes.get(name, 0)
        if type(amount) not in (int, float) or not 0 <= amount < 2**64:  # type: ignore[operator]
            raise UsageError(f"{where} has a {name} of {amount!r}: it is a number, 0 or more")
    if is_communication(node) and node.attributes.get("is_cpu_op"):
        raise UsageError(
            f"{where} communicates on a host (is_cpu_op), as in traces of Chakra's converter of 2024, which do not say "
            "what it sends: convert the trace with a newer one"
        )
    if node.type == NodeType.COMM_COLL:
        _check_collective(workload, rank, node)
    if is_communication(node):
        size = node.attributes.get("comm_size")
        if size is None and (node.type != NodeType.COMM_COLL or kind_of(node) != Collective.BARRIER):
            raise UsageError(f"{where} has no comm_size: give it the number of its bytes")
        if size is not None and (type(size) is not int or size < 0):
            raise UsageError(f"{where} has a comm_size of {size!r}: it is a number of bytes, 0 or more")


def _check_collective(workload: Workload, rank: int, node: Node) -> None:
    where, name = workload.where(rank, node), str(node.attributes.get("pg_name", ""))
    kind = node.attributes.get("comm_type")
    if kind not in list(Collective):
        what = "no comm_type" if kind is None else f"the unknown comm_type {kind!r}"
        kinds = ", ".join(f"{one.value} {one.name}" for one in Collective)
        raise UsageError(f"{where} is a collective with {what}: give it its kind ({kinds})")
    if name not in workload.groups and name not in _ALL_RANKS:
        raise UsageError(
            f"{where} is of group {name!r}: name its ranks in {GROUPS_JSON} beside the traces, such as "
            f'{{"{name[:40]}": [0, 1]}}, the file of ASTRA-sim\'s --comm-group-configuration'
        )
    dimensions = node.attributes.get("involved_dim")
    if isinstance(dimensions, list) and not all(dimensions):
        raise UsageError(
            f"{where} is of some dimensions of a network (involved_dim), which do not say its ranks: name them as a "
            f"group in {GROUPS_JSON}, and the group as its pg_name"
        )
    if rank not in workload.members(node):
        raise UsageError(f"{where} is of group {name!r}, which does not have rank {rank}")


def _ordered(workload: Workload, rank: int, nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in the order of their trace; one that waits for later ones comes right after these."""
    places: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if node.id in places:
            raise UsageError(f"{workload.where(rank, node)} exists twice: give each node an id of its own")
        places[node.id] = place
        _check_node(workload, rank, node)
    for node in nodes:
        unknown = next((dep for dep in node.deps if dep not in places), None)
        if unknown is not None:
            raise UsageError(f"{workload.where(rank, node)} waits for node {unknown}, which does not exist")
    ordered: list[Node] = []
    is_open, is_done = [False] * len(nodes), [False] * len(nodes)
    for first in range(len(nodes)):
        stack = [first]
        while stack:
            place = stack[-1]
            awaited = [other for dep in nodes[place].deps if not is_done[other := places[dep]]]
            if is_done[place] or not awaited:
                if not is_done[place]:
                    ordered.append(nodes[place])
                is_done[stack.pop()] = True
                continue
            is_open[place] = True
            for other in sorted(awaited, reverse=True):
                if is_open[other]:
                    where = workload.where(rank, nodes[other])
                    raise UsageError(f"{where} waits for itself through others: break the cycle")
                stack.append(other)
    return ordered


def peer_of(node: Node) -> Any:
    """Return the rank to which a node sends, or from which it receives."""
    return node.attributes.get("comm_dst" if node.type == NodeType.COMM_SEND else "comm_src")


def size_of(node: Node) -> int:
    """Return the bytes of a message or a collective."""
    return int(node.attributes.get("comm_size", 0))  # type: ignore[arg-type]


def carried_out_as(node: Node) -> Collective:
    """Return the kind of collective that moves the bytes of one: its own, unless its backend is known to use another.

    Raises:
        UsageError: it is unknown.
    """
    kind = kind_of(node)
    try:
        return Collective(node.attributes.get(CARRIED_OUT_AS, kind))  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"{node.name} has a {CARRIED_OUT_AS} that is no kind of collective") from None


def kind_of(node: Node) -> Collective:
    """Return the kind of a collective.

    Raises:
        UsageError: it is unknown.
    """
    try:
        return Collective(node.attributes.get("comm_type"))  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"node {node.id}: comm_type {node.attributes.get('comm_type')!r} is unknown") from error


Messages = dict[tuple[int, int, int], list[tuple[int, Node]]]


def messages_of(workload: Workload) -> tuple[Messages, Messages]:
    """Return sends and receives by source, destination and tag, each in the order of its rank."""
    sends: Messages = defaultdict(list)
    receives: Messages = defaultdict(list)
    for rank, nodes in enumerate(workload.traces):
        for node in nodes:
            tag = int(node.attributes.get("comm_tag", 0))  # type: ignore[arg-type]
            if node.type == NodeType.COMM_SEND:
                sends[rank, peer_of(node), tag].append((rank, node))
            elif node.type == NodeType.COMM_RECV:
                receives[peer_of(node), rank, tag].append((rank, node))
    return sends, receives


Parts = Sequence[tuple[int, Node]]  # the ranks of a collective and their nodes
Place = tuple[int, int]  # rank, id of a node


def message_pairs(workload: Workload) -> Iterator[tuple[tuple[int, Node], tuple[int, Node]]]:
    """Yield rank and node of each send, and of its receive."""
    sends, receives = messages_of(workload)
    for key, sent in sends.items():
        yield from zip(sent, receives[key], strict=True)


def senders_of(workload: Workload) -> dict[Place, Place]:
    """Return the sender of what each receive gets."""
    return {(to, other.id): (source, one.id) for (source, one), (to, other) in message_pairs(workload)}


def order_by_messages(workload: Workload, sender_of: dict[Place, Place]) -> list[tuple[Place, Node]]:
    """Return all nodes, each after those that it waits for, and after its sender.

    Raises:
        UsageError: ranks wait for each other for ever.
    """
    nodes = {(rank, node.id): node for rank, trace in enumerate(workload.traces) for node in trace}
    waits, following = {}, defaultdict[Place, list[Place]](list)
    for place, node in nodes.items():
        earlier = [(place[0], dep) for dep in node.deps]
        if place in sender_of:
            earlier.append(sender_of[place])
        waits[place] = len(earlier)
        for other in earlier:
            following[other].append(place)
    ordered = [place for place, count in waits.items() if not count]
    for place in ordered:
        for other in following[place]:
            waits[other] -= 1
            if not waits[other]:
                ordered.append(other)
    if len(ordered) < len(nodes):
        (rank, number) = next(place for place in nodes if waits[place])
        where = workload.where(rank, nodes[rank, number])
        raise UsageError(f"{where} waits for ever: ranks wait for each other's messages in different orders")
    return [(place, nodes[place]) for place in ordered]


def _check_pairs(workload: Workload) -> None:
    sends, receives = messages_of(workload)
    for key in {**sends, **receives}:
        sent, received = sends.get(key, []), receives.get(key, [])
        if len(sent) != len(received):
            more, what = (sent, "receive") if len(sent) > len(received) else (received, "send")
            rank, node = more[min(len(sent), len(received))]
            source, destination, tag = key
            raise UsageError(
                f"{workload.where(rank, node)} has no {what}: rank {source} sends {len(sent)} and rank {destination} "
                f"receives {len(received)} messages with tag {tag}"
            )
        for (rank, one), (_, other) in zip(sent, received, strict=True):
            if size_of(one) != size_of(other):
                raise UsageError(
                    f"{workload.where(rank, one)} sends {size_of(one)} bytes, of which rank {key[1]} receives "
                    f"{size_of(other)}"
                )


def collectives_of(workload: Workload) -> list[Parts]:
    """Return the collectives of one group after the other, in order, each with its node on every rank of the group."""
    found: dict[str, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for rank, nodes in enumerate(workload.traces):
        for node in nodes:
            if node.type == NodeType.COMM_COLL:
                found[str(node.attributes.get("pg_name", ""))][rank].append(node)
    every: list[Parts] = []
    for name, by_rank in found.items():
        members = workload.groups.get(name) or range(workload.ranks)
        counts = {rank: len(by_rank.get(rank, [])) for rank in members}
        fewest, most = min(counts, key=lambda r: counts[r]), max(counts, key=lambda r: counts[r])
        if counts[fewest] != counts[most]:
            node = by_rank[most][counts[fewest]]
            raise UsageError(
                f"{workload.where(most, node)} is a collective in which rank {fewest} takes no part: it has "
                f"{counts[fewest]} of {counts[most]} of the group"
            )
        every += [[(rank, by_rank[rank][i]) for rank in members] for i in range(counts[most])]
    return every


def _check_collectives(workload: Workload) -> None:
    for parts in collectives_of(workload):
        (first, node), *others = parts
        for rank, each in parts:
            if SPLITS in each.attributes:
                _check_splits(workload.where(rank, each), each, len(parts))
        for rank, other in others:
            kinds = {kind_of(node), kind_of(other)}
            if kinds == {Collective.ALL_TO_ALL} and (SPLITS in node.attributes or SPLITS in other.attributes):
                continue
            if (kind_of(other), size_of(other)) != (kind_of(node), size_of(node)):
                is_uneven = kinds == {Collective.ALL_TO_ALL}
                advice = f": give the bytes to each rank ({SPLITS}) if it is uneven" if is_uneven else ""
                raise UsageError(
                    f"{workload.where(rank, other)} is {kind_of(other).name} of {size_of(other)} bytes where "
                    f"{workload.where(first, node)} is {kind_of(node).name} of {size_of(node)}{advice}"
                )


def check_of_all_ranks(workload: Workload, program: str, kinds: Container[Collective]) -> None:
    """Check that ranks exchange data in collectives of all of them only, for a program that knows nothing else.

    Raises:
        UsageError: there is a message between two ranks, or a collective of another kind or of some ranks.
    """
    for rank, trace in enumerate(workload.traces):
        for node in trace:
            if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                what = "is a message between two ranks"
            elif node.type != NodeType.COMM_COLL:
                continue
            elif len(workload.members(node)) < workload.ranks:
                what = f"is a collective of {len(workload.members(node))} of {counted(workload.ranks, 'rank')}"
            elif kind_of(node) not in kinds:
                what = f"is a collective that it does not have, {kind_of(node).name.lower()}"
            else:
                continue
            raise UsageError(
                f"a file for {program} has collectives of all ranks only, and {workload.where(rank, node)} {what}: "
                "choose --to chakra or --to goal"
            )
    check_even(workload, program)


def _check_splits(where: str, node: Node, members: int) -> None:
    splits = node.attributes[SPLITS]
    if kind_of(node) != Collective.ALL_TO_ALL:
        raise UsageError(f"{where} has {SPLITS}, which is for an all-to-all")
    if not isinstance(splits, list) or len(splits) != members or any(type(one) is not int or one < 0 for one in splits):
        raise UsageError(f"{where} has a {SPLITS} that is not a list of {members} numbers of bytes, one per rank")
    total = sum(map(int, splits))
    if total != size_of(node):
        raise UsageError(f"{where} has a {SPLITS} of {total} bytes in all, but a comm_size of {size_of(node)}")


def summary(workload: Workload) -> dict[str, Any]:
    """Return what a workload contains, as plain data."""
    nodes = [node for trace in workload.traces for node in trace]
    sends = [node for node in nodes if node.type == NodeType.COMM_SEND]
    collectives = [parts[0][1] for parts in collectives_of(workload)]
    return {
        "ranks": workload.ranks,
        "nodes": len(nodes),
        "computations": sum(node.type == NodeType.COMP for node in nodes),
        "collectives": len(collectives),
        "collective_bytes": sum(map(size_of, collectives)),
        "messages": len(sends),
        "message_bytes": sum(map(size_of, sends)),
        "compute_s": [sum(n.duration_us for n in trace if n.type == NodeType.COMP) / 1e6 for trace in workload.traces],
    }
