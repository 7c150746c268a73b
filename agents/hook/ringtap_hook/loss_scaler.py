"""Records the optimizer steps that a loss scaler (mixed precision) skips, which the step hooks do not see."""

from __future__ import annotations

import sys

from .steps import recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap ``GradScaler.step``, unless the class inherits it or comes from another module: then it is wrapped there."""
    import functools

    scaler_class = module.GradScaler
    plain = scaler_class.__dict__.get("step")
    if plain is None or scaler_class.__module__ != module.__name__:
        return
    own = recorder(settings)

    @functools.wraps(plain)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        begun = own.begin_scaled()
        result = plain(self, optimizer, *args, **kwargs)
        if self.is_enabled() and _is_torch_optimizer(optimizer):
            own.end_scaled(optimizer, begun)
        return result

    # torch.compile checks this, and breaks its graph here; the plain step breaks it too, when it reads ``found_inf``.
    step._torchdynamo_disable = True  # type: ignore[attr-defined]
    scaler_class.step = step


def _is_torch_optimizer(optimizer: Any) -> bool:
    """True for an optimizer of torch, whose step the hooks would have seen."""
    module = sys.modules.get("torch.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer)
