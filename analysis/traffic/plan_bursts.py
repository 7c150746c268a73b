"""Finds the bursts of flow plans, and the quiet parts between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringtap.core.flow_plan_table import FlowTable, Integers

Flags = npt.NDArray[np.bool_]
_MAX_WINDOWS = 10**7


@dataclass(frozen=True)
class Windows:
    """Bursts of a plan and the quiet parts between them.

    Attributes:
        edges_ns: start of each part after the launch, and the end of the last one.
        burst: mask of the parts that are bursts.
    """

    edges_ns: Integers
    burst: Flags


def burst_windows(plan: FlowTable) -> Windows | None:
    """Return the windows of a burst plan's bursts and quiet parts (Algorithm 2); None for a plan without bursts.

    Each period begins with a burst. A last period that is cut short by the plan's end is scaled down in proportion.
    """
    length, period = plan.header.get("burst_length_ns"), plan.header.get("burst_period_ns")
    if plan.kind != "burst" or not isinstance(length, int) or not isinstance(period, int):
        return None
    if not 0 < length < period or plan.duration_ns // period > _MAX_WINDOWS:
        return None
    begins = np.arange(0, plan.duration_ns, period, dtype=np.int64)
    ends = begins + length
    rest = plan.duration_ns - int(begins[-1])
    ends[-1] = begins[-1] + rest * length // period
    edges = np.concatenate((np.column_stack((begins, ends)).ravel(), [plan.duration_ns]))
    return Windows(edges, np.arange(len(edges) - 1) % 2 == 0)
