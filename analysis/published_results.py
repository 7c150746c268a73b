"""Lists the published numbers that reports are compared with.

J. Salamy, Network Requirements for Distributed Machine Learning Training in the Cloud, MIT, 2022. Traffic kinds are
named as in plans: ``iperf``, ``consistent`` and ``burst`` (web-search). docs/method/thesis.md lists the contradictions
in the source.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringtap.core.training_transports import carrier_of

CAPACITY_GBPS = 25.0
NO_LOAD_TABLE = "Table 3.1"
CONGESTION_TABLES = {"iperf": "Table 3.2", "consistent": "Table 3.4", "burst": "Table 3.6"}
MAX_CONGESTED_TABLES = {"iperf": "Table 3.3", "consistent": "Table 3.5", "burst": "Table 3.7"}
DIFFERENCE_TABLE = "Table 3.8"

# Mean iteration time without cross traffic, over RDMA, in s (Table 3.1)
NO_LOAD_S = {"bert-large": 0.84, "vgg16": 0.37, "densenet161": 0.38, "resnet50": 0.16}
# The same over TCP, for the only model with a published time (section 3.4.2)
NO_LOAD_TCP_S = {"bert-large": 1.45}
NO_LOAD_TCP_SECTION = "section 3.4.2"


@dataclass(frozen=True)
class PublishedPoint:
    """A congestion point.

    Attributes:
        workers: N of the configuration: 4 for iperf (A), 3 for web-search traffic (B).
        data_mb: data volume, in MB.
        bandwidth_gbps: load, None where only the volume is given.
        iteration_s: time, None where only the volume is given.
    """

    workers: int
    data_mb: float
    bandwidth_gbps: float | None = None
    iteration_s: float | None = None


# Tables 3.2, 3.4 and 3.6, with the coordinates that sections 3.2 and 3.3 give
CONGESTION_POINTS = {
    ("bert-large", "consistent"): PublishedPoint(3, 2296.4),
    ("bert-large", "burst"): PublishedPoint(3, 2343.5, 14.6),
    ("vgg16", "iperf"): PublishedPoint(4, 928.7, 13.99, 0.68),
    ("vgg16", "consistent"): PublishedPoint(3, 990.7, 15.70, 0.85),
    ("vgg16", "burst"): PublishedPoint(3, 925.3, 16.60, 0.88),
    ("densenet161", "iperf"): PublishedPoint(4, 268.8, 19.7),
    ("densenet161", "consistent"): PublishedPoint(3, 355.2, 17.9),
    ("densenet161", "burst"): PublishedPoint(3, 284.9, 19.9),
    ("resnet50", "iperf"): PublishedPoint(4, 182.5, 18.1),
    ("resnet50", "consistent"): PublishedPoint(3, 198.8, 15.8),
    ("resnet50", "burst"): PublishedPoint(3, 203.2, 18.4),
}

# Maximum effective utilization of the bottleneck in the presence of burst traffic, "around" (chapter 4)
BURST_UTILISATION = 0.90

# Most congested test case: bandwidth that the measured time needs ideally, and the bandwidth left, in Gbit/s
MAX_CONGESTED_GBPS = {
    ("bert-large", "iperf"): (3.06, 4.54),
    ("vgg16", "iperf"): (5.19, 6.52),
    ("densenet161", "iperf"): (2.04, 3.42),
    ("resnet50", "iperf"): (2.90, 4.21),
    ("bert-large", "consistent"): (1.06, 3.18),
    ("vgg16", "consistent"): (1.13, 3.19),
    ("densenet161", "consistent"): (0.98, 2.97),
    ("resnet50", "consistent"): (3.85, 5.83),
    ("bert-large", "burst"): (0.078, 0.347),
    ("vgg16", "burst"): (0.232, 3.601),
    ("densenet161", "burst"): (0.131, 3.306),
    ("resnet50", "burst"): (0.095, 0.347),
}

# Mean difference over saturated points, in Gbit/s (Table 3.8)
MEAN_DIFFERENCE_GBPS = {
    ("bert-large", "iperf"): 1.24,
    ("bert-large", "consistent"): 2.63,
    ("bert-large", "burst"): 2.62,
    ("vgg16", "iperf"): 1.12,
    ("vgg16", "consistent"): 2.39,
    ("vgg16", "burst"): 2.51,
    ("densenet161", "iperf"): 1.64,
    ("densenet161", "consistent"): 2.84,
    ("densenet161", "burst"): 2.75,
    ("resnet50", "iperf"): 1.21,
    ("resnet50", "consistent"): 2.25,
    ("resnet50", "burst"): 2.52,
}


@dataclass(frozen=True)
class PublishedFit:
    """A published fit of equation 3.7 with C = 25 Gbit/s.

    Attributes:
        A: factor in s.
        B: numerator in (Gbit/s)^n.
        n: exponent.
        transport: transport of the training traffic.
        source: table or equation.
    """

    A: float
    B: float
    n: float
    transport: str
    source: str


FITS = {
    ("bert-large", "iperf"): (PublishedFit(0.618, 9.95, 1.0, "RDMA", "equation 3.3"),),
    ("vgg16", "iperf"): (PublishedFit(0.254, 10.75, 1.0, "RDMA", "equation 3.3"),),
    ("bert-large", "consistent"): (
        PublishedFit(0.564, 3.667, 0.5, "TCP", "Table 3.9"),
        PublishedFit(0.200, 7.281, 0.5, "RDMA", "Table 3.9"),
    ),
    ("resnet50", "consistent"): (
        PublishedFit(0.0645, 3.311, 0.5, "TCP", "Table 3.9"),
        PublishedFit(0.140, 22.793, 2.0, "RDMA", "Table 3.9"),
    ),
    ("bert-large", "burst"): (PublishedFit(0.268, 7.310, 0.5, "TCP", "Table 3.10"),),
    ("resnet50", "burst"): (PublishedFit(0.0862, 4.174, 0.5, "TCP", "Table 3.10"),),
}


def fits_for(model: str, traffic: str, transport: str = "") -> tuple[PublishedFit, ...]:
    """Return the published fits of a series: those over its own transport if there are any, else all, TCP first."""
    found = FITS.get((model, traffic), ())
    matching = tuple(fit for fit in found if fit.transport == carrier(transport))
    return matching or found


def no_load(model: str, transport: str) -> tuple[float | None, str]:
    """Return the published time without cross traffic in s, over TCP if that is known, and its table or section."""
    if carrier(transport) == "TCP" and model in NO_LOAD_TCP_S:
        return NO_LOAD_TCP_S[model], NO_LOAD_TCP_SECTION
    return NO_LOAD_S.get(model), NO_LOAD_TABLE


def carrier(transport: str) -> str:
    """Return ``RDMA`` for each of its spellings, ``TCP`` for ``tcp-small-window``, else the text in upper case."""
    known = carrier_of(transport.strip()).upper()
    return {"ROCE": "RDMA", "ROCEV2": "RDMA", "INFINIBAND": "RDMA", "IB": "RDMA"}.get(known, known)


# Mean rates of a training flow alone and of one beside cross traffic, in Gbit/s, by model and share of consistent
# web-search load (Table 3.11)
FLOW_RATES_TABLE = "Table 3.11"
FLOW_RATES_GBPS = {
    ("bert-large", 0.3): (9.82, 9.46),
    ("bert-large", 0.8): (3.62, 3.27),
    ("resnet50", 0.3): (8.42, 8.40),
    ("resnet50", 0.8): (7.24, 4.13),
}

# Statements on web-search traffic (section 3.3.2): standard deviation over mean at low loads, and at high loads by kind
# of traffic; factor by which 80 % load lengthens an iteration
SPREAD_LOW = 0.0005
SPREAD_HIGH = {"consistent": 0.078, "burst": 0.393}
GROWTH_AT_HEAVY = {"resnet50": 4.0, "bert-large": 8.0}
# kinds of traffic by how much they slow training, mildest first (section 3.4.2)
KINDS_BY_SLOWDOWN = ("iperf", "consistent", "burst")
