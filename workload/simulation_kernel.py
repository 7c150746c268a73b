"""Runs the event loop of the flow-level simulation, which numba compiles.

Flows share links max-min fairly. An event is the end of a flow, the arrival of a message, or the end of a computation.
All events of one instant are handled before rates are calculated anew, and only for the flows that share a link,
directly or through others, with a flow that began or ended.

A collective is given once, as a placed message graph; each instance of it only has a counter per message. Flows of
cross traffic belong to no instance. Each has a time at which it begins, and may wait for another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.core.installation import cache_folder

NONE = -1
COMPUTE, COLLECTIVE = range(2)
# places in the array of counters; the first ones are also answers: what has to grow, or that all is done
DONE, EVENTS, SPARE_FLOWS, STARTS, ARRIVED, SLOTS = range(6)
READY, DIRTY, MARK, MESSAGES, PHASE, RUNNING, CALLED, COUNTERS = range(6, 14)
_FLOW, _MESSAGE, _NODE, _CROSS = range(4)
_SAME = 1e-12  # relative difference of rates that are the same
# the code of an event: 2 bits for its kind, 28 for a flow or a slot, 32 for a message, a node or a version
_SECOND_BITS = 32
_SECOND = (1 << _SECOND_BITS) - 1
_FIRST = (1 << 28) - 1


Integers = npt.NDArray[np.int64]
Shorts = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class NodeArrays(NamedTuple):
    """Computations and parts in collectives; all arrays but `next` have a value per node."""

    kind: Integers  # COMPUTE or COLLECTIVE
    seconds: Numbers
    instance: Integers
    local: Integers  # endpoint of the rank in the message graph
    waits: Integers  # number of nodes that it still waits for
    next_start: Integers  # place in `next` of those that wait for it
    next: Integers
    begin_s: Numbers
    end_s: Numbers


class UnitArrays(NamedTuple):
    """Units that compute one node at a time."""

    of_node: Integers
    place: Integers  # of a node in `nodes`
    nodes: Integers
    start: Integers  # place of each unit's first node in `nodes`, and of its heap in `waiting`
    waiting: Integers  # heaps of places of nodes that wait for the unit
    waiting_count: Integers
    runs: Flags
    is_called: Flags  # whether it is among `called`
    called: Integers  # those that may have to begin a node


class InstanceArrays(NamedTuple):
    """Collectives; each one runs a message graph."""

    graph: Integers
    size_bytes: Numbers
    slot: Integers  # NONE: it does not run


class GraphArrays(NamedTuple):
    """Placed message graphs, one after the other."""

    start: Integers  # number of each graph's first message
    free: Integers  # number of messages that nobody has to begin
    workers: Integers
    local_start: Integers  # number of each graph's first endpoint
    share: Numbers  # of a message in the bytes of the collective
    pair: Shorts
    source: Shorts
    destination: Shorts
    waits: Shorts  # number of messages and ranks that it waits for
    reply_start: Integers  # place in `reply` of the messages that wait for it
    reply: Shorts
    by_local_start: Integers  # place in `by_local` of the messages of an endpoint
    by_local: Shorts
    local_messages: Shorts  # number of messages of an endpoint


class CrossArrays(NamedTuple):
    """Flows of cross traffic."""

    pair: Integers
    size_bytes: Numbers
    begin_s: Numbers
    next: Integers  # the next one that begins by itself
    end_s: Numbers
    waiting_start: Integers  # place in `waiting` of those that wait for it
    waiting: Integers
    waiting_s: Numbers


class RouteArrays(NamedTuple):
    """Pairs of hosts, and links."""

    pair_start: Integers  # place in `pair_links` of its links
    pair_links: Integers
    pair_s: Numbers  # latency
    link_rate: Numbers
    link_bytes: Numbers


class SlotArrays(NamedTuple):
    """Instances that run; arrays of two dimensions have a row per slot."""

    remaining: Shorts  # number of messages and ranks that each message still waits for
    local_left: Integers  # of each endpoint, messages that have not arrived, and its node if that has not begun
    local_node: Integers
    instance: Integers  # NONE: the slot is free
    open: Integers  # number of messages that have not arrived, and of ranks that have not begun


class FlowArrays(NamedTuple):
    """Flows under way, and for each hop of them an entry in the list of a link."""

    left: Numbers  # bytes at the time `since`
    rate: Numbers
    since: Numbers
    version: Integers  # counts changes of the rate
    owner: Integers  # slot; NONE: cross traffic
    place: Integers  # message, or flow of cross traffic
    via: Integers  # pair of hosts
    mark: Integers
    part: Integers  # those whose rates are calculated together
    free: Integers
    after: Integers
    before: Integers
    hop_bits: int  # bits for the hop in the number of an entry


class LinkArrays(NamedTuple):
    """Links in use."""

    head: Integers  # first entry of a hop; NONE: no flow
    flows: Integers  # number of them
    mark: Integers
    is_dirty: Flags  # whether it is among `dirty`
    dirty: Integers  # those on which a flow began or ended
    part: Integers  # those whose rates are calculated together
    capacity: Numbers  # what is left while rates are calculated
    sharing: Integers  # number of flows without a new rate


class EventArrays(NamedTuple):
    """The heap of events, lists of what happens at this instant, and counters."""

    times: Numbers
    codes: Integers
    ready: Integers
    starts_slot: Integers
    starts_message: Integers
    arrived_slot: Integers
    arrived_message: Integers
    counters: Integers
    clock: Numbers  # the present time


class State(NamedTuple):
    """A simulation that is under way: the arguments of `advance`."""

    nodes: NodeArrays
    units: UnitArrays
    instances: InstanceArrays
    graphs: GraphArrays
    cross: CrossArrays
    routes: RouteArrays
    slots: SlotArrays
    flows: FlowArrays
    links: LinkArrays
    queue: EventArrays


Loop = Callable[
    [NodeArrays, UnitArrays, InstanceArrays, GraphArrays, CrossArrays, RouteArrays, SlotArrays, FlowArrays, LinkArrays,
     EventArrays], int,
]  # fmt: skip


def _push(times: Numbers, codes: Integers, count: int, when: float, code: np.int64) -> int:
    """Add an event to a heap with room for it; return the number of events."""
    place = count
    while place > 0:
        above = (place - 1) >> 1
        if times[above] <= when:
            break
        times[place] = times[above]
        codes[place] = codes[above]
        place = above
    times[place] = when
    codes[place] = code
    return count + 1


def _pop(times: Numbers, codes: Integers, count: int) -> int:
    """Remove the first event, which the caller has read; return the number of events."""
    count -= 1
    when, code = times[count], codes[count]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= count:
            break
        if below + 1 < count and times[below + 1] < times[below]:
            below += 1
        if times[below] >= when:
            break
        times[place] = times[below]
        codes[place] = codes[below]
        place = below
    times[place] = when
    codes[place] = code
    return count


def _wait(waiting: Integers, count: int, place: int) -> None:
    """Add a place to a heap with room for it."""
    at = count
    while at > 0 and waiting[(at - 1) >> 1] > place:
        waiting[at] = waiting[(at - 1) >> 1]
        at = (at - 1) >> 1
    waiting[at] = place


def _first(waiting: Integers, count: int) -> int:
    """Remove the lowest place of a heap, and return it."""
    first: int = waiting[0]
    place, at = waiting[count - 1], 0
    while True:
        below = 2 * at + 1
        if below + 1 < count and waiting[below + 1] < waiting[below]:
            below += 1
        if below >= count or waiting[below] >= place:
            break
        waiting[at] = waiting[below]
        at = below
    waiting[at] = place
    return first


def _code(kind: int, first: int, second: int) -> np.int64:
    return (np.int64(kind) << 60) | (np.int64(first) << _SECOND_BITS) | np.int64(second)


def cross_code(flow: int) -> int:
    """Return the code of the event that a flow of cross traffic begins."""
    return (_CROSS << 60) | int(flow)


def advance(
    nodes: NodeArrays, units: UnitArrays, instances: InstanceArrays, graphs: GraphArrays, cross: CrossArrays,
    routes: RouteArrays, slots: SlotArrays, flows: FlowArrays, links: LinkArrays, queue: EventArrays,
) -> int:  # fmt: skip
    """Handle events until all have happened, or until an array is full; return 0 or the array that has to grow.

    Each array is taken from its group once, and none is replaced in here, because numba counts references to arrays.
    """
    node_kind, node_s, node_instance, node_local = nodes.kind, nodes.seconds, nodes.instance, nodes.local
    node_waits, next_start, next_nodes = nodes.waits, nodes.next_start, nodes.next
    begin_s, end_s = nodes.begin_s, nodes.end_s
    node_unit, node_place, unit_nodes, unit_start = units.of_node, units.place, units.nodes, units.start
    unit_waiting, unit_count, unit_runs = units.waiting, units.waiting_count, units.runs
    is_called, called = units.is_called, units.called
    instance_graph, instance_bytes, slot_of = instances.graph, instances.size_bytes, instances.slot
    graph_start, graph_free, graph_workers, local_start = graphs.start, graphs.free, graphs.workers, graphs.local_start
    message_share, message_pair = graphs.share, graphs.pair
    message_from, message_to, message_waits = graphs.source, graphs.destination, graphs.waits
    reply_start, reply, local_messages = graphs.reply_start, graphs.reply, graphs.local_messages
    by_local_start, by_local = graphs.by_local_start, graphs.by_local
    cross_pair, cross_bytes, cross_next = cross.pair, cross.size_bytes, cross.next
    cross_begin_s, cross_end_s = cross.begin_s, cross.end_s
    waiting_start, waiting, waiting_s = cross.waiting_start, cross.waiting, cross.waiting_s
    pair_start, pair_links, pair_s = routes.pair_start, routes.pair_links, routes.pair_s
    link_rate, link_bytes = routes.link_rate, routes.link_bytes
    remaining, local_left, local_node = slots.remaining, slots.local_left, slots.local_node
    slot_instance, slot_open = slots.instance, slots.open
    left, rate, since, version = flows.left, flows.rate, flows.since, flows.version
    owner, place, via, flow_mark = flows.owner, flows.place, flows.via, flows.mark
    part_flows, free, after, before, hop_bits = flows.part, flows.free, flows.after, flows.before, flows.hop_bits
    head, on_link, link_mark, is_dirty, dirty = links.head, links.flows, links.mark, links.is_dirty, links.dirty
    part_links, capacity, sharing = links.part, links.capacity, links.sharing
    times, codes, ready = queue.times, queue.codes, queue.ready
    starts_slot, starts_message = queue.starts_slot, queue.starts_message
    arrived_slot, arrived_message = queue.arrived_slot, queue.arrived_message
    counters, clock = queue.counters, queue.clock
    events, spare, ready_count = counters[EVENTS], counters[SPARE_FLOWS], counters[READY]
    starts, arrived, dirty_count = counters[STARTS], counters[ARRIVED], counters[DIRTY]
    mark, messages, phase, calls = counters[MARK], counters[MESSAGES], counters[PHASE], counters[CALLED]
    now, needs = clock[0], DONE
    slot_count = len(slot_instance)
    while needs == DONE:
        # everything that follows at this instant
        while phase == 0 and (ready_count or starts or arrived):
            while ready_count:
                node = ready[ready_count - 1]
                if node_kind[node] == COLLECTIVE:
                    instance = node_instance[node]
                    graph = instance_graph[instance]
                    source = local_start[graph] + node_local[node]
                    more = by_local_start[source + 1] - by_local_start[source]
                    if slot_of[instance] == NONE:
                        more += graph_free[graph]
                        if counters[RUNNING] == slot_count:
                            needs = SLOTS
                            break
                    if starts + more > len(starts_slot):
                        needs = STARTS
                        break
                elif events == len(times):
                    needs = EVENTS
                    break
                ready_count -= 1
                unit = node_unit[node]
                if unit != NONE:
                    _wait(unit_waiting[unit_start[unit] :], unit_count[unit], node_place[node])
                    unit_count[unit] += 1
                    if not is_called[unit]:
                        is_called[unit] = True
                        called[calls] = unit
                        calls += 1
                    continue
                begin_s[node] = now
                if node_kind[node] == COMPUTE:
                    events = _push(times, codes, events, now + node_s[node], _code(_NODE, 0, node))
                    continue
                first, first_local = graph_start[graph], local_start[graph]
                slot = slot_of[instance]
                if slot == NONE:
                    for each in range(slot_count):
                        if slot_instance[each] == NONE:
                            slot = each
                            break
                    count = graph_start[graph + 1] - first
                    counters[RUNNING] += 1
                    slot_of[instance], slot_instance[slot] = slot, instance
                    slot_open[slot] = (
                        count + graph_workers[graph]
                    )  # until all messages have arrived, and all ranks begun
                    remaining[slot, :count] = message_waits[first : first + count]
                    for local in range(local_start[graph + 1] - first_local):
                        local_left[slot, local] = local_messages[first_local + local] + 1  # 1: its node must begin
                        local_node[slot, local] = NONE
                    # those that nobody has to begin: of servers and switches that wait for nothing
                    for message in range(count):
                        if remaining[slot, message] == 0:
                            starts_slot[starts], starts_message[starts] = slot, message
                            starts += 1
                local = node_local[node]
                local_node[slot, local] = node
                for index in range(by_local_start[first_local + local], by_local_start[first_local + local + 1]):
                    message = by_local[index]
                    remaining[slot, message] -= 1
                    if remaining[slot, message] == 0:
                        starts_slot[starts], starts_message[starts] = slot, message
                        starts += 1
                slot_open[slot] -= 1
                if slot_open[slot] == 0:
                    slot_instance[slot] = NONE
                    counters[RUNNING] -= 1
                local_left[slot, local] -= 1
                if local_left[slot, local] == 0:  # it neither sends nor receives, or all had arrived before
                    end_s[node] = now
                    for index in range(next_start[node], next_start[node + 1]):
                        node_waits[next_nodes[index]] -= 1
                        if node_waits[next_nodes[index]] == 0:
                            ready[ready_count] = next_nodes[index]
                            ready_count += 1
            if needs != DONE:
                break
            while starts:
                if spare == 0 or events == len(times) or arrived == len(arrived_slot):
                    needs = SPARE_FLOWS if spare == 0 else EVENTS if events == len(times) else ARRIVED
                    break
                starts -= 1
                slot, message = starts_slot[starts], starts_message[starts]
                if slot == NONE:
                    pair, size, following = cross_pair[message], cross_bytes[message], cross_next[message]
                    cross_begin_s[message] = now
                    if following != NONE:
                        events = _push(times, codes, events, cross_begin_s[following], _code(_CROSS, 0, following))
                else:
                    instance = slot_instance[slot]
                    at = graph_start[instance_graph[instance]] + message
                    pair = message_pair[at]
                    size = message_share[at] * instance_bytes[instance]
                    messages += 1
                if size <= 0.0 or pair_start[pair] == pair_start[pair + 1]:
                    if slot == NONE or pair_s[pair] <= 0.0:
                        arrived_slot[arrived], arrived_message[arrived] = slot, message
                        arrived += 1
                    else:
                        events = _push(times, codes, events, now + pair_s[pair], _code(_MESSAGE, slot, message))
                    continue
                spare -= 1
                flow = free[spare]
                left[flow], rate[flow], since[flow] = size, 0.0, now
                owner[flow], place[flow], via[flow] = slot, message, pair
                for hop in range(pair_start[pair + 1] - pair_start[pair]):
                    link = pair_links[pair_start[pair] + hop]
                    if slot != NONE:
                        link_bytes[link] += size
                    entry = (flow << hop_bits) + hop
                    after[entry], before[entry] = head[link], NONE
                    if head[link] != NONE:
                        before[head[link]] = entry
                    head[link] = entry
                    on_link[link] += 1
                    if not is_dirty[link]:
                        is_dirty[link] = True
                        dirty[dirty_count] = link
                        dirty_count += 1
            if needs != DONE:
                break
            while arrived:
                slot, message = arrived_slot[arrived - 1], arrived_message[arrived - 1]
                if slot == NONE:
                    if events + waiting_start[message + 1] - waiting_start[message] > len(times):
                        needs = EVENTS
                        break
                    arrived -= 1
                    cross_end_s[message] = now
                    for index in range(waiting_start[message], waiting_start[message + 1]):
                        other = waiting[index]
                        when = max(now + waiting_s[index], cross_begin_s[other])
                        events = _push(times, codes, events, when, _code(_CROSS, 0, other))
                    continue
                instance = slot_instance[slot]
                graph = instance_graph[instance]
                first = graph_start[graph]
                if starts + reply_start[first + message + 1] - reply_start[first + message] > len(starts_slot):
                    needs = STARTS
                    break
                arrived -= 1
                for index in range(reply_start[first + message], reply_start[first + message + 1]):
                    other = reply[index]
                    remaining[slot, other] -= 1
                    if remaining[slot, other] == 0:
                        starts_slot[starts], starts_message[starts] = slot, other
                        starts += 1
                for end in range(2):
                    local = message_from[first + message] if end == 0 else message_to[first + message]
                    local_left[slot, local] -= 1
                    node = local_node[slot, local]
                    if local_left[slot, local] == 0 and node != NONE:
                        end_s[node] = now
                        for index in range(next_start[node], next_start[node + 1]):
                            node_waits[next_nodes[index]] -= 1
                            if node_waits[next_nodes[index]] == 0:
                                ready[ready_count] = next_nodes[index]
                                ready_count += 1
                slot_open[slot] -= 1
                if slot_open[slot] == 0:
                    slot_instance[slot] = NONE
                    counters[RUNNING] -= 1
            if needs != DONE:
                break
        if needs != DONE:
            break
        if events + calls > len(times):
            needs = EVENTS
            break
        while calls:
            calls -= 1
            unit = called[calls]
            is_called[unit] = False
            if not unit_runs[unit] and unit_count[unit]:
                node = unit_nodes[_first(unit_waiting[unit_start[unit] :], unit_count[unit])]
                unit_count[unit] -= 1
                unit_runs[unit] = True
                begin_s[node] = now
                events = _push(times, codes, events, now + node_s[node], _code(_NODE, 0, node))
        phase = 1

        # rates of the flows that a change of this instant concerns
        if events + len(left) - spare > len(times):
            needs = EVENTS
            break
        for index in range(dirty_count):
            begin = dirty[index]
            is_dirty[begin] = False
            if link_mark[begin] == mark + 1 or head[begin] == NONE:
                continue
            if on_link[begin] == 1:  # most flows of a collective are alone on their links
                flow = head[begin] >> hop_bits
                pair = via[flow]
                least, alone = np.inf, True
                for hop in range(pair_start[pair], pair_start[pair + 1]):
                    alone = alone and on_link[pair_links[hop]] == 1
                    least = min(least, link_rate[pair_links[hop]])
                if alone:
                    if abs(rate[flow] - least) > _SAME * least:
                        left[flow] -= rate[flow] * (now - since[flow])
                        since[flow], rate[flow] = now, least
                        version[flow] += 1
                        when = now + max(left[flow], 0.0) / least
                        events = _push(times, codes, events, when, _code(_FLOW, flow, version[flow] & _SECOND))
                    continue
            # links and flows that hang together with it
            part_links[0] = begin
            link_count, flow_count, done = 1, 0, 0
            link_mark[begin] = mark + 1
            while done < link_count:
                link = part_links[done]
                capacity[link], sharing[link] = link_rate[link], on_link[link]
                done += 1
                entry = head[link]
                while entry != NONE:
                    flow = entry >> hop_bits
                    if flow_mark[flow] != mark + 1:
                        flow_mark[flow] = mark + 1
                        part_flows[flow_count] = flow
                        flow_count += 1
                        pair = via[flow]
                        for hop in range(pair_start[pair], pair_start[pair + 1]):
                            other = pair_links[hop]
                            if link_mark[other] != mark + 1:
                                link_mark[other] = mark + 1
                                part_links[link_count] = other
                                link_count += 1
                    entry = after[entry]
            # progressive filling
            undecided = flow_count
            while undecided:
                least = np.inf
                for each in range(link_count):
                    link = part_links[each]
                    if sharing[link] > 0:
                        least = min(least, capacity[link] / sharing[link])
                for each in range(link_count):
                    link = part_links[each]
                    if sharing[link] == 0 or capacity[link] / sharing[link] > least * (1 + _SAME):
                        continue
                    entry = head[link]
                    while entry != NONE:
                        flow = entry >> hop_bits
                        entry = after[entry]
                        if flow_mark[flow] != mark + 1:
                            continue
                        flow_mark[flow] = mark + 2  # decided
                        undecided -= 1
                        pair = via[flow]
                        for hop in range(pair_start[pair], pair_start[pair + 1]):
                            other = pair_links[hop]
                            capacity[other] -= least
                            sharing[other] -= 1
                        if abs(rate[flow] - least) > _SAME * least:
                            left[flow] -= rate[flow] * (now - since[flow])
                            since[flow], rate[flow] = now, least
                            version[flow] += 1
                            when = now + max(left[flow], 0.0) / least
                            events = _push(times, codes, events, when, _code(_FLOW, flow, version[flow] & _SECOND))
        dirty_count = 0
        mark += 2

        # the next instant
        if events > len(arrived_slot) or events > len(starts_slot):
            needs = ARRIVED if events > len(arrived_slot) else STARTS
            break
        found = False
        while events:
            when, code = times[0], codes[0]
            if found and when > now:
                break
            events = _pop(times, codes, events)
            kind, first_part, second_part = code >> 60, (code >> _SECOND_BITS) & _FIRST, code & _SECOND
            if kind == _FLOW and second_part != version[first_part] & _SECOND:
                continue  # its rate has changed since
            found = True
            now = when
            if kind == _NODE:
                node = second_part
                end_s[node] = now
                unit = node_unit[node]
                if unit != NONE:
                    unit_runs[unit] = False
                    if not is_called[unit]:
                        is_called[unit] = True
                        called[calls] = unit
                        calls += 1
                for index in range(next_start[node], next_start[node + 1]):
                    node_waits[next_nodes[index]] -= 1
                    if node_waits[next_nodes[index]] == 0:
                        ready[ready_count] = next_nodes[index]
                        ready_count += 1
                continue
            if kind == _CROSS:
                starts_slot[starts], starts_message[starts] = NONE, second_part
                starts += 1
                continue
            slot, message, delay_s = first_part, second_part, 0.0
            if kind == _FLOW:
                flow = first_part
                slot, message, pair = owner[flow], place[flow], via[flow]
                version[flow] += 1
                for hop in range(pair_start[pair + 1] - pair_start[pair]):
                    link, entry = pair_links[pair_start[pair] + hop], (flow << hop_bits) + hop
                    if before[entry] == NONE:
                        head[link] = after[entry]
                    else:
                        after[before[entry]] = after[entry]
                    if after[entry] != NONE:
                        before[after[entry]] = before[entry]
                    on_link[link] -= 1
                    if not is_dirty[link]:
                        is_dirty[link] = True
                        dirty[dirty_count] = link
                        dirty_count += 1
                free[spare] = flow
                spare += 1
                delay_s = pair_s[pair] if slot != NONE else 0.0
            if delay_s > 0.0:
                events = _push(times, codes, events, now + delay_s, _code(_MESSAGE, slot, message))
            else:
                arrived_slot[arrived], arrived_message[arrived] = slot, message
                arrived += 1
        phase = 0
        if not found:
            break
    counters[EVENTS], counters[SPARE_FLOWS], counters[READY] = events, spare, ready_count
    counters[STARTS], counters[ARRIVED], counters[DIRTY] = starts, arrived, dirty_count
    counters[MARK], counters[MESSAGES], counters[PHASE], counters[CALLED] = mark, messages, phase, calls
    clock[0] = now
    return needs


@cache
def compiled() -> Loop:
    """Return `advance` as machine code, which numba keeps in ringtap's cache folder if that is the user's own."""
    import numba

    folder = cache_folder() / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        can_keep = folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK)
    except OSError:
        can_keep = False
    numba.config.CACHE_DIR = str(folder)
    options = {"error_model": "numpy", "no_cfunc_wrapper": True}
    names = dict(globals())  # Python may still run the functions of this module

    def copy(function: Callable[..., object]) -> FunctionType:
        return FunctionType(function.__code__, names, function.__name__)

    for helper in (_push, _pop, _wait, _first, _code):  # machine code calls nothing else
        names[helper.__name__] = numba.njit(no_cpython_wrapper=True, **options)(copy(helper))
    found: Loop = numba.njit(cache=can_keep, **options)(copy(advance))
    return found
