"""Calculates the routes of a testbed: every flow takes one of the shortest paths between its hosts.

The kernel spreads training and cross traffic over these by ports (ECMP). The traffic of jobs that share links takes the
path that each job is given.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import lru_cache
from typing import NamedTuple

from ringtap.agents.testbed.topology import Link, TestbedSpec
from ringtap.core.testbed_options import SWITCH

MAX_PATHS = 16  # between two hosts, among which a job may have one


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


@lru_cache(maxsize=4096)
def _next_links(spec: TestbedSpec, host: str, path: int) -> tuple[dict[str, Link], dict[str, int]]:
    """Return the link by which each node reaches a host on one of the shortest paths, and the number of these paths."""
    leaving: dict[str, list[Link]] = {}
    for link in spec.links:
        leaving.setdefault(link.source, []).append(link)
    distance = hops(spec, host)
    found: dict[str, Link] = {}
    paths = {host: 1}
    for node in list(distance)[1:]:  # from near to far
        links = [link for link in leaving[node] if distance[link.target] < distance[node]]
        paths[node] = sum(paths[link.target] for link in links)
        number = path % paths[node]
        for link in links:
            if number < paths[link.target]:
                found[node] = link
                break
            number -= paths[link.target]
    return found, paths


@lru_cache(maxsize=64)
def path_count(spec: TestbedSpec) -> int:
    """Return the largest number of shortest paths between two hosts, up to `MAX_PATHS`."""
    most = max(paths[host] for other in spec.hosts for paths in [_next_links(spec, other, 0)[1]] for host in spec.hosts)
    return min(most, MAX_PATHS)


def links_on_path(spec: TestbedSpec, source: str, target: str, path: int) -> list[Link]:
    """Return the links between two hosts on one of the shortest paths, by its number from 0.

    Of fewer paths than that, it is the one with the number's remainder. The numbers of a leaf-spine network are those
    of its spines.
    """
    found, node = [], source
    while node != target:
        found.append(_next_links(spec, target, path)[0][node])
        node = found[-1].target
    return found


def path_routes(spec: TestbedSpec, path: int) -> dict[str, list[Route]]:
    """Return the routes of each node by which all traffic takes the paths with a number.

    The destinations of a node's routes are the same for all numbers.
    """
    degree = Counter(link.source for link in spec.links)
    found: dict[str, list[Route]] = {node: [] for node in spec.nodes}
    for host in spec.hosts:
        for node, link in _next_links(spec, host, path)[0].items():
            if degree[node] > 1 or not found[node]:
                found[node].append(Route(host if degree[node] > 1 else None, (link,)))
    return found
