"""Reads site profiles: facts about clusters, as TOML files (docs/reference/sites.md)."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from ringtap.core import plug_ins
from ringtap.core.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = Path(__file__).parent / "sites"
_BASES = ("alliance",)  # profiles that others build on; not sites themselves


@dataclass(frozen=True)
class Nodes:
    """One kind of node.

    Attributes:
        count: number of such nodes.
        cores: cores per node.
        memory: memory per node that a job can use, in Slurm's notation.
        gpu: type of its GPUs, as for ``--gpus-per-node``; empty if it has none.
        gpus: numbers of GPUs that a job may request on one node.
    """

    count: int
    cores: int
    memory: str
    gpu: str = ""
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Site:
    """Cluster.

    Attributes:
        name: name of the site in ``--site`` and ``$CC_CLUSTER``.
        about: description in one line.
        fabric: network between the nodes.
        internet: True if compute nodes reach the internet; None if unknown.
        submit_from: host to submit from.
        modules: modules to load, in this order.
        make_environment: command that makes a Python environment, without the folder's name.
        architecture: architecture of the compute nodes, as in the names of wheels.
        wheelhouse: packages that ``pip install --no-index`` finds there.
        read_only: folders to which jobs cannot write; may begin with a variable.
        shared_file_systems: types of file systems that all nodes share; empty if unknown.
        interface: network interface for the TCP connections of Gloo and NCCL; empty: they choose it.
        requires: options that a job must have.
        longest_job: longest time limit in Slurm's notation; empty if unknown.
        nodes: kinds of nodes.
        sources: sources of these facts, with their dates.
        unverified: facts that are not confirmed, one sentence each.
    """

    name: str
    about: str = ""
    fabric: str = ""
    internet: bool | None = None
    submit_from: str = ""
    modules: tuple[str, ...] = ()
    make_environment: str = "python3 -m venv"
    architecture: str = "x86_64"
    wheelhouse: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    shared_file_systems: tuple[str, ...] = ()
    interface: str = ""
    requires: tuple[str, ...] = ()
    longest_job: str = ""
    nodes: tuple[Nodes, ...] = field(default=())
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPUs on the cluster."""
        return tuple(dict.fromkeys(kind.gpu for kind in self.nodes if kind.gpu))


def user_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for the user's own profiles."""
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ringtap" / "sites"


def site_names(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names that ``--site`` accepts; the user's own profiles come first."""
    found = [path.stem for folder in (user_folder(environment), SHIPPED) for path in sorted(folder.glob("*.toml"))]
    return [name for name in dict.fromkeys((*found, *plug_ins.names(plug_ins.SITES))) if name not in _BASES]


def load_site(name: str | None, environment: Mapping[str, str] = os.environ) -> Site:
    """Read a site's profile.

    Args:
        name: name of a site, or path of a profile, which ends in ``.toml``; None: the site in ``$CC_CLUSTER`` if it is
            known, else ``generic``.
        environment: environment variables.

    Raises:
        UsageError: there is no such site, or its profile is not valid.
    """
    known = site_names(environment)
    if name is None:
        here = environment.get("CC_CLUSTER", "").lower()
        name = here if here in known else "generic"
    if name.endswith(".toml"):
        return _read(Path(name), environment)
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        raise UsageError(
            f"there is no site {name!r}: " + (f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}")
        )
    return _read(_find(name.lower(), environment), environment)


def _find(name: str, environment: Mapping[str, str]) -> Path:
    own = user_folder(environment) / f"{name}.toml"
    shipped = SHIPPED / f"{name}.toml"
    if own.is_file() or shipped.is_file() or name not in plug_ins.names(plug_ins.SITES):
        return own if own.is_file() else shipped
    try:
        return Path(plug_ins.load(plug_ins.SITES, name))
    except TypeError as error:
        raise UsageError(f"the plug-in {name!r} is not the path of a site profile: {error}") from error


def _read(path: Path, environment: Mapping[str, str]) -> Site:
    try:
        items = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"the site profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the site profile {path} is not TOML: {error}") from error
    base = items.pop("base", None)
    if base is None:
        site = Site(path.stem)
    elif isinstance(base, str) and base != path.stem and _find(base, environment).is_file():
        site = _read(_find(base, environment), environment)
    else:
        raise UsageError(f"the site profile {path} builds on {base!r}, which is not a profile")
    items.setdefault("name", path.stem)
    kinds = items.pop("nodes", None)
    changes = _checked(Site, items, path)
    # facts that the base has not verified stay unverified
    changes["unverified"] = (*site.unverified, *changes.get("unverified", ()))
    changes["sources"] = (*site.sources, *changes.get("sources", ()))
    if kinds is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, dict) for kind in kinds):
            raise UsageError(f"{path}: nodes is an array of tables: [[nodes]]")
        changes["nodes"] = tuple(Nodes(**_checked(Nodes, kind, path)) for kind in kinds)
    return replace(site, **changes)


def _checked(of: type[Site] | type[Nodes], items: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the items as arguments of a dataclass.

    Raises:
        UsageError: a key is unknown or missing, or a value has the wrong type.
    """
    hints, values = get_type_hints(of), {}
    for key, value in items.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            raise UsageError(f"{path}: there is no key {key!r}" + (f": did you mean {near[0]}?" if near else ""))
        hint = hints[key]
        given = tuple(value) if isinstance(value, list) else value
        if hint in (tuple[str, ...], tuple[int, ...]):
            member = str if hint == tuple[str, ...] else int
            is_valid = isinstance(given, tuple) and all(type(entry) is member for entry in given)
        else:
            is_valid = type(given) is (bool if key == "internet" else hint)
        if not is_valid:
            raise UsageError(f"{path}: {key} = {value!r} is not what this key takes")
        values[key] = given
    missing = [item.name for item in fields(of) if item.default is MISSING and item.name not in values]
    if missing:
        raise UsageError(f"{path}: {missing[0]} is missing")
    return values
