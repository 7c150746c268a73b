"""Says what DDP's times of a backward pass mean: which communication is exposed, and which rank the others wait for.

The rules (docs/commands/analyze.md) take the times of one pass, or columns of many: the live view has no NumPy.
"""

from __future__ import annotations

from typing import Any

# as DDP logs them; 0: not known
MOMENTS = ("forward_start_ns", "backward_start_ns", "backward_end_ns", "comm_start_ns", "comm_end_ns")

Times = Any  # int, or a column of integers


def is_synced(backward_start_ns: Times, comm_start_ns: Times, comm_end_ns: Times) -> Times:
    """Return 1 for a pass in which gradients were exchanged; the times of others are those of an earlier pass."""
    return (comm_start_ns > 0) & (comm_end_ns >= comm_start_ns) & (comm_start_ns >= backward_start_ns)


def exposed_ns(
    synced: Times, backward_end_ns: Times, comm_start_ns: Times, comm_end_ns: Times, comm_ns: Times, overlap_ns: Times
) -> Times:
    """Return the communication of a pass after its last gradient was ready.

    Where that moment is not known (GPUs), it is what DDP counts as not overlapped.
    """
    is_known = backward_end_ns > 0
    begin_ns = comm_start_ns + (backward_end_ns - comm_start_ns) * (backward_end_ns > comm_start_ns)
    exposed = is_known * (comm_end_ns - begin_ns) + (1 - is_known) * (comm_ns - overlap_ns)
    return synced * exposed * (exposed > 0)


def compared_ns(is_ready_known: Times, ready_ns: Times, end_ns: Times) -> Times:
    """Return the moment by which the ranks of an iteration are compared: the slowest has the last one.

    The others wait for the rank whose last gradient is ready last. Unless that moment is known of all ranks, it is the
    end of the step. Of equal ranks, the highest is the slowest.
    """
    return is_ready_known * ready_ns + (1 - is_ready_known) * end_ns
