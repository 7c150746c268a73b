"""Preparation for sending a plan from this host: connection pools, addresses, socket options, and all checks."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen import protocol
from ringtap.trafficgen.plans.plan_file import PlanFile
from ringtap.trafficgen.processes import raise_file_limit
from ringtap.trafficgen.sender.options import SendOptions
from ringtap.trafficgen.sender.worker import Destination
from ringtap.trafficgen.socket_options import Transport, outgoing_socket

_LEAST_AHEAD = 64
_USUAL_MOST = 1024
_OTHER_FILES = 128
_PROBE_S = 3.0


class SendPlan:
    """A checked plan and the options with which it is sent.

    Attributes:
        needs: requirements of the plan.
        pairs: (source, destination) of each connection pool.
        places: endpoints of each pool.
        ahead: connections to open in each pool before the launch.
        most: most connections in each pool at a time.
        transport: options of every connection.
        duration_ns: length that is sent.
        sender: the sender's number in the receivers' logs.
        deaf: destinations that ``probe`` found without a receiver, with reasons.

    Raises:
        UsageError: the plan is wrong or requires more than this host has.
    """

    def __init__(self, plan: PlanFile, options: SendOptions) -> None:
        self.plan, self.options = plan, options
        self.needs = plan.check()
        self.pairs = [
            pair for pair in self.needs.most_at_once if not options.only_source or pair[0] == options.only_source
        ]
        if not self.pairs:
            raise UsageError(f"{plan.path} has no flow from {options.only_source!r}: see its header's sources")
        if options.only_source and self.needs.dependent and options.arrivals is None:
            raise UsageError(
                f"flows of {plan.path} wait for flows of other sources: name the socket on which this host's receiver "
                "tells of them, with --arrivals on both, or send the whole plan from one host"
            )
        self.transport = _transport(plan, options.transport)
        self.places = [self._place(*pair) for pair in self.pairs]
        usual = max(1, options.most_connections or _USUAL_MOST)
        at_once = [self.needs.most_at_once[pair] for pair in self.pairs]
        self.most = [usual if options.most_connections else max(usual, count) for count in at_once]
        self.ahead = [min(most, max(_LEAST_AHEAD, count)) for most, count in zip(self.most, at_once, strict=True)]
        self.duration_ns = plan.duration_ns
        if options.duration_s is not None:
            self.duration_ns = min(self.duration_ns, int(options.duration_s * 1e9))
        self.sender = secrets.randbits(63)
        self.hello = protocol.hello(options.token, self.sender)
        self.deaf: dict[str, str] = {}
        self._check_limits(at_once)
        self._check_host()

    def probe(self) -> None:
        """Ask each receiver whether it accepts this sender, if each flow opens its own connection."""
        if self.options.connections != "new":
            return
        for place in {place.name: place for place in self.places}.values():
            why = self._ask(place)
            if why:
                self.deaf[place.name] = why

    def _ask(self, place: Destination) -> str:
        try:
            with outgoing_socket(place.family, self.transport, place.source) as sock:
                sock.settimeout(_PROBE_S)
                sock.connect(place.address)
                sock.sendall(self.hello)
                number, verdict = protocol.NOTICE.unpack(sock.recv(protocol.NOTICE.size, socket.MSG_WAITALL))
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return protocol.failure_words(error.errno or 0)
        except ValueError:
            return protocol.failure_words(protocol.NO_RECEIVER)
        if number != protocol.HELLO_NUMBER or verdict == protocol.WELCOME:
            return "" if number == protocol.HELLO_NUMBER else protocol.failure_words(protocol.NO_RECEIVER)
        return protocol.failure_words(-verdict)

    def _place(self, source: str, destination: str) -> Destination:
        family, address = protocol.resolve(destination)
        bound = source or self.options.source
        outgoing_socket(family, self.transport, bound).close()
        sources = list(self.plan.sources)
        index = sources.index(source) if source else -1
        return Destination(bound, family, address, destination, index, self.plan.destinations.index(destination))

    def _check_limits(self, at_once: list[int]) -> None:
        """Check that open files and local ports suffice for the connections that the plan is sure to need."""
        workers = self.options.workers * self.options.threads
        wanted = sum(self.ahead)
        limit = raise_file_limit(sum(self.most) + _OTHER_FILES)
        if wanted + _OTHER_FILES > limit:
            raise UsageError(
                f"{self.plan.path} starts {sum(at_once)} flows at once, but a process may open {limit} files here: "
                "raise the limit ('ulimit -n'), or send it from several hosts with --as"
            )
        more = (limit - _OTHER_FILES - wanted) // len(self.pairs)
        self.most = [min(most, ahead + more) for ahead, most in zip(self.ahead, self.most, strict=True)]
        # Twice as many: a closed connection may still hold its slot when the next one is opened
        self.most_per_worker = 2 * -(-sum(self.most) // workers) + 2 * len(self.pairs) + _LEAST_AHEAD
        first, last = _ports()
        for pair, count in zip(self.pairs, at_once, strict=True):
            if count > last - first + 1:
                raise UsageError(
                    f"{self.plan.path} starts {count} flows at once to {pair[1]}, but this host has {last - first + 1} "
                    "local ports for them: widen net.ipv4.ip_local_port_range, or use more destinations or sources"
                )

    def _check_host(self) -> None:
        cpu = self.options.launcher_cpu
        if cpu is not None and cpu not in os.sched_getaffinity(0):
            raise UsageError(f"--launcher-cpu {cpu}: this process may use {sorted(os.sched_getaffinity(0))}")
        path = self.options.log_path
        if path is not None and path.exists():
            raise UsageError(f"{path} exists: a log is never overwritten, name another file")


def _transport(plan: PlanFile, asked: Transport) -> Transport:
    """Return the requested options, completed with those of the plan."""
    of_plan: dict[str, Any] = plan.header.get("transport") or {}
    known = {field.name for field in fields(Transport)}
    chosen = {name: value for name, value in of_plan.items() if name in known and getattr(asked, name) is None}
    return replace(asked, **chosen)


def _ports() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(first), int(last)
