"""Records the optimizer steps that mixed precision's loss scaler skipped: the optimizer's hooks see none of it."""

from __future__ import annotations

import sys

from .steps import recorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap ``GradScaler.step``, unless it is another module's whose own is wrapped already."""
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

    # What torch.compile looks for: the plain step makes it break its graph too, where it asks for what was found.
    step._torchdynamo_disable = True  # type: ignore[attr-defined]
    scaler_class.step = step


def _is_torch_optimizer(optimizer: Any) -> bool:
    """True if its step would have been seen; of any other nothing is known."""
    module = sys.modules.get("torch.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer)
