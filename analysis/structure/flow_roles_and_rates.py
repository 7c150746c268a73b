"""Finds the flows of the thesis's figures 3-10 and 3-11: training alone, beside cross traffic, and cross traffic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ringtap.analysis.runs.traffic_classes import CROSS
from ringtap.analysis.structure.detect_training_streams import Sorted
from ringtap.analysis.structure.payload_time_series import PayloadStream, Streams, between_hosts
from ringtap.analysis.structure.period_from_silences import Integers

ONLY, SHARED, CROSSING = "training only", "training beside cross traffic", "cross traffic"


@dataclass(frozen=True, eq=False)
class Role:
    """A flow and its role.

    Attributes:
        role: `ONLY`, `SHARED` or `CROSSING`.
        source: sending host.
        destination: receiving host.
        streams: its streams.
    """

    role: str
    source: str
    destination: str
    streams: tuple[PayloadStream, ...]


def roles_of(streams: Streams, found: Sorted) -> tuple[tuple[Role, ...], str]:
    """Return the three flows, and a sentence about those that are missing.

    The cross traffic is the largest such flow between two hosts. A training flow is beside cross traffic if it has the
    same receiver, or, without such a flow, the same sender. Of several flows in one role the largest is used.
    """
    if found.training is None:
        return (), found.why
    pairs = between_hosts(member.stream for member in found.training.major)
    training = sorted(pairs, key=lambda pair: (-sum(one.total for one in pairs[pair]), pair))
    kinds = zip(streams.streams, found.kinds, strict=True)
    crossing = between_hosts(stream for stream, (kind, _) in kinds if kind == CROSS)
    if not crossing:
        only = training[0]
        return (Role(ONLY, *only, tuple(pairs[only])),), "there is no cross traffic in these captures"
    cross = max(crossing, key=lambda pair: sum(one.total for one in crossing[pair]))
    roles = [Role(CROSSING, *cross, tuple(crossing[cross]))]
    at_receiver = [pair for pair in training if pair[1] == cross[1]]
    shared = at_receiver or [pair for pair in training if pair[0] == cross[0]]
    why = ""
    if shared:
        roles.insert(0, Role(SHARED, *shared[0], tuple(pairs[shared[0]])))
    else:
        why = (
            f"no training flow shares a host with the cross traffic from {cross[0]} to {cross[1]}: if these "
            "are further addresses of training hosts, name them with --host NAME=ADDRESS,ADDRESS"
        )
    alone = [pair for pair in training if pair not in shared and pair[0] != cross[0] and pair[1] != cross[1]]
    if alone:
        roles.insert(0, Role(ONLY, *alone[0], tuple(pairs[alone[0]])))
    elif not why:
        why = "every training flow that was captured shares a host with the cross traffic"
    return tuple(roles), why


def mean_rates(streams: Streams, roles: tuple[Role, ...], iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the mean payload rate of each flow over the iterations (thesis, Table 3.11).

    Columns: ``role``, ``source``, ``destination``, ``communication_bps`` (while the job communicates),
    ``iteration_bps`` (over whole iterations), ``bytes_per_iteration``.

    Args:
        streams: all streams.
        roles: the flows.
        iterations: a table of `structure.iterations_of`.
    """
    begin = ((iterations["start_ns"] - streams.start_ns) // streams.bin_ns).to_numpy(np.int64)
    end = ((iterations["end_ns"] - streams.start_ns) // streams.bin_ns).to_numpy(np.int64)
    communicated = begin + np.rint(iterations["communication_s"] * 1e9 / streams.bin_ns).to_numpy(np.int64)
    rows = []
    for role in roles:
        passed = np.concatenate(([0], np.cumsum(streams.dense(role.streams))))
        whole, part = passed[end] - passed[begin], passed[communicated] - passed[begin]
        bin_s = streams.bin_ns / 1e9
        busy_s = float((communicated - begin).sum()) * bin_s
        rates = float(part.sum()) * 8 / busy_s, float(whole.sum()) * 8 / (float((end - begin).sum()) * bin_s)
        rows.append((role.role, role.source, role.destination, *rates, float(whole.mean())))
    names = ["role", "source", "destination", "communication_bps", "iteration_bps", "bytes_per_iteration"]
    return pd.DataFrame(rows, columns=names)


def moving_average(payload: Integers, samples: int, bin_ns: int) -> np.ndarray:
    """Return the payload rate in bit/s as a centred moving average over ``samples`` bins, shape (bins,)."""
    kernel = np.ones(samples) / samples
    rates: np.ndarray = np.convolve(payload.astype(np.float64), kernel, mode="same") * 8e9 / bin_ns
    return rates
