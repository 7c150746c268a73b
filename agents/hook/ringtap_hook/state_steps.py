"""Keeps steps that are not the training's out of the records.

Two functions have an optimizer without state make one step over zero gradients, to get its state: Horovod's
``broadcast_optimizer_state``, after which a job of 20 steps with Adam has stepped 21 times, and
``_init_optim_state`` of torch.distributed.checkpoint, where a state is saved or loaded before the first step.
"""

from __future__ import annotations

from . import steps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from .settings import Settings

_FUNCTIONS = ("broadcast_optimizer_state", "_init_optim_state")


def attach(module: ModuleType, settings: Settings) -> None:
    """Pass over the steps made within those of these functions that the module has."""
    for name in _FUNCTIONS:
        plain = getattr(module, name, None)
        if plain is not None:
            setattr(module, name, steps.recorder(settings).pass_over(plain))
