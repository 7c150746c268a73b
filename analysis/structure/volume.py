"""Bytes of an iteration compared with the demand of collectives, and the number of parameters that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringtap.analysis.model.demand import GRADIENT_BYTES, demand
from ringtap.analysis.structure import topology as shapes
from ringtap.analysis.structure.topology import Topology

# message headers of the libraries: gloo 48 bytes per message, 0.2 to 0.6 % of the volume in scale models
HEADER_SHARE = 0.02
# topologies with an equation for the volume
_COLLECTIVES = {
    shapes.RING: "ring",
    shapes.TWO_WAY_RING: "ring",
    shapes.PAIR: "ring",
    shapes.HALVING: "reduce-scatter-all-gather",
    shapes.ALL_TO_ALL: "reduce-scatter-all-gather",
    shapes.STAR: "parameter-server",
    shapes.TREE: "tree",
}


@dataclass(frozen=True)
class Volume:
    """Bytes that a worker sends per iteration, and the size of the model that follows.

    Attributes:
        worker_bytes: payload that a worker sends per iteration: median over iterations, mean over workers.
        collective: the collective whose equation was used; None if the topology has none or workers are not known.
        parameters: number of 32-bit parameters for this volume, if all payload is gradients; None without equation.
        parameters_least: the same if `HEADER_SHARE` of the payload is headers; if the number of workers is not known,
            also for infinitely many workers.
        parameters_most: the same as ``parameters``; if the number of workers is not known, for the fewest possible
            workers (2, or 3 for a member of a ring).
        why: the assumptions, or the reason that a value is not known, as a clause.
    """

    worker_bytes: float
    collective: str | None
    parameters: int | None
    parameters_least: int | None
    parameters_most: int | None
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return the volume as plain values."""
        return vars(self).copy()


def volume_of(shape: Topology, worker_bytes: float) -> Volume:
    """Infer the size of the model from the bytes of an iteration.

    Args:
        shape: the topology of the exchange.
        worker_bytes: payload that a worker sends per iteration.
    """
    collective = _COLLECTIVES.get(shape.name)
    if collective is not None and shape.workers is not None:
        # bytes per iteration for one parameter, by the collective's equation
        each = demand(1, shape.workers, collective).worker_bytes
        count = round(worker_bytes / each)
        why = (
            f"one worker a host, {8 * GRADIENT_BYTES} bit a parameter; headers of the library's own messages are in "
            f"the payload, so up to {HEADER_SHARE:.0%} fewer"
        )
        return Volume(worker_bytes, collective, count, round(count * (1 - HEADER_SHARE)), count, why)
    if shape.name in (shapes.RING_MEMBER, shapes.ONE_PEER, shapes.ONE_HOST, shapes.ONE_DIRECTION):
        if shape.name == shapes.ONE_HOST:
            why = "all ranks share one address: what one of them sends is not to be told apart"
            return Volume(worker_bytes, None, None, None, None, why)
        fewest = 3 if shape.name == shapes.RING_MEMBER else 2
        most = worker_bytes / demand(1, fewest).worker_bytes
        least = worker_bytes / (2 * GRADIENT_BYTES) * (1 - HEADER_SHARE)
        why = f"were it a ring, of {fewest} workers at most {round(most):,}, of endlessly many the least"
        return Volume(worker_bytes, None, None, round(least), round(most), why)
    why = f"there is no equation for this pattern ({shape.name})"
    return Volume(worker_bytes, None, None, None, None, why)
