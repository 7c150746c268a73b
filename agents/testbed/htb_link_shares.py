"""Divides links among jobs: sets classes of HTB in place of the plain limits of links, and the paths of jobs.

One class has the rate of the link. Below it, each job has a class, to which a filter sends the
packets to its addresses, and the rest has one. A class may use what the others leave. Weights are the classes' rates,
and priorities their order. Shares that change with the bytes that a job has sent, as by MLTCP (HotNets 2024), are
emulated: a thread counts the bytes of each class and changes its rate every `TICK_S`.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyroute2 import DiagSocket, IPRoute
from pyroute2.netlink import rtnl

from ringtap.agents.testbed import build, shortest_path_routes
from ringtap.agents.testbed.topology import JobShare, Link, TestbedSpec
from ringtap.collectors.netlink import (
    DUMP,
    HEADER_BYTES,
    ROUTE,
    NetlinkSocket,
    attribute_head,
    message_at,
    request,
)
from ringtap.collectors.qdisc import BASIC, kind_and_statistics
from ringtap.core.errors import MeasurementError, error_message

TICK_S = 0.015
LEAST_SHARE = 0.01  # of a link, for the rest, and for jobs whose priority decides
_ROOT, _LINK, _REST, _FIRST_JOB = 0x10000, 0x10001, 0x10002, 0x10010
_IPV4, _DESTINATION = 0x0800, 16  # type in Ethernet frames; place in the header
_TICK_NS = 64  # of the times in which HTB counts bytes
_SAME = 0.02  # change of a rate that is not worth a message

_RTM_NEWQDISC, _RTM_NEWTCLASS, _RTM_GETTCLASS = 36, 40, 42
_ACK, _CREATE = 0x4, 0x400
_TCA_KIND, _TCA_OPTIONS, _TCA_HTB_PARMS = 1, 2, 1
_MESSAGE = struct.Struct("=BBHiIII")  # linux/rtnetlink.h, tcmsg
_RATE = struct.Struct("=BBHhHI")
_LINK_LAYER_ETHERNET = 1
_ESTABLISHED, _ASK_CONGESTION_CONTROL = 1 << 1, 1 << 3


def class_rates_bps(shares: Sequence[JobShare], weights: Sequence[float], rate_bps: float) -> list[float]:
    """Return the rates that the jobs of a link have in any case; together with the rest's they are the link's.

    Args:
        shares: the jobs' shares.
        weights: their present weights.
        rate_bps: rate of the link.
    """
    if len({share.priority for share in shares}) > 1:
        return [LEAST_SHARE * rate_bps] * len(shares)
    return [(1 - LEAST_SHARE) * rate_bps * weight / sum(weights) for weight in weights]


def _attribute(kind: int, data: bytes) -> bytes:
    return attribute_head(kind, len(data)) + data + bytes(-len(data) % 4)


def _is_unanswered(data: memoryview, length: int) -> bool:
    """Return False if a datagram acknowledges a request; raise OSError if it refuses it."""
    message_at(data, 0, length)
    return False


class Classes:
    """Classes of HTB of a link, set and counted by messages to the kernel that take some microseconds.

    Args:
        link: the link.
        spec: the testbed.
    """

    def __init__(self, link: Link, spec: TestbedSpec) -> None:
        node, nic = link.source, link.source_nic
        self._spec, self.place, self.rate_bps = spec, f"{nic} of {node}", link.rate_bps
        self._netlink = build.in_namespace(node, lambda: NetlinkSocket(ROUTE))
        self._index = build.in_namespace(node, lambda: socket.if_nametoindex(nic))

    def close(self) -> None:
        """Close the socket to the kernel."""
        self._netlink.close()

    def set(self, handle: int, rate_bps: float, *, order: int = 0, weight: float = 1.0) -> None:
        """Add or change a class.

        Args:
            handle: the class.
            rate_bps: rate that it has in any case.
            order: place in the order in which classes get what others leave, from 0.
            weight: share of what others leave, among classes with the same place, from 1.
        """
        spec = self._spec
        rates = max(round(rate_bps / 8), 1), self.rate_bps // 8  # its own, and the most with what others leave
        bursts = (min(round(spec.burst_bytes * 1e9 / rate / _TICK_NS), 2**32 - 1) for rate in rates)
        quantum = round((spec.mtu * spec.offload_segments + 14) * weight)
        options = b"".join(_RATE.pack(0, _LINK_LAYER_ETHERNET, 0, 0, 0, rate) for rate in rates)
        options += struct.pack("=IIIII", *bursts, quantum, 0, order)
        parent = _ROOT if handle == _LINK else _LINK
        data = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, self._index, handle, parent, 0)
        data += _attribute(_TCA_KIND, b"htb\0") + _attribute(_TCA_OPTIONS, _attribute(_TCA_HTB_PARMS, options))
        self._change(_RTM_NEWTCLASS, data)

    def add_queue(self, handle: int) -> None:
        """Give a class the queue of the testbed's limits, which pyroute2 does not know."""
        data = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, self._index, 0, handle, 0)
        data += _attribute(_TCA_KIND, b"bfifo\0") + _attribute(_TCA_OPTIONS, struct.pack("=I", self._spec.queue_bytes))
        self._change(_RTM_NEWQDISC, data)

    def sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each class has sent, by handle."""
        found: dict[int, int] = {}

        def take(_: int, data: memoryview, begin: int, end: int) -> None:
            handle = _MESSAGE.unpack_from(data, begin + HEADER_BYTES)[4]
            places = kind_and_statistics(data, begin, end)[1]
            found[handle] = struct.unpack_from("=Q", data, places[BASIC])[0] if BASIC in places else 0

        message = request(_RTM_GETTCLASS, DUMP, _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, self._index, 0, 0, 0))
        with self._named_errors():
            self._netlink.dump_each(message, take)
        return found

    def _change(self, kind: int, data: bytes) -> None:
        with self._named_errors():
            self._netlink.dump(request(kind, _ACK | _CREATE, data), _is_unanswered)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MeasurementError(
                f"the kernel refuses classes of HTB at {self.place}: {error_message(error)}"
            ) from error


class JobProgress:
    """Bytes that a job has sent through a link in its present iteration.

    Args:
        share: the job's share.
    """

    def __init__(self, share: JobShare) -> None:
        self._share = share
        self._first_bytes: int | None = None
        self._last_bytes, self._last_s = 0, 0.0

    def weight(self, sent_bytes: int, now_s: float) -> float:
        """Return the weight when the job has sent a number of bytes in all.

        An iteration begins with the first bytes after a gap.
        """
        share = self._share
        if self._first_bytes is None or now_s - self._last_s > share.gap_s:
            self._first_bytes = sent_bytes if self._first_bytes is None else self._last_bytes
        if sent_bytes != self._last_bytes:
            self._last_bytes, self._last_s = sent_bytes, now_s
        sent = (sent_bytes - self._first_bytes) / share.iteration_bytes if share.slope else 0.0
        return share.intercept + share.slope * min(sent, 1.0)


class LinkShares:
    """Shares of jobs in a testbed's links, and their paths.

    Args:
        spec: the testbed.
    """

    def __init__(self, spec: TestbedSpec) -> None:
        self._spec = spec
        self._links: list[tuple[Classes, Sequence[int]]] = []  # with the numbers of the jobs
        self._shared: dict[int, Sequence[int]] = {}  # by number of the link
        self._routes = [(0, spec.congestion_control)] * spec.jobs  # path and congestion control of each job
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._cost: dict[str, float] = {}

    def set(
        self, links: Mapping[int, Sequence[int]], shares: Sequence[JobShare], paths: Sequence[int]
    ) -> dict[str, float]:
        """Give jobs their shares and their paths.

        Args:
            links: numbers of the jobs that share a link, by its number in ``spec.links``; all other links have plain
                limits.
            shares: share of each job of the testbed.
            paths: number of each job's path, as for `shortest_path_routes.links_on_path`.

        Returns:
            Facts of the thread that has changed shares until now: ``ticks``, ``seconds`` and ``cpu_s``; empty if there
            was none.

        Raises:
            UsageError: the kernel lacks a feature.
            MeasurementError: the kernel refuses a class.
        """
        cost = self._end_thread()
        controls = [share.congestion_control or self._spec.congestion_control for share in shares]
        self._route(list(zip(paths, controls, strict=True)))
        if dict(links) != self._shared:
            self._replace_limits(dict(links))
        for classes, jobs in self._links:
            _set_jobs(classes, jobs, [shares[job] for job in jobs])
        if self._links and any(share.slope for share in shares):
            self._stop.clear()
            self._thread = threading.Thread(target=self._grow, args=(shares,), daemon=True)
            self._thread.start()
        return cost

    def _route(self, routes: list[tuple[int, str]]) -> None:
        """Give jobs their paths, and their routes the congestion controls, which new connections take."""
        spec = self._spec
        changes: dict[str, list[tuple[int, list[shortest_path_routes.Route], str]]] = {}
        for job, (old, (path, control)) in enumerate(zip(self._routes, routes, strict=True)):
            before = shortest_path_routes.path_routes(spec, old[0])
            for node, found in shortest_path_routes.path_routes(spec, path).items():
                if changed := [route for route in found if control != old[1] or route not in before[node]]:
                    changes.setdefault(node, []).append((job, changed, control))
        for node, jobs in changes.items():
            build.in_namespace(node, functools.partial(_set_routes, spec, node, jobs))
        self._routes = routes

    def _replace_limits(self, shared: dict[int, Sequence[int]]) -> None:
        """Replace the classes of some links by plain limits, and the plain limits of others by classes."""
        for old, _ in self._links:
            old.close()
        self._links = []
        for number in dict.fromkeys((*self._shared, *shared)):
            link, jobs = self._spec.links[number], shared.get(number, ())
            classes = Classes(link, self._spec) if jobs else None
            build.in_namespace(link.source, functools.partial(_limit, self._spec, link, classes, jobs))
            self._links += [(classes, jobs)] if classes else []
        self._shared = shared

    def _grow(self, shares: Sequence[JobShare]) -> None:
        """Change the shares with the bytes that jobs have sent, until `_end_thread`."""
        begin_s, ticks = time.monotonic(), 0
        links = [(*link, [JobProgress(shares[job]) for job in link[1]]) for link in self._links]
        set_bps: dict[tuple[str, int], float] = {}
        while not self._stop.wait(TICK_S - (time.monotonic() - begin_s) % TICK_S):
            ticks += 1
            for classes, jobs, progress in links:
                sent, now_s = classes.sent_bytes(), time.monotonic()
                pairs = zip(jobs, progress, strict=True)
                weights = [one.weight(sent[_FIRST_JOB + job], now_s) for job, one in pairs]
                rates_bps = class_rates_bps([shares[job] for job in jobs], weights, classes.rate_bps)
                for job, job_bps, weight in zip(jobs, rates_bps, weights, strict=True):
                    if abs(job_bps - set_bps.get((classes.place, job), 0.0)) > _SAME * job_bps:
                        classes.set(_FIRST_JOB + job, job_bps, weight=weight / min(weights))
                        set_bps[classes.place, job] = job_bps
        self._cost = {"ticks": ticks, "seconds": time.monotonic() - begin_s, "cpu_s": time.thread_time()}

    def _end_thread(self) -> dict[str, float]:
        """End the thread that changes shares, and return its facts; none without one."""
        if self._thread is None:
            return {}
        self._stop.set()
        self._thread.join()
        self._thread = None
        return self._cost


def congestion_controls(spec: TestbedSpec) -> list[list[str]]:
    """Return the congestion controls of each job's connections."""
    found = {(address, name) for host in spec.hosts for address, name in build.in_namespace(host, _connections)}
    addresses = [[spec.job_ip(host, job) for host in spec.hosts] for job in range(spec.jobs)]
    return [sorted({name for address, name in found if address in own}) for own in addresses]


def _connections() -> list[tuple[str, str]]:
    """Return the local address and the congestion control of each TCP connection of this namespace."""
    with DiagSocket() as netlink:
        netlink.bind()
        found = netlink.get_sock_stats(socket.AF_INET, states=_ESTABLISHED, extensions=_ASK_CONGESTION_CONTROL)
        return [(one["idiag_src"], one.get_attr("INET_DIAG_CONG")) for one in found]


def _set_routes(
    spec: TestbedSpec, node: str, jobs: Sequence[tuple[int, Sequence[shortest_path_routes.Route], str]]
) -> None:
    """Set routes of jobs in this namespace, which is that of a node, and their congestion controls."""
    indexes = {nic: index for index, nic in socket.if_nameindex()}
    with IPRoute() as netlink:
        for job, routes, name in jobs:
            build.set_routes(spec, netlink, node, routes, build.job_network(spec, job), indexes, name)


def _limit(spec: TestbedSpec, link: Link, classes: Classes | None, jobs: Sequence[int]) -> None:
    """Limit a link that leads from this namespace: by classes of jobs, if there are any."""
    with IPRoute() as netlink:
        index = netlink.link_lookup(ifname=link.source_nic)[0]
        netlink.tc("del", index=index, parent=rtnl.TC_H_ROOT)
        if classes:
            _limit_by_classes(spec, netlink, index, classes, jobs)
        else:
            build.limit(spec, netlink, index, link.rate_bps)


def _limit_by_classes(spec: TestbedSpec, netlink: IPRoute, index: int, classes: Classes, jobs: Sequence[int]) -> None:
    """Limit a link by classes of HTB, in which all jobs have the same share."""
    build.need("sch_htb", lambda: netlink.tc("add", "htb", index, handle=_ROOT, default=_REST & 0xFFFF))
    classes.set(_LINK, classes.rate_bps)
    handles = {job: _FIRST_JOB + job for job in jobs}
    for handle in (_REST, *handles.values()):
        classes.set(handle, LEAST_SHARE * classes.rate_bps)
        classes.add_queue(handle)
    for job, handle in handles.items():
        network = int.from_bytes(socket.inet_aton(spec.job_network(job).partition("/")[0]), "big")
        key = f"{network:#010x}/0xffffff00+{_DESTINATION}"
        options = {"parent": _ROOT, "prio": 1, "protocol": _IPV4, "target": handle, "keys": [key]}
        build.need("cls_u32", functools.partial(netlink.tc, "add-filter", "u32", index, **options))


def _set_jobs(classes: Classes, jobs: Sequence[int], shares: Sequence[JobShare]) -> None:
    """Give the classes of jobs their shares as an iteration begins."""
    weights = [share.intercept for share in shares]
    orders = sorted({share.priority for share in shares}, reverse=True)
    rates_bps = class_rates_bps(shares, weights, classes.rate_bps)
    for job, share, job_bps in zip(jobs, shares, rates_bps, strict=True):
        order, weight = orders.index(share.priority), share.intercept / min(weights)
        classes.set(_FIRST_JOB + job, job_bps, order=order, weight=weight)
