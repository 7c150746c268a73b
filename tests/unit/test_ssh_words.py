"""The reason that ssh gives for a host that cannot be used."""

import shutil
import socket
from pathlib import Path

import pytest

from ringtap.agents.hosts.ssh import SshHost, SshHosts
from ringtap.errors import UsageError


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh is not installed")
def test_a_jump_host_that_is_not_reached_is_the_reason_and_is_told_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = tmp_path / "config"
    config.write_text(
        f"Host gate\n  HostName 127.0.0.1\n  Port {port}\nHost *.lab\n  ProxyJump gate\n"
        "Host *\n  UserKnownHostsFile /dev/null\n  IdentityAgent none\n"
    )
    with pytest.raises(UsageError) as caught:
        SshHosts([SshHost("a", "a.lab"), SshHost("b", "b.lab")], config=config)
    assert str(caught.value) == (
        "a, b cannot be used over ssh: its connection ended - ssh: connect to host 127.0.0.1 "
        f"port {port}: Connection refused (try: ssh a.lab true)"
    )


BANNER = "####\nAuthorised use only\n"
CHANGED = "Host key for gate has changed and you have requested strict checking."
CLOSED = "Connection closed by UNKNOWN port 65535"
CUT = "kex_exchange_identification: Connection closed by remote host"
NO_ROUTE = "channel 0: open failed: connect failed: No route to host"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([NO_ROUTE, "stdio forwarding failed", CUT, CLOSED], NO_ROUTE),
        (["me@gate: Permission denied (publickey).", CLOSED], "me@gate: Permission denied (publickey)."),
        ([CHANGED, "Host key verification failed.", CLOSED], CHANGED),
        (["Host key verification failed."], "Host key verification failed."),
        ([CLOSED], CLOSED),
    ],
)
def test_what_ssh_says_in_the_end_is_no_reason_where_it_gave_one_before(said: list[str], reason: str) -> None:
    hosts = SshHosts([])
    try:
        hosts._hosts["a"] = SshHost("a", "a.lab")
        words = hosts.explain("a", BANNER + "".join(f"{line}\r\n" for line in said), "", 255)
    finally:
        hosts.close()
    assert words == f"its connection ended - {reason} (try: ssh a.lab true)"
