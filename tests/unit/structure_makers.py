"""Training traffic made up: streams of payload as captures would show them, with the truth beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringtap.analysis.structure.payload_time_series import PayloadStream, Streams

START_NS = 1_700_000_000_000_000_000
BIN_NS = 1_000_000


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        edges: bytes an iteration by (sender, receiver).
        buckets: bursts per iteration.
        compute_s: forward and backward pass.
        rate_bps: of each link while it sends.
        jitter: standard deviation of an iteration's compute time, as a share.
        stalls: share of the buckets after which the transport stalls for 200 ms.
        header_bytes: what the library adds to each bucket.
        forward: the forward pass's share of the compute time.
    """

    edges: Mapping[tuple[str, str], int]
    iterations: int = 30
    buckets: int = 4
    compute_s: float = 0.1
    rate_bps: float = 250e6
    jitter: float = 0.02
    stalls: float = 0.0
    header_bytes: int = 48
    forward: float = 1 / 3


@dataclass(frozen=True)
class Made:
    """Streams and the truth about them."""

    streams: list[PayloadStream]
    starts_s: list[float]

    @property
    def period_s(self) -> float:
        return (self.starts_s[-1] - self.starts_s[0]) / (len(self.starts_s) - 1)


def ring(hosts: int, each: int) -> dict[tuple[str, str], int]:
    names = [f"10.0.0.{number + 1}" for number in range(hosts)]
    return {(name, names[(number + 1) % hosts]): each for number, name in enumerate(names)}


def make(job: Job, seed: int = 0, lead_s: float = 0.5) -> Made:
    """Play a job: after the forward pass each bucket is sent when it is ready and the one before has gone."""
    random = np.random.default_rng(seed)
    sent: dict[tuple[str, str], list[tuple[float, float, int]]] = {pair: [] for pair in job.edges}
    now, starts = lead_s, []
    for _ in range(job.iterations):
        compute = job.compute_s * max(0.3, 1 + job.jitter * random.standard_normal())
        begin = now + job.forward * compute
        ready = begin + np.arange(1, job.buckets + 1) * (1 - job.forward) * compute / job.buckets
        free = 0.0
        for bucket, is_ready in enumerate(ready):
            at = max(is_ready, free)
            if not bucket:
                starts.append(at)
            took = 0.0
            for pair, volume in job.edges.items():
                size = volume // job.buckets + (volume % job.buckets if not bucket else 0) + job.header_bytes
                late = abs(random.normal(0, 2e-4))
                sent[pair].append((at + late, size * 8 / job.rate_bps, size))
                took = max(took, size * 8 / job.rate_bps + late)
            free = at + took + (0.2 if random.random() < job.stalls else 0.0)
        now = max(ready[-1], free) + 0.002
    streams = [to_stream(source, destination, parts) for (source, destination), parts in sent.items()]
    return Made(streams, starts)


def to_stream(
    source: str, destination: str, parts: Sequence[tuple[float, float, int]], ports: str = "4000 > 4001", flows: int = 1
) -> PayloadStream:
    """A stream of parts (begin in s, length in s, bytes), each sent evenly."""
    last = max(begin + length for begin, length, _ in parts)
    amounts = np.zeros(int(last * 1e9 / BIN_NS) + 2)
    for begin, length, size in parts:
        first, end = int(begin * 1e9 / BIN_NS), int((begin + length) * 1e9 / BIN_NS)
        amounts[first : end + 1] += size / (end + 1 - first)
    whole = np.diff(np.floor(np.concatenate(([0.0], np.cumsum(amounts))))).astype(np.int64)
    bins = np.flatnonzero(whole)
    seen = frozenset(["capture"])
    return PayloadStream(
        "tcp", source, destination, ports, flows, bins, whole[bins], -(-size_of(parts) // 1448), 0, True, seen
    )


def size_of(parts: Sequence[tuple[float, float, int]]) -> int:
    return sum(size for _, _, size in parts)


def web_search(
    source: str, destination: str, rate_bps: float, seconds: float, seed: int = 1, flows: int = 4
) -> list[PayloadStream]:
    """Flows of very different sizes at exponential gaps, over a few kept connections."""
    random = np.random.default_rng(seed)
    parts: list[list[tuple[float, float, int]]] = [[] for _ in range(flows)]
    free = [0.0] * flows
    now, mean = 0.0, 40_000.0
    while now < seconds:
        now += random.exponential(mean * 8 / rate_bps)
        size = int(min(random.lognormal(8.5, 1.8), 3e6)) + 100
        one = int(random.integers(flows))
        begin = max(now, free[one])
        free[one] = begin + size * 8 / 100e6
        parts[one].append((begin, size * 8 / 100e6, size))
    return [to_stream(source, destination, some, f"{5000 + n} > 5001") for n, some in enumerate(parts) if some]


def limited(source: str, destination: str, rate_bps: float, seconds: float, block: int = 131_072) -> PayloadStream:
    """A sender that a timer lets send a block at a time, as iperf3 with --bitrate."""
    gap = block * 8 / rate_bps
    parts = [(number * gap, block * 8 / 900e6, block) for number in range(int(seconds / gap))]
    return to_stream(source, destination, parts, "6000 > 5201")


def together(*streams: PayloadStream) -> Streams:
    ordered = tuple(sorted(streams, key=lambda stream: -stream.total))
    return Streams(START_NS, BIN_NS, max(int(one.bins[-1]) for one in streams) + 1, ordered, ("capture",))
