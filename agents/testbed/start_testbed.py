"""Launches a testbed: starts its init process, records it in the registry, and verifies its links."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringtap.agents.testbed import registry
from ringtap.agents.testbed.topology import JobShare, LinkCount, TestbedSpec
from ringtap.core.check_api_arguments import instance_of, number, whole_number
from ringtap.core.errors import MeasurementError, RingtapError, UsageError, did_you_mean
from ringtap.core.isolated_python import python_command
from ringtap.core.testbed_options import MAX_HOSTS, LinkOptions
from ringtap.core.units import format_rate, number_or_text, parse_duration_s, parse_rate_bps, parse_size_bytes

RATE_TOLERANCE = 0.05
_SUFFIX_BYTES = 4  # a name has at most 10 characters
VERIFY_TRIES = 4


class RunningTestbed:
    """Running testbed that this process has built; as a context manager, it ends with the block.

    Unless `stay` is called, the testbed also ends with this process: its init process sees its standard input closed.

    Attributes:
        state: its specification, its init process and the measured rates of its links.
    """

    def __init__(self, spec: TestbedSpec, *, verify: bool = True) -> None:
        self._init_process = self._start(spec)
        try:
            self.state = self._record(spec)
            self._ask("go", "built")
            self.state = replace(self.state, links=self._verify() if verify else [])
            self._ask("ready", "ready")
            self.state.save()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _start(spec: TestbedSpec) -> subprocess.Popen[str]:
        command = python_command(sys.executable, "ringtap.agents.testbed.init_process", json.dumps(spec.to_json()))
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def _record(self, spec: TestbedSpec) -> registry.TestbedState:
        pid = int(self._expect("pid"))
        self._init_process.wait()
        ticks = registry.start_ticks(pid)
        if ticks is None:
            raise MeasurementError("the testbed's init process ended at once")
        with registry.locked():
            for testbed in registry.all_testbeds():
                if testbed.spec.name == spec.name and testbed.alive():
                    raise UsageError(
                        f"testbed {spec.name} is up already: ringtap testbed down {spec.name}, or --name another"
                    )
            entry = registry.TestbedState(spec, pid, ticks, os.getpid(), [])
            entry.save()
        return entry

    def _verify(self) -> list[dict[str, Any]]:
        """Return measured rates of the links; rates that are off, as on a busy machine, are measured again."""
        links: dict[str, dict[str, Any]] = {}
        again: list[str] = []
        for _ in range(VERIFY_TRIES):
            links |= self._ask(" ".join(["verify", *again]), "links")
            again = [number for number, link in links.items() if rate_warnings([link])]
            if not again:
                break
        return sorted(links.values(), key=lambda link: (link["host"], link["direction"]))

    def _ask(self, command: str, key: str) -> Any:
        """Send the init process a command, and return what its answer has under a key."""
        assert self._init_process.stdin is not None
        try:
            self._init_process.stdin.write(command + "\n")
            self._init_process.stdin.flush()
        except BrokenPipeError as error:
            raise MeasurementError("the testbed's init process ended early") from error
        return self._expect(key)

    def _expect(self, key: str) -> Any:
        assert self._init_process.stdout is not None
        line = self._init_process.stdout.readline()
        item: dict[str, Any] = (
            json.loads(line) if line else {"error": "the testbed's init process ended early", "exit_code": 1}
        )
        if "error" in item:
            raise (UsageError if item["exit_code"] == 2 else MeasurementError)(item["error"])
        if key not in item:
            raise RingtapError(f"the testbed's init process sent {item} instead of {key}")
        return item[key]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of its hosts."""
        return self.state.spec.hosts

    def address(self, host: str) -> str:
        """Return the IP address of a host.

        Raises:
            UsageError: there is no such host.
        """
        self._check_host(host)
        return self.state.spec.training_ip(host)

    def command(self, host: str, *command: str) -> list[str]:
        """Return a command that runs a command on a host, for `subprocess`, as ``ringtap testbed exec`` does.

        Raises:
            UsageError: there is no such host, or no command.
        """
        self._check_host(host)
        if not command:
            raise UsageError("there is no command to run on the host: add its words")
        return python_command(
            sys.executable, "ringtap.agents.testbed.run_on_host", self.state.spec.name, host, *command
        )

    def _check_host(self, host: str) -> None:
        if host not in self.hosts:
            hint = did_you_mean(host, self.hosts)
            raise UsageError(f"the testbed has no host {host!r}: {hint}it has {', '.join(self.hosts)}")

    def __repr__(self) -> str:
        spec = self.state.spec
        kind = "" if spec.topology == "star" else f"{spec.topology} of "
        return f"<Testbed {spec.name}: {kind}{', '.join(spec.hosts)} with links of {format_rate(spec.rate_bps)}>"

    def link_counts(self) -> list[LinkCount]:
        """Return the counters of each link, in the order of the testbed's links.

        Raises:
            MeasurementError: the testbed has failed.
        """
        return [LinkCount(*count) for count in self._ask("count", "counts")]

    def share(
        self, links: Mapping[int, Sequence[int]], shares: Sequence[JobShare], paths: Sequence[int] = ()
    ) -> dict[str, float]:
        """Give jobs their shares of links, as `ringtap.agents.testbed.htb_link_shares.LinkShares.set` does.

        Without paths, each job has the first one.

        Raises:
            UsageError: the kernel lacks a feature.
            MeasurementError: the testbed has failed.
        """
        question = json.dumps([list(links.items()), shares, paths or [0] * len(shares)])
        cost: dict[str, float] = self._ask(f"share {question}", "shared")
        return cost

    def congestion_controls(self) -> list[list[str]]:
        """Return the congestion controls of each job's connections.

        Raises:
            MeasurementError: the testbed has failed.
        """
        found: list[list[str]] = self._ask("controls", "controls")
        return found

    def stay(self) -> None:
        """Make the testbed outlive this process."""
        self._ask("stay", "stays")
        self.state = replace(self.state, owner_pid=0)
        self.state.save()

    def close(self) -> None:
        """End the testbed and everything that runs in it."""
        if hasattr(self, "state"):
            with registry.locked():
                registry.remove(self.state)
        assert self._init_process.stdin is not None
        assert self._init_process.stdout is not None
        self._init_process.stdin.close()
        self._init_process.stdout.read()  # returns when the init process, which holds the other end, has ended
        self._init_process.stdout.close()
        self._init_process.wait()

    def __enter__(self) -> RunningTestbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own_name(prefix: str) -> str:
    """Return a name for a testbed that no other one has."""
    return prefix + secrets.token_hex(_SUFFIX_BYTES)


def testbed(
    hosts: int | str | Sequence[str] = 4,
    capacity: float | str = "250mbit",
    *,
    name: str = "",
    queue: float | str = LinkOptions.queue_bytes,
    burst: float | str = LinkOptions.burst_bytes,
    mtu: int = LinkOptions.mtu,
    congestion_control: str = LinkOptions.congestion_control,
    offload_segments: int = LinkOptions.offload_segments,
    topology: str = LinkOptions.topology,
    per_leaf: int = LinkOptions.per_leaf,
    spines: int = LinkOptions.spines,
    oversubscription: float = LinkOptions.oversubscription,
    sides: str = LinkOptions.sides,
    delay: float | str = LinkOptions.delay_s,
) -> RunningTestbed:
    """Build a virtual testbed and measure its links, as ``ringtap testbed up`` does.

    It ends with the ``with`` block, and with this process.

    Args:
        hosts: number of hosts, or their names in a list or with commas.
        capacity: limit of every link in each direction, in bit/s or as text.
        name: name of the testbed (default: one that no other testbed has).
        queue: queue before each limit, in bytes or as text.
        burst: bucket size of each limit, in bytes or as text.
        mtu: bytes of an IP packet.
        congestion_control: congestion control of every TCP connection.
        offload_segments: packets that TCP may pass to a link in one piece.
        topology: ``star``, ``leaf-spine``, ``fat-tree``, ``torus`` or ``ring``.
        per_leaf: hosts per leaf switch, for ``leaf-spine``.
        spines: spine switches, for ``leaf-spine``.
        oversubscription: rate of a leaf's hosts over that of its links to the spines, for ``leaf-spine``.
        sides: lengths of the sides, such as ``4x4``, for ``torus``.
        delay: delay of each link in each direction, in seconds or as text; the kernel needs sch_netem.

    Raises:
        UsageError: an argument is wrong, or this user or this kernel cannot build a testbed.
        MeasurementError: the testbed failed while it was built.
    """
    if isinstance(hosts, str):
        hosts = int(hosts) if hosts.isdigit() else hosts.split(",")
    if isinstance(hosts, int):
        hosts = [f"S{number}" for number in range(min(hosts, MAX_HOSTS + 1))]
    if not isinstance(hosts, Iterable):
        raise UsageError(f"hosts {hosts!r} are not usable: give a number of hosts, or their names in a list")
    spec = TestbedSpec(
        name or own_name("tb"),
        tuple(map(str, hosts)),
        number_or_text(capacity, parse_rate_bps, "capacity"),
        queue_bytes=number_or_text(queue, parse_size_bytes, "queue"),
        burst_bytes=number_or_text(burst, parse_size_bytes, "burst"),
        mtu=whole_number(mtu, "mtu"),
        congestion_control=congestion_control,
        offload_segments=whole_number(offload_segments, "offload_segments"),
        topology=topology,
        per_leaf=whole_number(per_leaf, "per_leaf"),
        spines=whole_number(spines, "spines"),
        oversubscription=number(oversubscription, "oversubscription"),
        sides=instance_of(sides, str, "sides", '"4x4"'),
        delay_s=parse_duration_s(delay, "delay") if isinstance(delay, str) else number(delay, "delay"),
    )
    return RunningTestbed(spec)


def rate_warnings(links: list[dict[str, Any]]) -> list[str]:
    """Return one line per link direction whose rate is off by more than 5 %."""
    return [
        f"{link['host']} {link['direction']}: {link['measured_bps'] / 1e6:.1f} of {link['asked_bps'] / 1e6:.1f} Mbit/s"
        for link in links
        if abs(link["measured_bps"] / link["asked_bps"] - 1) > RATE_TOLERANCE
    ]
