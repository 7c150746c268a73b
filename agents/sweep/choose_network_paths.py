"""Chooses the paths of jobs through a testbed, and finds the links that they share.

Each worker of a job sends to the next one, as in a ring; the last one sends to the first. Where there are several
shortest paths, each job has one of them, which is random, as by a hash of ECMP, or chosen as by Crux (SIGCOMM 2024).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringtap.agents.testbed.shortest_path_routes import links_on_path, path_count
from ringtap.agents.testbed.topology import Link, TestbedSpec
from ringtap.core.errors import UsageError
from ringtap.core.link_counter_sources import nic_counter
from ringtap.core.sweep_plans.jobs_that_share import SharingJob

if TYPE_CHECKING:
    from ringtap.workload import interleaving
    from ringtap.workload.interleaving import PeriodicJob


class UsedLink(NamedTuple):
    """A link of a testbed, its number there, and its flows of each job by the job's number."""

    number: int
    link: Link
    flows: Mapping[int, int]

    def counter(self, spec: TestbedSpec, jobs: Sequence[SharingJob]) -> dict[str, object]:
        """Return the counter of the link's bytes as in shared.jsonl: at its switch, of two at the one nearer to hosts.

        Args:
            spec: the testbed.
            jobs: the jobs.
        """
        link = self.link
        ends = [(link.source, link.source_nic, "tx"), (link.target, link.target_nic, "rx")]
        switches = [end for end in ends if end[0] not in spec.hosts]
        node, nic, direction = min(switches, key=lambda end: spec.nodes.index(end[0])) if switches else ends[0]
        item: dict[str, object] = {**nic_counter(node, nic, direction), "link": " ".join(link.place)}
        return item | {"rate_bps": link.rate_bps, "jobs": [jobs[number].name for number in self.flows]}


def flows(spec: TestbedSpec, workers: Sequence[str], path: int) -> dict[Link, int]:
    """Return the number of flows through each link of a job's path if workers send in a ring, in one direction.

    The direction is not known: links that both directions use have the larger number.
    """
    found: Counter[Link] = Counter()
    for order in (workers, workers[::-1]):
        pairs = zip(order, (*order[1:], order[0]), strict=True)
        found |= Counter(link for source, target in pairs for link in links_on_path(spec, source, target, path))
    return dict(found)


def used_links(spec: TestbedSpec, jobs: Mapping[int, SharingJob], paths: Sequence[int]) -> list[UsedLink]:
    """Return the links of jobs on their paths that several share, or, if there is none, all links.

    Args:
        spec: the testbed.
        jobs: the jobs by number.
        paths: path of each number.
    """
    own = {number: flows(spec, job.workers, paths[number]) for number, job in jobs.items()}
    users = {
        link: {job: found[link] for job, found in own.items() if link in found}
        for link in dict.fromkeys(link for found in own.values() for link in found)
    }
    most = min(2, max(map(len, users.values())))
    numbers = {link: number for number, link in enumerate(spec.links)}
    used = [UsedLink(numbers[link], link, each) for link, each in users.items() if len(each) >= most]
    return sorted(used)


def limiting_links(links: Sequence[interleaving.InterleavedLink]) -> list[interleaving.InterleavedLink]:
    """Return links without those whose jobs all share another one that is no faster."""
    slowest: dict[tuple[int, ...], interleaving.InterleavedLink] = {}
    for link in sorted(links, key=lambda link: link.capacity_bps):
        slowest.setdefault(link.jobs, link)
    return [
        link
        for link in slowest.values()
        if not any(
            set(link.jobs) < set(other.jobs) and other.capacity_bps <= link.capacity_bps for other in slowest.values()
        )
    ]


def check_sharing(spec: TestbedSpec, jobs: Sequence[SharingJob]) -> None:
    """Check that each job may share a link with another one.

    Raises:
        UsageError: a job has no link in common with another one on any path.
    """
    paths = range(path_count(spec))
    links = [{link for path in paths for link in flows(spec, job.workers, path)} for job in jobs]
    for number, job in enumerate(jobs):
        if all(links[number].isdisjoint(other) for place, other in enumerate(links) if place != number):
            raise UsageError(
                f"{job.name} has no link of the {spec.topology} in common with another job: give it workers whose "
                "traffic passes the same links"
            )


def random_paths(spec: TestbedSpec, seed: int, jobs: int, draw: int) -> list[int]:
    """Return a random path for each job.

    Args:
        spec: the testbed.
        seed: seed of the plan.
        jobs: number of jobs.
        draw: number of the draw, from 0.
    """
    paths, source = path_count(spec), random.Random(f"{seed} {draw}")
    return [source.randrange(paths) for _ in range(jobs)]


def flow_capacity_bps(spec: TestbedSpec, workers: Sequence[str]) -> float:
    """Return the rate that a job's slowest link leaves each of the job's flows."""
    return min(link.rate_bps / count for link, count in flows(spec, workers, 0).items())


def crux_paths(
    spec: TestbedSpec, jobs: Sequence[SharingJob], alone: Sequence[PeriodicJob], intensities: Sequence[float]
) -> list[int]:
    """Return the path of each job: in the order of GPU intensity, each takes the least congested one.

    Congestion is the use of the busiest link of a path by the jobs that have theirs already; of paths whose busiest
    links are alike, the use of the next ones decides.

    Args:
        spec: the testbed.
        jobs: the jobs.
        alone: their communication as recorded alone.
        intensities: their GPU intensities.
    """
    use: Counter[Link] = Counter()
    found = [0] * len(jobs)
    for number in sorted(range(len(jobs)), key=lambda number: -intensities[number]):
        ways = [flows(spec, jobs[number].workers, path) for path in range(path_count(spec))]
        ranks = [sorted((use[link] for link in way), reverse=True) for way in ways]
        found[number] = ranks.index(min(ranks))
        rate_bps = alone[number].bits / (alone[number].period_ns / 1e9)
        for link, count in ways[found[number]].items():
            use[link] += count * rate_bps / link.rate_bps  # type: ignore[assignment]
    return found
