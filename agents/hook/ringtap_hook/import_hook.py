"""Attaches recorders to modules when the job imports them."""

from __future__ import annotations

import sys

from . import error_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

# A module of the job -> its attachers, called in order right after the module's execution. An attacher is a module of
# this package, whose ``attach(module, settings)`` is called if one of the recorders before it is wanted (none: always).
ATTACHERS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "torch.autograd": ((("steps", "ddp", "profile"), "count_backward_passes"),),
    "torch.optim.optimizer": (
        ((), "agent_start"),
        (("steps",), "steps"),
        (("profile",), "layer_profiler"),
        ((), "replace_ddp_all_reduce"),
    ),
    "torch.amp.grad_scaler": ((("steps",), "loss_scaler"),),
    "torch.cuda.amp.grad_scaler": ((("steps",), "loss_scaler"),),  # in older releases
    "torch.nn.parallel.distributed": ((("ddp",), "ddp_logging_data"), ((), "replace_ddp_all_reduce")),
    "torch.distributed.distributed_c10d": (
        (("steps", "ddp"), "record_files"),
        (("nccl",), "enable_nccl_log"),
        (("profile",), "profiled_torch_distributed"),
    ),
    "torch.distributed.checkpoint.state_dict": ((("steps",), "excluded_steps"),),
    "horovod": (((), "agent_start"),),
    # Horovod reads its environment in HorovodBasics.init, whatever the framework.
    "horovod.common.basics": ((("horovod",), "horovod_timeline"),),
    "horovod.torch.mpi_ops": ((("profile",), "profiled_horovod"),),
    "horovod.torch.functions": ((("steps",), "excluded_steps"),),
    "horovod.torch.optimizer": ((("steps",), "horovod_exchange"),),
}


def install(settings: Settings) -> None:
    """Insert a finder first in ``sys.meta_path``; modules imported before get their recorders at once."""
    finder = _Finder(settings)
    for name in [name for name in finder.pending if name in sys.modules]:
        _attach(sys.modules[name], finder.pending.pop(name), settings)
    if finder.pending:
        sys.meta_path.insert(0, finder)


def _attach(module: ModuleType, attachers: list[str], settings: Settings) -> None:
    from importlib import import_module

    for attacher in attachers:
        try:
            import_module(f"{__package__}.{attacher}").attach(module, settings)
        except Exception:
            error_log.note(settings, f"{attacher} recorder")


class _Finder:
    """A meta path finder for the pending modules of `ATTACHERS`; it removes itself after the last one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.pending: dict[str, list[str]] = {}
        for name, rows in ATTACHERS.items():
            attachers = [attacher for recorders, attacher in rows if not recorders or settings.wants(*recorders)]
            if attachers:
                self.pending[name] = attachers

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a pending module as Python would, and attach its recorders after its execution."""
        if name not in self.pending:
            return None
        try:
            attachers = self.pending.pop(name)
            if not self.pending:
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec.loader, attachers)
                    return spec
        except Exception:
            error_log.note(self._settings, "import hook")
        return None

    def _extend(self, loader: Any, attachers: list[str]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _attach(module, attachers, self._settings)

        loader.exec_module = exec_module
