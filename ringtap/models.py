"""The models of the thesis (Table 2.1) as profiles of the scale-model job.

``compute_s`` is the compute time of a worker in one iteration. It was calibrated on the scale-model testbed
(configuration B, capacity 25 Gbit/s at scale 100, three workers) so that the iteration time without cross traffic is
that of Table 3.1; docs/commands/testbed.md gives the results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelProfile:
    """A training job as the network sees it.

    Attributes:
        name: name used in plans.
        title: name used in reports.
        parameters: full-size parameter count (32-bit gradients).
        layers: number of equal layers of the gradient.
        compute_s: forward and backward compute time of an iteration, in seconds.
        thesis_iteration_s: mean iteration time without cross traffic (Table 3.1), None for other models.
    """

    name: str
    title: str
    parameters: int
    layers: int
    compute_s: float
    thesis_iteration_s: float | None = None


# BERT-large: 335.2 M is what the thesis's demand figures use; its Table 2.1 says 366,428,986 (docs/method/thesis.md).
PROFILES: dict[str, ModelProfile] = {
    profile.name: profile
    for profile in (
        ModelProfile("bert-large", "BERT-large", 335_174_458, 24, 0.60, 0.84),
        ModelProfile("vgg16", "VGG-16", 138_357_444, 16, 0.30, 0.37),
        ModelProfile("densenet161", "DenseNet-161", 28_681_000, 161, 0.37, 0.38),
        ModelProfile("resnet50", "ResNet-50", 25_557_032, 50, 0.142, 0.16),
    )
}
