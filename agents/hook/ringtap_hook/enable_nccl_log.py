"""Makes NCCL write its log of rings and interfaces into the run directory."""

from __future__ import annotations

import os

from . import error_log
from .settings import is_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

# NCCL logs these when it makes connections, not in each iteration.
_SUBSYSTEMS = "INIT,NET"


def attach(module: ModuleType, settings: Settings) -> None:
    """Set NCCL's log variables in a rank, before NCCL reads them for its first communicator.

    A process that no launcher has made a rank (``torch.multiprocessing.spawn``) gets them when it joins a group.
    """
    if not module.is_nccl_available():
        return
    if is_rank():
        _set_variables(settings)
        return
    import functools

    plain = module.init_process_group

    @functools.wraps(plain)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            _set_variables(settings)
        except Exception:
            error_log.note(settings, "recorder of NCCL's log")
        return plain(*args, **kwargs)

    module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _set_variables(settings: Settings) -> None:
    """Set the variables, unless the job has set one of them.

    Raises:
        OSError: the folder cannot be made or written; NCCL would write to the job's output instead.
    """
    if any(name in os.environ for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")):
        return
    folder = os.path.join(settings.node_folder, "nccl")
    os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")
    # NCCL inserts host and process, so that no two ranks share a file.
    os.environ["NCCL_DEBUG_FILE"] = os.path.join(folder, "%h.%p.log")
    os.environ["NCCL_DEBUG_SUBSYS"] = _SUBSYSTEMS
    os.environ["NCCL_DEBUG"] = "INFO"
