"""Finds collectors by name; a module is imported only when its collector is requested."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core import plug_ins
from ringtap.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:  # the job starts before any collector's module is loaded
    from ringtap.collectors.collector_interface import Collector

# name -> (module, class), in the order in which they are started and shown
_CLASSES = {
    "nic": ("ringtap.collectors.nic", "NicCollector"),
    "sockets": ("ringtap.collectors.sockets", "SocketsCollector"),
    "qdisc": ("ringtap.collectors.qdisc", "QdiscCollector"),
    "host": ("ringtap.collectors.host", "HostCollector"),
    "infiniband": ("ringtap.collectors.infiniband", "InfinibandCollector"),
    "ethtool": ("ringtap.collectors.ethtool", "EthtoolCollector"),
    "gpu": ("ringtap.collectors.gpu", "GpuCollector"),
    "nccl-ras": ("ringtap.collectors.nccl_ras", "NcclRasCollector"),
    "packets": ("ringtap.collectors.packets", "PacketsCollector"),
}
ORDER = tuple(_CLASSES)
# folders of a node that a plug-in must not use
RESERVED = frozenset(
    (*ORDER, "clock", "steps", "ddp", "horovod", "nccl", "profile", "sent", "received", "log", "derived")
)
_NAME = re.compile("[a-z][a-z0-9_-]{0,39}")
# packets must be requested by name: they need a privilege and disk space
DEFAULT = tuple(name for name in ORDER if name != "packets")


def collector_class(name: str) -> type[Collector]:
    """Import and return the class of a collector.

    Args:
        name: one of `ORDER`, the name of a plug-in, or ``module:Class``.

    Raises:
        UsageError: there is no such collector, or it is not one; the message names the most similar one.
        ImportError: a package that this collector needs is not installed.
    """
    if name in _CLASSES:
        module, class_name = _CLASSES[name]
        found: type[Collector] = getattr(importlib.import_module(module), class_name)
        return found
    if ":" in name:
        return _checked(_from_module(name), name)
    if name not in plug_in_names():
        raise unknown_collector(name)
    return _checked(plug_ins.load(plug_ins.COLLECTORS, name), name)


def check_module(module: str) -> None:
    """Check that there is a module, in the working directory or elsewhere; from now on Python finds it there.

    It is not imported: that is the agent's to do, whose own working directory is another one.

    Raises:
        UsageError: there is no such module.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UsageError(f"there is no module {module} in this folder, or where Python finds modules")


def _from_module(name: str) -> Any:
    """Import ``module:Class``."""
    module, _, class_name = name.partition(":")
    check_module(module)
    try:
        return getattr(importlib.import_module(module), class_name)
    except AttributeError:
        raise UsageError(f"the module {module} has no {class_name!r}: give MODULE:CLASS of a collector") from None


def _checked(found: Any, name: str) -> type[Collector]:
    """Return a plug-in's class, if it can be a collector.

    Raises:
        UsageError: it lacks a method, or its name is another collector's or cannot be a folder's.
    """
    lacking = [method for method in ("check", "start", "sample", "stop") if not callable(getattr(found, method, None))]
    lacking += sorted(getattr(found, "__abstractmethods__", ()))
    if not isinstance(found, type) or lacking:
        raise UsageError(f"it is not a collector: it has no {' and no '.join(lacking) or 'class'}")
    own = getattr(found, "name", None)
    if not (isinstance(own, str) and _NAME.fullmatch(own)):
        raise UsageError(f"its name is {own!r}: a collector's name consists of lowercase letters, digits, - and _")
    if own in RESERVED or (":" not in name and own != name):
        taken = "which ringtap uses itself" if own in RESERVED else f"but its entry point is {name!r}"
        raise UsageError(f"its name is {own!r}, {taken}: rename it")
    return found


def plug_in_names() -> list[str]:
    """Return the names of the collectors of installed packages."""
    return [name for name in plug_ins.names(plug_ins.COLLECTORS) if name not in _CLASSES]


def unknown_collector(name: str, known: Iterable[str] = ORDER) -> UsageError:
    """Return the error for a name that is not a known collector."""
    names = [*known, *plug_in_names()]
    return UsageError(
        f"there is no collector {name!r}: {did_you_mean(name, names)}the collectors are {', '.join(names)}, or "
        "MODULE:CLASS"
    )
