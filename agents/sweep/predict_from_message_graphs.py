"""Calculates the iterations of a sweep's series on a testbed from message graphs, to compare with measured ones."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from ringtap.agents.testbed.topology import Roles, TestbedSpec
from ringtap.core.errors import UsageError
from ringtap.core.ethernet import payload_share
from ringtap.core.installation import lacking
from ringtap.core.sweep_plans.collective_algorithms import IN_NETWORK
from ringtap.core.sweep_plans.sweep_plan import LoadPlan
from ringtap.core.sweep_plans.training_jobs import SCALE_MODEL, Model
from ringtap.core.thesis_neural_networks import GRADIENT_BYTES, PROFILES


def expected_series(plan: LoadPlan, model: Model, spec: TestbedSpec, roles: Roles) -> dict[str, Any]:
    """Return a line of expected.jsonl without the name of its series.

    Args:
        plan: the sweep, with one testbed.
        model: the training job, with a collective.
        spec: the testbed.
        roles: roles of its hosts.
    """
    if model.job != SCALE_MODEL:
        return {"why": "only of scale models are the tensors and their times known"}
    if problem := lacking("the simulation of an iteration", ("numpy", "numba")):
        return {"why": problem}
    from ringtap.workload.iteration_from_message_graphs import expected_iteration
    from ringtap.workload.lowering import Algorithms
    from ringtap.workload.model_workloads import bucket_workload
    from ringtap.workload.topologies import with_host_at

    name, numbers = plan.collectives.algorithm(model.collective, len(roles.servers), 1)
    algorithms = Algorithms(name, numbers.get("group", 1), numbers.get("shards", 1), numbers.get("pieces", 1))
    topology = spec.network
    places = [spec.hosts.index(host) for host in (*roles.workers, *roles.servers[: algorithms.others])]
    if name == IN_NETWORK:
        assert spec.aggregator is not None  # plans without one are refused
        topology = with_host_at(topology, spec.aggregator)
        places = [*places[: len(roles.workers)], spec.network.hosts]
    longest = max(len(topology.path(a, b)) for a in places for b in places if a != b)
    try:
        found = expected_iteration(
            bucket_workload(scaled_buckets(model, plan.scale), len(roles.workers), model.compute_s),
            topology,
            algorithms,
            places,
            latency_s=longest * spec.delay_s,
            payload_share=payload_share(spec.mtu),
        )
    except UsageError as error:
        return {"why": str(error)}
    links = [
        {"link": host_names(spec, link), "payload_bytes": found.payload_bytes[link]}
        | {"header_bytes": found.header_bytes[link], "critical_s": found.sending_s.get(link, 0.0)}
        for link in dict.fromkeys(topology.bundles)
    ]
    names = ("iteration_s", "first_message_s", "compute_s", "latency_s", "critical_messages")
    return {name: getattr(found, name) for name in names} | {"links": links}


def scaled_buckets(model: Model, scale: float) -> list[tuple[int, float]]:
    """Return the buckets of a scale model in the order of the backward pass: bytes, and share of that pass."""
    from ringtap.workload.model_workloads import bucket_bounds, buckets

    if model.layers is None:
        every = list(buckets(PROFILES[model.name], model.bucket_bytes, model.first_bucket_bytes))
    else:
        layer_bytes = model.parameters * GRADIENT_BYTES / model.layers
        bounds = bucket_bounds([round(layer_bytes)] * model.layers, model.bucket_bytes, model.first_bucket_bytes)
        every = [(round((end - begin) * layer_bytes), (end - begin) / model.layers) for begin, end in bounds]
    # as the scale model divides its tensors: the sums from the first on
    edges = accumulate((size_bytes for size_bytes, _ in every), initial=0)
    elements = pairwise([round(edge / GRADIENT_BYTES / scale) for edge in edges])
    return [(GRADIENT_BYTES * (end - begin), share) for (begin, end), (_, share) in zip(elements, every, strict=True)]


def host_names(spec: TestbedSpec, bundle: str) -> str:
    """Return the name of a bundle of links with the testbed's name of its host."""
    node, _, way = bundle.partition(" ")
    return f"{spec.hosts[int(node[1:])]} {way}" if node[1:].isdigit() and node[0] == "h" else bundle
