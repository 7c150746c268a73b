"""What a profile says of a site, beside what a node of it shows."""

import shlex
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtap.slurm import site_checks
from ringtap.slurm.site_profiles import load_site

pytestmark = pytest.mark.shares


@pytest.mark.parametrize(("speed_mbps", "words"), [(25_000, "with 25 Gbit/s"), (0, "of unknown speed")])
def test_the_interface_of_the_host_name_is_named_with_its_speed_if_known(
    monkeypatch: pytest.MonkeyPatch, speed_mbps: int, words: str
) -> None:
    address = SimpleNamespace(address="10.0.0.3")
    monkeypatch.setattr(site_checks.socket, "gethostname", lambda: "lab3")
    monkeypatch.setattr(site_checks.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("10.0.0.3", 0))])
    # the loopback's name, as only interfaces that exist have a type
    monkeypatch.setattr(site_checks.psutil, "net_if_addrs", lambda: {"lo": [address]})
    monkeypatch.setattr(site_checks.psutil, "net_if_stats", lambda: {"lo": SimpleNamespace(speed=speed_mbps)})
    found = site_checks.interface(load_site("generic", {}))
    assert found.reason.startswith(f"lab3 resolves to lo {words}; the profile says ")


def write_wheel(folder: Path, name: str) -> None:
    """Write the wheel of a package without modules."""
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_a_wheelhouse_has_what_pip_finds_without_the_internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    make = f"{shlex.quote(sys.executable)} -m venv"
    site = replace(load_site("generic", {}), make_environment=make, wheelhouse=("here", "gone"))
    write_wheel(tmp_path, "here")
    found = site_checks.wheelhouse(site)
    assert (found.state, found.reason) == ("degraded", "pip install --no-index finds no gone")
    assert found.remedy == "in a profile of your own: wheelhouse = ['here']"
    write_wheel(tmp_path, "gone")
    found = site_checks.wheelhouse(site)
    assert (found.state, found.reason) == ("ok", f"{make} works; 2 packages found by --no-index")
