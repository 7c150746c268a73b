"""Routes of a testbed: every flow takes one of the shortest paths between its hosts (ECMP)."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from ringtap.agents.testbed.topology import SWITCH, Link, TestbedSpec


class Route(NamedTuple):
    """Route of a node.

    Attributes:
        host: destination: a host, or the switch that adds gradients; None: all without a route of their own.
        links: links from the node that begin a shortest path; flows are spread over them.
    """

    host: str | None
    links: tuple[Link, ...]


def hops(spec: TestbedSpec, host: str) -> dict[str, int]:
    """Return the number of links of a shortest path from each node to a host."""
    towards: dict[str, list[str]] = {}
    for link in spec.links:
        towards.setdefault(link.target, []).append(link.source)
    found, waiting = {host: 0}, deque([host])
    while waiting:
        node = waiting.popleft()
        for source in towards[node]:
            if source not in found:
                found[source] = found[node] + 1
                waiting.append(source)
    return found


def carries_all(spec: TestbedSpec, link: Link, source: str, target: str) -> bool:
    """Return True if all shortest paths from one host to another lead through a link."""
    from_source, to_target = hops(spec, source), hops(spec, target)
    beside = [
        other
        for other in spec.links
        if from_source[other.source] + 1 + to_target[other.target] == to_target[source]
        and from_source[other.source] == from_source[link.source]
    ]
    return beside == [link]


def routes(spec: TestbedSpec) -> dict[str, list[Route]]:
    """Return the routes of each node to all hosts and to the switch that adds gradients, but not to itself.

    What most hosts have in common is one route, so that a host with one link has one route.
    """
    leaving: dict[str, list[Link]] = {node: [] for node in spec.nodes}
    for link in spec.links:
        leaving[link.source].append(link)
    ways: dict[str, dict[str, tuple[Link, ...]]] = {node: {} for node in spec.nodes}
    for host in (*spec.hosts, *([spec.aggregator] if spec.aggregator not in (None, SWITCH) else [])):
        distance = hops(spec, host)
        for node, links in leaving.items():
            # a switch has a route to each neighbour
            if node != host and (host in spec.hosts or distance[node] > 1):
                ways[node][host] = tuple(link for link in links if distance[link.target] < distance[node])
    found = {}
    for node, by_host in ways.items():
        usual = Counter(by_host.values()).most_common(1)[0][0]
        own = [Route(host, links) for host, links in by_host.items() if links != usual]
        found[node] = [Route(None, usual), *own]
    return found
