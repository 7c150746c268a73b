"""The event loop of the flow-level simulation, compiled by numba.

Flows share links max-min fairly. An event is the end of a flow, the arrival of a message, or the end of a computation.
All events of one instant are handled before rates are calculated anew, and only for the flows that share a link, directly
or through others, with a flow that began or ended.

A collective is given once, as a placed message graph; each instance of it only has a counter per message.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NONE = -1
COMPUTE, COLLECTIVE = range(2)
_FLOW, _MESSAGE, _NODE = range(3)
_SAME = 1e-12  # relative difference of rates that are the same
_SECOND_BITS = 38
_SECOND = (1 << _SECOND_BITS) - 1
_FIRST = (1 << 22) - 1


@njit(cache=True)
def _push(times, codes, count, when, code):
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


@njit(cache=True)
def _pop(times, codes, count):
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


@njit(cache=True)
def _code(kind, first, second):
    return (np.int64(kind) << 60) | (np.int64(first) << _SECOND_BITS) | np.int64(second)


@njit(cache=True)
def _larger(values, length):
    found = np.zeros(length, values.dtype)
    found[: len(values)] = values
    return found


@njit(cache=True)
def simulate(
    # nodes: what each rank does, in an order of its own
    node_kind, node_s, node_instance, node_local, node_waits, next_start, next_nodes,
    # instances of collectives
    instance_graph, instance_bytes,
    # placed message graphs, one after the other
    graph_start, local_start, message_share, message_pair, message_from, message_to, message_waits,
    reply_start, reply, by_source_start, by_source, local_messages,
    # pairs of hosts, and links
    pair_start, pair_links, pair_s, link_rate,
):  # fmt: skip
    """Simulate nodes and messages.

    Times are in s, rates in bytes/s. ``next_*``: nodes that wait for a node. ``reply*``: messages that wait for a
    message of the same graph. ``message_waits`` counts the messages that one waits for, and its sender if that is a
    worker. ``by_source``: messages of a local rank. ``local_messages``: messages that a local rank sends and receives.

    Returns:
        The time at which each node begins and ends, -1 if it never does; the bytes through each link; the number of
        messages.
    """
    nodes, links = len(node_kind), len(link_rate)
    begin_s, end_s = np.full(nodes, -1.0), np.full(nodes, -1.0)
    link_bytes = np.zeros(links)
    waits = node_waits.copy()
    hops = 1
    for pair in range(len(pair_start) - 1):
        hops = max(hops, pair_start[pair + 1] - pair_start[pair])

    # the heap, with room for an event per flow and many more; outdated events of flows stay in it until their time
    times, codes, events = np.empty(1024), np.empty(1024, np.int64), 0

    # flows
    flows = 64
    left, rate, since = np.zeros(flows), np.zeros(flows), np.zeros(flows)
    version, owner, place = np.zeros(flows, np.int64), np.zeros(flows, np.int64), np.zeros(flows, np.int64)
    via = np.zeros(flows, np.int64)
    after, before = np.full(flows * hops, NONE), np.full(flows * hops, NONE)  # neighbours in the list of a link
    free = np.arange(flows - 1, -1, -1)
    spare = flows
    head, on_link = np.full(links, NONE), np.zeros(links, np.int64)

    # running instances of collectives
    largest = locals_ = 1
    for graph in range(len(graph_start) - 1):
        largest = max(largest, graph_start[graph + 1] - graph_start[graph])
        locals_ = max(locals_, local_start[graph + 1] - local_start[graph])
    slots = 4
    remaining = np.zeros((slots, largest), np.int32)
    local_left = np.zeros((slots, locals_), np.int64)
    local_node = np.full((slots, locals_), NONE)
    slot_instance, slot_messages = np.full(slots, NONE), np.zeros(slots, np.int64)
    slot_of = np.full(len(instance_graph), NONE)

    # marks of the calculation of rates
    link_mark, flow_mark = np.zeros(links, np.int64), np.zeros(flows, np.int64)
    mark = 0
    dirty, dirty_count, is_dirty = np.empty(links, np.int64), 0, np.zeros(links, np.bool_)
    part_links, capacity, sharing = np.empty(links, np.int64), np.empty(links), np.empty(links, np.int64)
    part_flows = np.empty(flows, np.int64)

    # work lists within one instant
    ready, ready_count = np.empty(max(nodes, 1), np.int64), 0
    starts_slot, starts_message, starts = np.empty(1024, np.int64), np.empty(1024, np.int64), 0
    arrived_slot, arrived_message, arrived = np.empty(1024, np.int64), np.empty(1024, np.int64), 0
    messages = 0

    for node in range(nodes):
        if waits[node] == 0:
            ready[ready_count] = node
            ready_count += 1
    now = 0.0
    while True:
        # everything that follows at this instant
        while ready_count or starts or arrived:
            while ready_count:
                ready_count -= 1
                node = ready[ready_count]
                begin_s[node] = now
                if node_kind[node] == COMPUTE:
                    if events == len(times):
                        times, codes = _larger(times, 2 * events), _larger(codes, 2 * events)
                    events = _push(times, codes, events, now + node_s[node], _code(_NODE, 0, node))
                    continue
                instance = node_instance[node]
                graph = instance_graph[instance]
                first, first_local = graph_start[graph], local_start[graph]
                slot = slot_of[instance]
                if slot == NONE:
                    for each in range(slots):
                        if slot_instance[each] == NONE:
                            slot = each
                            break
                    if slot == NONE:
                        slot = slots
                        slots *= 2
                        new_remaining = np.zeros((slots, largest), np.int32)
                        new_remaining[:slot] = remaining
                        remaining = new_remaining
                        new_left, new_node = np.zeros((slots, locals_), np.int64), np.full((slots, locals_), NONE)
                        new_left[:slot] = local_left
                        new_node[:slot] = local_node
                        local_left, local_node = new_left, new_node
                        new_instance = np.full(slots, NONE)
                        new_instance[:slot] = slot_instance
                        slot_instance = new_instance
                        slot_messages = _larger(slot_messages, slots)
                    count = graph_start[graph + 1] - first
                    slot_of[instance], slot_instance[slot], slot_messages[slot] = slot, instance, count
                    remaining[slot, :count] = message_waits[first : first + count]
                    for local in range(local_start[graph + 1] - first_local):
                        local_left[slot, local] = local_messages[first_local + local] + 1  # 1: its node must begin
                        local_node[slot, local] = NONE
                    # those that nobody has to begin: of servers and switches that wait for nothing
                    for message in range(count):
                        if remaining[slot, message] == 0:
                            if starts == len(starts_slot):
                                starts_slot = _larger(starts_slot, 2 * starts)
                                starts_message = _larger(starts_message, 2 * starts)
                            starts_slot[starts], starts_message[starts] = slot, message
                            starts += 1
                local = node_local[node]
                local_node[slot, local] = node
                for index in range(by_source_start[first_local + local], by_source_start[first_local + local + 1]):
                    message = by_source[index]
                    remaining[slot, message] -= 1
                    if remaining[slot, message] == 0:
                        if starts == len(starts_slot):
                            starts_slot = _larger(starts_slot, 2 * starts)
                            starts_message = _larger(starts_message, 2 * starts)
                        starts_slot[starts], starts_message[starts] = slot, message
                        starts += 1
                local_left[slot, local] -= 1
                if local_left[slot, local] == 0:  # it neither sends nor receives, or all had arrived before
                    end_s[node] = now
                    for index in range(next_start[node], next_start[node + 1]):
                        waits[next_nodes[index]] -= 1
                        if waits[next_nodes[index]] == 0:
                            ready[ready_count] = next_nodes[index]
                            ready_count += 1
            while starts:
                starts -= 1
                slot, message = starts_slot[starts], starts_message[starts]
                instance = slot_instance[slot]
                at = graph_start[instance_graph[instance]] + message
                pair = message_pair[at]
                size = message_share[at] * instance_bytes[instance]
                messages += 1
                if size <= 0.0 or pair_start[pair] == pair_start[pair + 1]:
                    if pair_s[pair] <= 0.0:
                        if arrived == len(arrived_slot):
                            arrived_slot = _larger(arrived_slot, 2 * arrived)
                            arrived_message = _larger(arrived_message, 2 * arrived)
                        arrived_slot[arrived], arrived_message[arrived] = slot, message
                        arrived += 1
                    else:
                        if events == len(times):
                            times, codes = _larger(times, 2 * events), _larger(codes, 2 * events)
                        events = _push(times, codes, events, now + pair_s[pair], _code(_MESSAGE, slot, message))
                    continue
                if spare == 0:
                    more = 2 * flows
                    left, rate, since = _larger(left, more), _larger(rate, more), _larger(since, more)
                    version, owner, place = _larger(version, more), _larger(owner, more), _larger(place, more)
                    via, flow_mark = _larger(via, more), _larger(flow_mark, more)
                    after, before = _larger(after, more * hops), _larger(before, more * hops)
                    part_flows = _larger(part_flows, more)
                    free = np.empty(more, np.int64)
                    for each in range(more - 1, flows - 1, -1):
                        free[spare] = each
                        spare += 1
                    flows = more
                spare -= 1
                flow = free[spare]
                left[flow], rate[flow], since[flow] = size, 0.0, now
                owner[flow], place[flow], via[flow] = slot, message, pair
                for hop in range(pair_start[pair + 1] - pair_start[pair]):
                    link = pair_links[pair_start[pair] + hop]
                    link_bytes[link] += size
                    entry = flow * hops + hop
                    after[entry], before[entry] = head[link], NONE
                    if head[link] != NONE:
                        before[head[link]] = entry
                    head[link] = entry
                    on_link[link] += 1
                    if not is_dirty[link]:
                        is_dirty[link] = True
                        dirty[dirty_count] = link
                        dirty_count += 1
            while arrived:
                arrived -= 1
                slot, message = arrived_slot[arrived], arrived_message[arrived]
                instance = slot_instance[slot]
                graph = instance_graph[instance]
                first, first_local = graph_start[graph], local_start[graph]
                for index in range(reply_start[first + message], reply_start[first + message + 1]):
                    other = reply[index]
                    remaining[slot, other] -= 1
                    if remaining[slot, other] == 0:
                        if starts == len(starts_slot):
                            starts_slot = _larger(starts_slot, 2 * starts)
                            starts_message = _larger(starts_message, 2 * starts)
                        starts_slot[starts], starts_message[starts] = slot, other
                        starts += 1
                for end in range(2):
                    local = message_from[first + message] if end == 0 else message_to[first + message]
                    local_left[slot, local] -= 1
                    node = local_node[slot, local]
                    if local_left[slot, local] == 0 and node != NONE:
                        end_s[node] = now
                        for index in range(next_start[node], next_start[node + 1]):
                            waits[next_nodes[index]] -= 1
                            if waits[next_nodes[index]] == 0:
                                ready[ready_count] = next_nodes[index]
                                ready_count += 1
                slot_messages[slot] -= 1
                if slot_messages[slot] == 0:
                    slot_instance[slot] = NONE

        # rates of the flows that a change of this instant concerns
        for index in range(dirty_count):
            begin = dirty[index]
            is_dirty[begin] = False
            if link_mark[begin] == mark + 1 or head[begin] == NONE:
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
                    flow = entry // hops
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
                        flow = entry // hops
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
                            if events == len(times):
                                times, codes = _larger(times, 2 * events), _larger(codes, 2 * events)
                            when = now + max(left[flow], 0.0) / least
                            events = _push(times, codes, events, when, _code(_FLOW, flow, version[flow] & _SECOND))
        dirty_count = 0
        mark += 2

        # the next instant
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
                for index in range(next_start[node], next_start[node + 1]):
                    waits[next_nodes[index]] -= 1
                    if waits[next_nodes[index]] == 0:
                        ready[ready_count] = next_nodes[index]
                        ready_count += 1
                continue
            slot, message, delay_s = first_part, second_part, 0.0
            if kind == _FLOW:
                flow = first_part
                slot, message, pair = owner[flow], place[flow], via[flow]
                version[flow] += 1
                for hop in range(pair_start[pair + 1] - pair_start[pair]):
                    link, entry = pair_links[pair_start[pair] + hop], flow * hops + hop
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
                delay_s = pair_s[pair]
            if delay_s > 0.0:
                if events == len(times):
                    times, codes = _larger(times, 2 * events), _larger(codes, 2 * events)
                events = _push(times, codes, events, now + delay_s, _code(_MESSAGE, slot, message))
            else:
                if arrived == len(arrived_slot):
                    arrived_slot = _larger(arrived_slot, 2 * arrived)
                    arrived_message = _larger(arrived_message, 2 * arrived)
                arrived_slot[arrived], arrived_message[arrived] = slot, message
                arrived += 1
        if not found:
            return begin_s, end_s, link_bytes, messages
