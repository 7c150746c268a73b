"""Shares of jobs in the links of a star: classes of HTB in place of the plain limits of links.

At both ends of a link, one class has the link's rate. Below it, each job has a class, to which a filter sends the
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

from ringtap.agents.testbed import build
from ringtap.agents.testbed.topology import SWITCH, TRAINING_NIC, JobShare, TestbedSpec
from ringtap.collectors.netlink import (
    DUMP,
    HEADER_BYTES,
    ROUTE,
    NetlinkSocket,
    attribute_head,
    attributes,
    message_at,
    request,
)
from ringtap.errors import MeasurementError, error_message

TICK_S = 0.015
LEAST_SHARE = 0.01  # of a link, for the rest, and for jobs whose priority decides
_ROOT, _LINK, _REST, _FIRST_JOB = 0x10000, 0x10001, 0x10002, 0x10010
_IPV4, _DESTINATION = 0x0800, 16  # type in Ethernet frames; place in the header
_TICK_NS = 64  # of the times in which HTB counts bytes
_SAME = 0.02  # change of a rate that is not worth a message

_RTM_NEWQDISC, _RTM_NEWTCLASS, _RTM_GETTCLASS = 36, 40, 42
_ACK, _CREATE = 0x4, 0x400
_TCA_KIND, _TCA_OPTIONS, _TCA_STATS2 = 1, 2, 7
_TCA_HTB_PARMS, _TCA_STATS_BASIC = 1, 1
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
    """Classes of HTB at an interface, set and counted by messages to the kernel that take some microseconds.

    Args:
        node: the node.
        nic: its interface.
        spec: the testbed.
    """

    def __init__(self, node: str, nic: str, spec: TestbedSpec) -> None:
        self._spec, self.place = spec, f"{nic} of {node}"
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
        rates = max(round(rate_bps / 8), 1), spec.rate_bps // 8  # its own, and the most with what others leave
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
            found[handle] = 0
            for name, at, count in attributes(data, begin + HEADER_BYTES + _MESSAGE.size, end):
                for inner, place, _ in attributes(data, at, at + count) if name == _TCA_STATS2 else ():
                    if inner == _TCA_STATS_BASIC:
                        (found[handle],) = struct.unpack_from("=Q", data, place)

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
    """Shares of jobs in the links of a testbed's hosts.

    Args:
        spec: the testbed.
    """

    def __init__(self, spec: TestbedSpec) -> None:
        self._spec = spec
        self._links: list[tuple[Classes, Sequence[int]]] = []  # with the numbers of the jobs
        self._hosts: dict[str, Sequence[int]] = {}
        self._congestion_controls = [spec.congestion_control] * spec.jobs
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._cost: dict[str, float] = {}

    def set(self, hosts: Mapping[str, Sequence[int]], shares: Sequence[JobShare]) -> dict[str, float]:
        """Give jobs their shares.

        Args:
            hosts: numbers of the jobs that share the link of a host, by host; without hosts, links have plain limits.
            shares: share of each job of the testbed.

        Returns:
            Facts of the thread that has changed shares until now: ``ticks``, ``seconds`` and ``cpu_s``; empty if there
            was none.

        Raises:
            UsageError: the kernel lacks a feature.
            MeasurementError: the kernel refuses a class.
        """
        cost = self._end_thread()
        self._route([share.congestion_control or self._spec.congestion_control for share in shares])
        if dict(hosts) != self._hosts:
            self._replace_limits(dict(hosts))
        for classes, jobs in self._links:
            _set_jobs(classes, jobs, [shares[job] for job in jobs], self._spec.rate_bps)
        if self._links and any(share.slope for share in shares):
            self._stop.clear()
            self._thread = threading.Thread(target=self._grow, args=(shares,), daemon=True)
            self._thread.start()
        return cost

    def _route(self, congestion_controls: Sequence[str]) -> None:
        """Give the jobs' routes their congestion controls, which new connections take."""
        spec = self._spec
        for job, name in enumerate(congestion_controls):
            if name != self._congestion_controls[job]:
                for host in spec.hosts:
                    build.in_namespace(host, functools.partial(_route, spec, host, job, name))
                self._congestion_controls[job] = name

    def _replace_limits(self, hosts: dict[str, Sequence[int]]) -> None:
        """Replace the classes at some links by plain limits, and the plain limits of others by classes."""
        for old, _ in self._links:
            old.close()
        self._links = []
        for host in dict.fromkeys((*self._hosts, *hosts)):
            for node, nic in ((host, TRAINING_NIC), (SWITCH, self._spec.port(host))):
                jobs = hosts.get(host, ())
                classes = Classes(node, nic, self._spec) if jobs else None
                build.in_namespace(node, functools.partial(_limit, self._spec, nic, classes, jobs))
                self._links += [(classes, jobs)] if classes else []
        self._hosts = hosts

    def _grow(self, shares: Sequence[JobShare]) -> None:
        """Change the shares with the bytes that jobs have sent, until `_end_thread`."""
        begin_s, ticks, rate_bps = time.monotonic(), 0, self._spec.rate_bps
        links = [(*link, [JobProgress(shares[job]) for job in link[1]]) for link in self._links]
        set_bps: dict[tuple[str, int], float] = {}
        while not self._stop.wait(TICK_S - (time.monotonic() - begin_s) % TICK_S):
            ticks += 1
            for classes, jobs, progress in links:
                sent, now_s = classes.sent_bytes(), time.monotonic()
                pairs = zip(jobs, progress, strict=True)
                weights = [one.weight(sent[_FIRST_JOB + job], now_s) for job, one in pairs]
                rates_bps = class_rates_bps([shares[job] for job in jobs], weights, rate_bps)
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


def _route(spec: TestbedSpec, host: str, job: int, congestion_control: str) -> None:
    """Set the congestion control of a job's route in this namespace, which is that of a host."""
    with IPRoute() as netlink:
        nic = netlink.link_lookup(ifname=spec.job_nic(job))[0]
        build.set_route(netlink, build.job_route(spec, host, job, nic), congestion_control)


def _limit(spec: TestbedSpec, nic: str, classes: Classes | None, jobs: Sequence[int]) -> None:
    """Limit the link that leads from an interface of this namespace: by classes of jobs, if there are any."""
    with IPRoute() as netlink:
        index = netlink.link_lookup(ifname=nic)[0]
        netlink.tc("del", index=index, parent=rtnl.TC_H_ROOT)
        if classes:
            _limit_by_classes(spec, netlink, index, classes, jobs)
        else:
            build.limit(spec, netlink, index, spec.rate_bps)


def _limit_by_classes(spec: TestbedSpec, netlink: IPRoute, index: int, classes: Classes, jobs: Sequence[int]) -> None:
    """Limit a link by classes of HTB, in which all jobs have the same share."""
    build.need("sch_htb", lambda: netlink.tc("add", "htb", index, handle=_ROOT, default=_REST & 0xFFFF))
    classes.set(_LINK, spec.rate_bps)
    handles = {job: _FIRST_JOB + job for job in jobs}
    for handle in (_REST, *handles.values()):
        classes.set(handle, LEAST_SHARE * spec.rate_bps)
        classes.add_queue(handle)
    for job, handle in handles.items():
        network = int.from_bytes(socket.inet_aton(spec.job_network(job).partition("/")[0]), "big")
        key = f"{network:#010x}/0xffffff00+{_DESTINATION}"
        options = {"parent": _ROOT, "prio": 1, "protocol": _IPV4, "target": handle, "keys": [key]}
        build.need("cls_u32", functools.partial(netlink.tc, "add-filter", "u32", index, **options))


def _set_jobs(classes: Classes, jobs: Sequence[int], shares: Sequence[JobShare], rate_bps: float) -> None:
    """Give the classes of jobs their shares as an iteration begins."""
    weights = [share.intercept for share in shares]
    orders = sorted({share.priority for share in shares}, reverse=True)
    rates_bps = class_rates_bps(shares, weights, rate_bps)
    for job, share, job_bps in zip(jobs, shares, rates_bps, strict=True):
        order, weight = orders.index(share.priority), share.intercept / min(weights)
        classes.set(_FIRST_JOB + job, job_bps, order=order, weight=weight)
