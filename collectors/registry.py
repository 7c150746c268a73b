"""The collectors by name; a module is imported only when its collector is requested."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ringtap.errors import UsageError

if TYPE_CHECKING:  # the job starts before any collector's module is loaded
    from ringtap.collectors.base import Collector

# name -> (module, class), in the order in which they are started and shown
_CLASSES = {
    "nic": ("ringtap.collectors.nic", "NicCollector"),
    "sockets": ("ringtap.collectors.sockets", "SocketsCollector"),
    "qdisc": ("ringtap.collectors.qdisc", "QdiscCollector"),
    "host": ("ringtap.collectors.host", "HostCollector"),
    "infiniband": ("ringtap.collectors.infiniband", "InfinibandCollector"),
    "ethtool": ("ringtap.collectors.ethtool", "EthtoolCollector"),
    "gpu": ("ringtap.collectors.gpu", "GpuCollector"),
    "packets": ("ringtap.collectors.packets", "PacketsCollector"),
}
ORDER = tuple(_CLASSES)
# packets must be requested by name: they need a privilege and disk space
DEFAULT = tuple(name for name in ORDER if name != "packets")


def collector_class(name: str) -> type[Collector]:
    """Import and return the class of a collector.

    Raises:
        UsageError: there is no such collector; the message names the most similar one.
        ImportError: a package that this collector needs is not installed.
    """
    if name not in _CLASSES:
        raise unknown_collector(name)
    module, class_name = _CLASSES[name]
    found: type[Collector] = getattr(importlib.import_module(module), class_name)
    return found


def unknown_collector(name: str, known: Iterable[str] = ORDER) -> UsageError:
    """Return the error for a name that is not a known collector."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"there is no collector {name!r}: {hint}the collectors are {', '.join(names)}")
