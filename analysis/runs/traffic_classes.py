"""Says which traffic a connection carries: training, cross traffic or other (docs/commands/analyze.md, bytes by flow).

The rule takes what is known of one connection, or columns of many: the live view has no NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TRAINING, CROSS, OTHER = "training", "cross", "other"
CLASSES = (TRAINING, CROSS, OTHER)

Mask = Any  # bool, or a column of them


def traffic_rules(
    ranks: Sequence[Mask],
    generators: Sequence[Mask],
    owned: Sequence[Mask],
    is_logged: Mask,
    is_port: Mask,
    is_ras: Mask,
) -> list[tuple[Mask, str, str]]:
    """Return conditions with the traffic that each stands for, and why; the first that is true applies.

    If none is true, the connection is `OTHER`.

    Args:
        ranks: True if a rank owns the socket of this end, for both ends.
        generators: True if `ringtap.core.run_directory_schema.CROSS_COMMAND` owns it.
        owned: True if any process of the job owns it; only those are recorded as owners.
        is_logged: True if one end is a destination in the run's traffic logs.
        is_port: True if one of its ports is that of a traffic generator.
        is_ras: True if one of its ports is that of NCCL's RAS service.
    """
    return [
        (ranks[0] & ranks[1], TRAINING, "rank to rank"),
        (is_ras & (ranks[0] | ranks[1]), OTHER, "a question to NCCL's RAS service"),
        (ranks[0] | ranks[1], TRAINING, "one end is a rank"),
        (is_logged, CROSS, "in the run's traffic logs"),
        (generators[0] | generators[1], CROSS, "sent or received by a traffic generator"),
        (owned[0] & owned[1], TRAINING, "between processes of the job"),
        (owned[0] | owned[1], TRAINING, "one end is a process of the job"),
        (is_port, CROSS, "port of a traffic generator"),
    ]
