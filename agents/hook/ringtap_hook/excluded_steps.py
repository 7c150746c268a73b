"""Excludes optimizer steps that are not part of the training.

Two functions create the state of an optimizer that has none by a step with zero gradients: Horovod's
``broadcast_optimizer_state``, with which a job of 20 steps with Adam steps 21 times, and ``_init_optim_state`` of
torch.distributed.checkpoint, if a state is saved or loaded before the first step.
"""

from __future__ import annotations

from . import steps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from .settings import Settings

_FUNCTIONS = ("broadcast_optimizer_state", "_init_optim_state")


def attach(module: ModuleType, settings: Settings) -> None:
    """Exclude the steps made within these functions, if the module has them."""
    for name in _FUNCTIONS:
        plain = getattr(module, name, None)
        if plain is not None:
            setattr(module, name, steps.recorder(settings).pass_over(plain))
