"""What a profile says of a site, beside what a node of it shows."""

from types import SimpleNamespace

import pytest

from ringtap.slurm import site_checks
from ringtap.slurm.site_profiles import load_site

pytestmark = pytest.mark.computes


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
