"""Finds and loads extensions of installed packages, by entry points, for names that are not ringtap's own."""

from __future__ import annotations

from typing import Any

from ringtap.core.errors import UsageError, error_message

COLLECTORS, TRAFFIC, SITES = "ringtap.collectors", "ringtap.traffic", "ringtap.sites"


def names(group: str) -> list[str]:
    """Return the names of the extensions of a group, sorted."""
    return sorted(_entry_points(group))


def load(group: str, name: str) -> Any:
    """Import an extension.

    Raises:
        UsageError: there is none of this name, or it cannot be imported.
    """
    found = _entry_points(group).get(name)
    if found is None:
        raise UsageError(f"no installed package has {name!r} in its entry points {group}")
    try:
        return found.load()
    except Exception as error:  # it runs a stranger's code
        where = f"{found.value} of the package {found.dist.name if found.dist else '?'}"
        raise UsageError(f"the plug-in {name!r} cannot be loaded from {where}: {error_message(error)}") from error


def _entry_points(group: str) -> dict[str, Any]:
    import importlib.metadata  # takes 20 ms, which a program without plug-ins need not spend

    return {point.name: point for point in importlib.metadata.entry_points(group=group)}
