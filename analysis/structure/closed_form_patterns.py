"""Describes communication patterns in closed form: bytes between hosts in an iteration, per byte of gradients.

A form is a matrix with a row per sender and a column per receiver. The hosts of a capture come in any order, so a form
is compared with them in every order that their bytes allow (subgraph matching, after Ullmann, J. ACM 23, 1976).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

RING, TWO_WAY_RING, PAIR, STAR, TREE = "ring", "ring in both directions", "pair", "star", "tree"
ALL_TO_ALL, HALVING, DOUBLE_TREE = "all-to-all", "recursive halving and doubling", "double binary tree"
HIERARCHICAL, SHARDED, PIPELINE = "hierarchical", "sharded parameter server", "pipeline"

# bytes that differ from those of a form by no more than this share fit it
TOLERANCE = 0.1
# comparisons of a host with a place of a form, before a form counts as different
_MAX_COMPARISONS = 20_000
_NONE = -1


@dataclass(frozen=True, eq=False)
class Form:
    """Pattern of a number of hosts.

    Attributes:
        name: one of the constants of this module.
        matrix: bytes from each host to each other one for one byte of gradients, shape (hosts, hosts).
        evidence: the bytes of a host, as a clause.
        servers: number of hosts at the begin that are no workers.
        group: hosts of each group; 0 without groups.
    """

    name: str
    matrix: Matrix
    evidence: str
    servers: int = 0
    group: int = 0


@dataclass(frozen=True)
class Placement:
    """Hosts placed in a form.

    Attributes:
        form: the form.
        order: number of the host at each place.
        error: largest difference of the bytes between two hosts from the form, as a share.
    """

    form: Form
    order: tuple[int, ...]
    error: float


def forms(hosts: int) -> Iterator[Form]:
    """Return the patterns that some hosts can have, those of trees and stars excepted, which have no one form."""
    yield ring(hosts)
    if hosts > 2:
        yield all_to_all(hosts)
        yield double_tree(hosts)
    if hosts > 3:
        for servers in range(2, hosts // 2 + 1):
            yield sharded(hosts - servers, servers)
        yield two_way_ring(hosts)
        if not hosts & (hosts - 1):
            yield halving(hosts)
        for group in range(2, hosts // 2 + 1):
            if not hosts % group:
                yield hierarchical(hosts // group, group)


def ring(hosts: int) -> Form:
    """Return a ring all-reduce (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009)."""
    matrix = np.roll(np.eye(hosts), 1, axis=1) * 2 * (hosts - 1) / hosts
    return Form(RING if hosts > 2 else PAIR, matrix, "each host sends 2(N-1)/N of the gradients to the next one")


def two_way_ring(hosts: int) -> Form:
    """Return a ring all-reduce of half of the gradients in each direction."""
    one = ring(hosts).matrix / 2
    return Form(TWO_WAY_RING, one + one.T, "each host sends (N-1)/N of the gradients to each of two neighbours")


def all_to_all(hosts: int) -> Form:
    """Return a reduce-scatter and an all-gather without intermediate hosts."""
    matrix = (1 - np.eye(hosts)) * 2 / hosts
    return Form(ALL_TO_ALL, matrix, "each host sends the same bytes to every other one")


def halving(hosts: int) -> Form:
    """Return recursive halving and doubling (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005); hosts: 2^k."""
    distance = np.arange(hosts)[:, None] ^ np.arange(hosts)
    matrix = np.where(distance & (distance - 1) == 0, 2 * distance / hosts, 0.0)  # powers of two, and 0
    evidence = "each host exchanges as many bytes as the gradients have with one other, and half of the bytes before"
    return Form(HALVING, matrix, f"{evidence} with each further one of log2 N")


def double_tree(hosts: int) -> Form:
    """Return two binary trees for half of the gradients each (Sanders, Speck and Träff, Parallel Comput. 35, 2009)."""
    matrix = np.zeros((hosts, hosts))
    for parents in two_trees(hosts):
        child = np.flatnonzero(parents != _NONE)
        np.add.at(matrix, (child, parents[child]), 0.5)
        np.add.at(matrix, (parents[child], child), 0.5)
    evidence = "half of the gradients pass each link of two binary trees, and no host has children in both"
    return Form(DOUBLE_TREE, matrix, evidence)


def two_trees(hosts: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each host's parent in two binary trees, -1 at the root; no host has children in both.

    Hosts with children are odd in the first tree. The second one is its mirror image (an even number of hosts) or the
    first one shifted by one host.
    """
    first = np.full(hosts, _NONE)
    odd = hosts - 1 + hosts % 2

    def root_of(low: int, high: int) -> int:
        half = (high - low) // 2
        root = low if not half else low + half - 1 + half % 2
        if half:
            first[root_of(low, root)] = first[root_of(root + 1, high)] = root
        return root

    root = root_of(0, odd)
    if odd < hosts:
        first[root] = odd
    hosts_in_order = np.arange(hosts)
    place = (hosts_in_order + 1) % hosts if hosts % 2 else hosts - 1 - hosts_in_order
    host_at, above = np.argsort(place), first[place]
    return first, np.where(above == _NONE, _NONE, host_at[above])


def hierarchical(groups: int, group: int) -> Form:
    """Return rings in groups, a ring of the groups' first hosts, and a broadcast on a binary tree in each group."""
    matrix = np.kron(np.eye(groups), ring(group).matrix).astype(np.float64)
    matrix[::group, ::group] += ring(groups).matrix
    for place in range(1, group):
        firsts = np.arange(groups) * group
        matrix[firsts + (place - 1) // 2, firsts + place] += 1
    evidence = "a ring all-reduce in each group, one of the groups' first hosts, and a broadcast in each group"
    return Form(HIERARCHICAL, matrix, evidence, group=group)


def sharded(workers: int, servers: int) -> Form:
    """Return servers with a part of the gradients each, and workers that exchange with all of them (Li, OSDI 2014)."""
    matrix = np.zeros((servers + workers, servers + workers))
    matrix[servers:, :servers] = matrix[:servers, servers:] = 1 / servers
    evidence = "each worker sends a part of the gradients to each server and gets as many bytes back"
    return Form(SHARDED, matrix, evidence, servers)


def best_fits(observed: Matrix) -> list[Placement]:
    """Return the fits of forms to the bytes between hosts, shape (hosts, hosts), the closest one first."""
    fits = [fit for form in forms(len(observed)) if (fit := fit_of(observed, form)) is not None]
    return sorted(fits, key=lambda fit: fit.error)


def fit_of(observed: Matrix, form: Form) -> Placement | None:
    """Place hosts in a form, such that the bytes between all of them fit; None if there is no such order."""
    wanted = form.matrix
    given = observed * (wanted.sum() / observed.sum())
    if not _near(np.sort(given, axis=None), np.sort(wanted, axis=None)):
        return None
    alike = _alike(given, wanted) & _alike(given.T, wanted.T)
    order = _placed(given, wanted, alike)
    if order is None:
        return None
    mine = given[np.ix_(order, order)]
    used = wanted > 0
    return Placement(form, tuple(order), float(np.abs(mine[used] / wanted[used] - 1).max()))


def _near(given: Matrix, wanted: Matrix) -> bool:
    return bool((np.abs(given - wanted) <= TOLERANCE * wanted).all())


def _alike(given: Matrix, wanted: Matrix) -> npt.NDArray[np.bool_]:
    """Return the hosts that may have each place by what they send, shape (places, hosts)."""
    mine, places = np.sort(given, axis=1), np.sort(wanted, axis=1)
    near = np.abs(mine[None] - places[:, None]) <= TOLERANCE * places[:, None]
    return np.asarray(near.all(axis=2))


def _placed(given: Matrix, wanted: Matrix, alike: npt.NDArray[np.bool_]) -> list[int] | None:
    """Return the host at each place, by depth-first search; None if no order fits, or none of the first many."""
    places = _connected_order(wanted)
    hosts: list[int] = []
    left = [list(np.flatnonzero(alike[places[0]])[::-1])]
    comparisons = 0
    while left:
        if not left[-1]:
            left.pop()
            if hosts:
                hosts.pop()
            continue
        host, place = left[-1].pop(), places[len(hosts)]
        comparisons += 1
        if comparisons > _MAX_COMPARISONS:
            return None
        before = places[: len(hosts)]
        if host in hosts or not (
            _near(given[host, hosts], wanted[place, before]) and _near(given[hosts, host], wanted[before, place])
        ):
            continue
        hosts.append(int(host))
        if len(hosts) == len(places):
            return [hosts[places.index(place)] for place in range(len(places))]
        left.append(list(np.flatnonzero(alike[places[len(hosts)]])[::-1]))
    return None


def _connected_order(wanted: Matrix) -> list[int]:
    """Return all places, each but the first next to one before it."""
    linked = (wanted + wanted.T) > 0
    order = [0]
    for place in order:
        order += [int(other) for other in np.flatnonzero(linked[place]) if other not in order]
    return order
