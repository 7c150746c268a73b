"""Calculates the bytes that an iteration sends: equation 3.1 of the thesis, and equations of other collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringtap.core.check_api_arguments import whole_number
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.thesis_neural_networks import GRADIENT_BYTES, profile_named, ring_bytes
from ringtap.core.units import counted, duration_s


@dataclass(frozen=True)
class Demand:
    """Data that one iteration sends, in one direction of a full-duplex link.

    Attributes:
        collective: name of the collective.
        parameters: parameters of the model, each a 32-bit gradient.
        workers: number of workers N.
        worker_bytes: bytes that a worker sends, averaged over the workers.
        busiest_link_bytes: bytes in the busier direction of the busiest link; it determines the bandwidth required.
        source: publication of the equation.
    """

    collective: str
    parameters: int
    workers: int
    worker_bytes: float
    busiest_link_bytes: float
    source: str

    def required_bps(self, iteration_s: float | str) -> float:
        """Return the bandwidth in bit/s that the busiest link needs to send its bytes in ``iteration_s`` (Table 3.1).

        Args:
            iteration_s: iteration time, in seconds or as text such as ``370ms``.

        Raises:
            UsageError: the time is not positive.
        """
        return self.busiest_link_bytes * 8 / duration_s(iteration_s, "an iteration time")


Volumes = tuple[float, float]  # sent by a worker on average, and through the busiest link; in units of the gradient


def _ring(workers: int, _group: int) -> Volumes:
    share = ring_bytes(1.0, workers)
    return share, share


def _parameter_server(workers: int, _group: int) -> Volumes:
    return 1.0, float(workers)


def _tree(workers: int, _group: int) -> Volumes:
    # Node i has children 2i+1 and 2i+2. It sends one gradient up (except the root) and one down to each child. With
    # five or more workers, node 1 has two children and a parent, which is the maximum.
    sent = [(node > 0) + (2 * node + 1 < workers) + (2 * node + 2 < workers) for node in range(min(workers, 7))]
    return ring_bytes(1.0, workers), float(max(sent))


def _hierarchical(workers: int, group: int) -> Volumes:
    nodes = workers // group
    between = ring_bytes(1.0, nodes)
    return between / group, between


_COLLECTIVES: dict[str, tuple[Callable[[int, int], Volumes], str]] = {
    "ring": (_ring, "thesis, equation 3.1; Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)"),
    "reduce-scatter-all-gather": (
        _ring,
        "recursive halving and doubling, power-of-two workers: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005)",
    ),
    "parameter-server": (
        _parameter_server,
        "one server outside the workers, push and pull of the whole gradient: Li et al., OSDI 2014",
    ),
    "tree": (_tree, "reduce and broadcast on a binary tree, root among the workers: Thakur et al., IJHPCA 19 (2005)"),
    "hierarchical": (
        _hierarchical,
        "ring between nodes after reducing within each, between nodes only: Jia et al., arXiv:1807.11205 (2018)",
    ),
}
COLLECTIVES = tuple(_COLLECTIVES)


def demand(parameters: float | str, workers: int, collective: str = "ring", group: int = 1) -> Demand:
    """Calculate the data that one iteration sends for 32-bit gradients.

    With S = 4 bytes x parameters and N workers, in one direction:

    ==========================  ====================  ==================================================
    collective                  mean of a worker      busiest link
    ==========================  ====================  ==================================================
    ring                        2(N-1)/N S            the same (equation 3.1)
    reduce-scatter-all-gather   2(N-1)/N S            the same
    parameter-server            S                     N S, the server's
    tree                        2(N-1)/N S            3 S at an inner node (fewer with under five workers)
    hierarchical, G per node    2(L-1)/L S / G        2(L-1)/L S at each of the L = N/G nodes
    ==========================  ====================  ==================================================

    Args:
        parameters: number of parameters of the model, such as ``138e6``, or a model of the thesis, such as ``vgg16``.
        workers: number of workers N.
        collective: one of `COLLECTIVES`.
        group: workers that share a node; only ``hierarchical`` uses it.

    Raises:
        UsageError: an invalid count, or an unknown model or collective.
    """
    if collective not in _COLLECTIVES:
        hint = did_you_mean(collective, COLLECTIVES)
        raise UsageError(f"collective {collective!r} is unknown: {hint}choose one of {', '.join(COLLECTIVES)}")
    if isinstance(parameters, str):
        parameters = profile_named(parameters).parameters
    parameters, workers, group = (
        whole_number(value, name)
        for value, name in ((parameters, "parameters"), (workers, "workers"), (group, "group"))
    )
    if parameters < 1:
        raise UsageError(f"{parameters} parameters: the model needs at least one")
    if workers < 1:
        raise UsageError(f"{workers} workers: at least one is needed")
    if collective == "hierarchical":
        if group < 1 or workers % group or workers // group < 2:
            raise UsageError(f"{counted(workers, 'worker')} in groups of {group} do not make two or more full groups")
    elif group != 1:
        raise UsageError(f"a group of {group} workers has a meaning only for the hierarchical collective")
    elif workers < 2 and collective != "parameter-server":
        raise UsageError(f"with one worker {collective} sends nothing: give at least 2 workers")
    volumes, source = _COLLECTIVES[collective]
    worker, busiest = volumes(workers, group)
    gradient_bytes = GRADIENT_BYTES * parameters
    return Demand(collective, parameters, workers, worker * gradient_bytes, busiest * gradient_bytes, source)
