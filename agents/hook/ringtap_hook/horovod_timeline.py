"""Makes Horovod write its timeline into the run directory, and records Horovod's settings.

Horovod 0.28 reads HOROVOD_TIMELINE in ``init()``. Only rank 0 writes the file, but all ranks must have the variable or
none: with it, ranks exchange longer bit vectors, and a rank that differs ends the job. So the ranks agree first
(``horovod_all_ranks_recorded.py``). If they cannot, there is no timeline, and ``horovod/settings.json`` gives the
reason.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from . import error_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

VARIABLE = "HOROVOD_TIMELINE"
# Horovod's values for variables that are not set (0.28.1: common/operations.cc, common/gloo/gloo_context.cc).
DEFAULTS = {
    "HOROVOD_FUSION_THRESHOLD": str(128 << 20),
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_CACHE_CAPACITY": "1024",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_AUTOTUNE": "0",
    "HOROVOD_DISABLE_GROUP_FUSION": "0",
    "HOROVOD_TIMELINE_MARK_CYCLES": "0",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
}
_SECRET = ("SECRET", "TOKEN", "PASSWORD", "KEY")

_init_calls = 0


def attach(module: ModuleType, settings: Settings) -> None:
    """Wrap ``HorovodBasics.init`` of ``horovod.common.basics``, which is every framework's ``hvd.init``."""
    import functools

    plain = module.HorovodBasics.init

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        decision = _choose_timeline(settings, bool(args or kwargs))
        try:
            result = plain(self, *args, **kwargs)
        finally:
            if decision["by"] == "ringtap":  # so that child processes do not write to the same file
                os.environ.pop(VARIABLE, None)
        _record_settings(settings, decision)
        return result

    module.HorovodBasics.init = init


def _choose_timeline(settings: Settings, has_arguments: bool) -> dict[str, Any]:
    """Decide about the timeline and set its variable; returns the decision, for the settings file."""
    global _init_calls
    decision: dict[str, Any] = {"by": "", "path": None, "reason": ""}
    path = os.devnull
    try:
        _init_calls += 1
        if os.environ.get(VARIABLE):
            return dict(decision, by="job", path=os.path.abspath(os.environ[VARIABLE]))
        reason = _obstacle(has_arguments)
        if reason:
            return dict(decision, reason=reason)
        # The file comes before the agreement: after that, no rank may fail.
        path, reason = _create_timeline(settings)
        from .horovod_all_ranks_recorded import agree

        reason = agree(int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]), reason)
    except Exception:
        error_log.note(settings, "Horovod timeline recorder")
        reason = "the recorder failed: see the hook's log in steps"
    if reason:
        if path != os.devnull:
            with suppress(OSError):
                os.unlink(path)
        return dict(decision, reason=reason)
    os.environ[VARIABLE] = path
    return dict(decision, by="ringtap", path=None if path == os.devnull else path)


def _obstacle(has_arguments: bool) -> str:
    """Return the reason against a timeline, the same in every rank; empty if there is none."""
    if _init_calls > 1:
        return (
            "hvd.init() was called again, and the server that ranks agree through still has the keys of the first time"
        )
    if has_arguments:
        return "hvd.init() was given ranks or process sets, and which ranks they are is not known before it"
    if os.environ.get("HOROVOD_ELASTIC") in ("1", "true", "True"):
        return "the job is elastic: ranks that join later could not be asked"
    if not os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")):
            return "the ranks were started by MPI and cannot be asked: set HOROVOD_TIMELINE for all of them yourself"
        return "the job has one rank, which communicates with nobody"
    return ""


def _create_timeline(settings: Settings) -> tuple[str, str]:
    """Create the timeline in rank 0; returns its path (else ``os.devnull``), and the reason if this fails."""
    if os.environ.get("HOROVOD_RANK", "0") != "0":
        return os.devnull, ""  # Horovod opens the file in rank 0 only
    folder = os.path.join(settings.node_folder, "horovod")
    try:
        os.makedirs(folder, exist_ok=True)
        attempt = 1
        while True:
            path = os.path.join(folder, "timeline.json" if attempt == 1 else f"timeline-{attempt}.json")
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
                return path, ""
            except FileExistsError:
                attempt += 1
    except OSError as error:
        return os.devnull, f"{folder} cannot be written: {error.strerror}"


def _record_settings(settings: Settings, decision: dict[str, Any]) -> None:
    """Write the settings on each node's first rank."""
    try:
        if os.environ.get("HOROVOD_LOCAL_RANK", "0") == "0":
            _write_settings(settings, decision)
    except Exception:
        error_log.note(settings, "Horovod settings recorder")


def _write_settings(settings: Settings, decision: dict[str, Any]) -> None:
    """Write ``horovod/settings.json``, with the variables that are set and the effective values."""
    import json

    variables = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    public = {name: value for name, value in variables.items() if not any(word in name for word in _SECRET)}
    item = {
        "t_ns": time.time_ns(),
        "mono_ns": time.monotonic_ns(),
        "pid": os.getpid(),
        "rank": int(os.environ.get("HOROVOD_RANK", "0")),
        "size": int(os.environ.get("HOROVOD_SIZE", "1")),
        "horovod": str(getattr(sys.modules.get("horovod"), "__version__", "")),
        "set": public,
        "effective": dict(DEFAULTS, **{name: value for name, value in public.items() if name in DEFAULTS}),
        "timeline": decision,
    }
    folder = os.path.join(settings.node_folder, "horovod")
    os.makedirs(folder, exist_ok=True)
    name = "settings.json" if _init_calls == 1 else f"settings-{_init_calls}.json"
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(item, file, indent=1)
        file.write("\n")
    os.replace(temporary, os.path.join(folder, name))
