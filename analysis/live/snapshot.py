"""Describes the state of a run at one moment: immutable data for any view.

A number that was not recorded is None, never 0. Rates are over about the last second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ringtap.analysis.live.flows import LiveFlow
from ringtap.analysis.live.iterations import IterationStats

Health = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Rank:
    """One rank of the job.

    Attributes:
        step: number of its last step.
        age_s: time since it ended; None after the run's end.
        step_s: time between its last two steps.
        behind_s: delay after the first rank at the end of the last iteration that all have ended.
        forward_s: DDP's forward pass of its last iteration; None, as the next three, without DDP.
        backward_s: the backward pass.
        comm_s: from the first to the last bucket's communication.
        overlap_s: the part of it during the backward pass.
    """

    node: str
    rank: int
    pid: int
    step: int
    age_s: float | None
    step_s: float | None
    behind_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    comm_s: float | None = None
    overlap_s: float | None = None


@dataclass(frozen=True)
class Nic:
    """A network interface, or a port of an InfiniBand or RoCE device.

    Attributes:
        kind: ``nic`` or ``rdma`` (RDMA traffic, which the network interface's counters do not hold).
        speed_bps: of the link; None where not known.
        drops_per_s: packets dropped in receiving and sending (RDMA: discarded).
        drops_total: the same since the recording began.
        errors_total: receive and send errors since then.
        pauses_per_s: pause frames, priority pauses, and congestion notifications handled.
        marks_per_s: packets received with a congestion mark.
    """

    node: str
    name: str
    kind: Literal["nic", "rdma"]
    tx_bps: float | None
    rx_bps: float | None
    tx_packets_per_s: float | None
    rx_packets_per_s: float | None
    drops_per_s: float | None
    drops_total: float | None
    errors_total: float | None
    speed_bps: float | None = None
    pauses_per_s: float | None = None
    marks_per_s: float | None = None


@dataclass(frozen=True)
class Queue:
    """A queueing discipline of an interface; its backlog is the largest since the previous snapshot."""

    node: str
    interface: str
    kind: str
    handle: str
    rate_bps: float | None
    backlog_bytes: float
    backlog_packets: float
    drops_per_s: float | None
    drops_total: float | None
    overlimits_per_s: float | None


@dataclass(frozen=True)
class Host:
    """A node's processors, memory and TCP as a whole.

    Attributes:
        cores: busy share of each core, 0 to 1.
        retransmissions_per_s: TCP segments.
    """

    node: str
    cores: tuple[float, ...]
    memory_used_share: float | None
    retransmissions_per_s: float | None
    retransmissions_total: float | None


@dataclass(frozen=True)
class ProcessState:
    """A process of the job; ``cpu_share`` is 1 for one core in full."""

    node: str
    pid: int
    rank: int | None
    cpu_share: float | None
    rss_bytes: float
    threads: int
    command: str


@dataclass(frozen=True)
class Gpu:
    """A GPU: gauges as the driver reports them."""

    node: str
    name: str
    utilization_share: float | None
    memory_used_bytes: float | None
    power_w: float | None
    pcie_tx_bps: float | None
    pcie_rx_bps: float | None
    nvlink_tx_bps: float | None = None
    nvlink_rx_bps: float | None = None


@dataclass(frozen=True)
class CollectorState:
    """A collector's state and its losses.

    Attributes:
        state: ``ok``, ``degraded``, ``unavailable``, ``failed`` or as the agent names it.
        missed: samples that were due and not taken, as far as known.
        lost: packets or records that it lost, as it reports; None if it does not report any.
        age_s: time since its newest record; None without one and after the run's end.
        bytes: size of its logs.
    """

    node: str
    name: str
    state: str
    reason: str
    every_s: float | None
    missed: int | None
    lost: int | None
    age_s: float | None
    bytes: int
    health: Health = "good"


@dataclass(frozen=True)
class NodeState:
    """A node of the run.

    Attributes:
        status: ``running``, ``complete``, ``partial``, …
        age_s: time since its newest sample; None without one and after the run's end.
        clock_offset_s: its clock against the reference node's; None where not measured.
        clock_error_s: bound of the offset's error.
        disk_bytes: size of its recording; None, as the next two, where not known.
        disk_bytes_per_hour: its growth.
        disk_limit_bytes: its limit.
    """

    name: str
    status: str
    why: str
    done: bool
    age_s: float | None
    clock_offset_s: float | None
    clock_error_s: float | None
    disk_bytes: int | None = None
    disk_bytes_per_hour: int | None = None
    disk_limit_bytes: int | None = None


@dataclass(frozen=True)
class Mark:
    """A mark that a user put into the run."""

    t_ns: int
    text: str


@dataclass(frozen=True)
class Throughput:
    """Total throughput of all interfaces of all nodes; with loopback only if the training is over loopback."""

    t_ns: int
    tx_bps: float
    rx_bps: float


@dataclass(frozen=True)
class Diagnosis:
    """Causes that make the job slow now.

    Attributes:
        lines: the verdict in sentences, the first ones about one of the causes each; empty with too few iterations.
        causes: the causes that are named, the costliest first, as `ringtap.analysis.job.diagnosis.cause_of` has them.
        is_known: False if a cause may go on that the records do not tell.
    """

    lines: tuple[str, ...] = ()
    causes: tuple[Mapping[str, Any], ...] = ()
    is_known: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        t_ns: time of the snapshot, CLOCK_REALTIME of the viewer.
        path: the run directory as the user named it.
        status: ``running``, or the status it ended with.
        why: one sentence if it did not end well.
        ended: True if nothing more will come.
        elapsed_s: time since the run began.
        throughput: the last minutes, one value per snapshot.
        sockets: number of known sockets of all nodes, active or not; None if sockets are not recorded.
        is_over_loopback: True if no connection of the training leaves its node, as of the last ones that sent.
    """

    t_ns: int
    path: str
    status: str = "running"
    why: str = ""
    ended: bool = False
    elapsed_s: float = 0.0
    sockets: int | None = None
    iterations: IterationStats = field(default_factory=IterationStats)
    nodes: tuple[NodeState, ...] = ()
    ranks: tuple[Rank, ...] = ()
    flows: tuple[LiveFlow, ...] = ()
    nics: tuple[Nic, ...] = ()
    queues: tuple[Queue, ...] = ()
    hosts: tuple[Host, ...] = ()
    processes: tuple[ProcessState, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    collectors: tuple[CollectorState, ...] = ()
    marks: tuple[Mark, ...] = ()
    output: tuple[str, ...] = ()
    throughput: tuple[Throughput, ...] = ()
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    is_over_loopback: bool = False
