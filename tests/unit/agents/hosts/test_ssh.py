"""The reason that ssh gives for a host that cannot be used."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from ringtap.agents.hosts.ssh import SshHost, SshHosts
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long]


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
        "a, b cannot be used over ssh: the jump host gate cannot be used: ssh: connect to host 127.0.0.1 "
        f"port {port}: Connection refused (try: ssh gate true)"
    )


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh is not installed")
def test_a_working_folder_that_is_no_absolute_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\n  ProxyCommand false\n")
    with pytest.raises(UsageError) as caught:
        SshHosts([SshHost("a", "a.lab", workdir="data")], config=tmp_path / "config")
    assert str(caught.value) == "workdir 'data' of a is not an absolute path"


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


# ssh with two jump hosts before every host, of which the second is used over the first
JUMPING = """#!/bin/sh
case "$*" in
*" -G "*) echo "user me"; echo "proxyjump gate,me@inner:2222";;
*"-J gate -- ssh://me@inner:2222 true") echo "${INNER}" >&2; [ -z "${INNER}" ] || exit 255;;
*"-- ssh://gate true") ;;
*) exit 9;;
esac
"""
BANNER_TIMEOUT = "Connection timed out during banner exchange"
PROHIBITED = "channel 0: open failed: administratively prohibited: open failed"
NOT_PASSED_ON = "does not pass connections on (AllowTcpForwarding of its sshd)"


@pytest.mark.parametrize(
    ("inner", "said", "reason"),
    [
        (
            "Connection closed by 10.0.0.9 port 2222",
            [BANNER_TIMEOUT],
            (
                "the jump host me@inner:2222 cannot be used: Connection closed by 10.0.0.9 port 2222 "
                "(try: ssh me@inner:2222 true)"
            ),
        ),
        (
            "",
            [BANNER_TIMEOUT],
            f"its connection ended - {BANNER_TIMEOUT}; the jump host me@inner:2222 can be used (try: ssh a.lab true)",
        ),
        (
            "",
            [PROHIBITED, "stdio forwarding failed", CUT],
            f"its connection ended - {PROHIBITED}; the jump host me@inner:2222 {NOT_PASSED_ON} (try: ssh a.lab true)",
        ),
    ],
    ids=["closed", "behind", "prohibited"],
)
def test_a_jump_host_is_tried_before_the_server_behind_it_is_blamed(
    inner: str, said: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(JUMPING)
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("INNER", inner)
    hosts = SshHosts([])
    try:
        hosts._hosts["a"] = SshHost("a", "a.lab")
        assert hosts.explain("a", "".join(f"{line}\r\n" for line in said), "", 255) == reason
        lost = hosts.explain("a", "ringtap is being started\n", "not a word for 12 s", -9)
    finally:
        hosts.close()
    assert lost == "not a word for 12 s (the way there leads over the jump host gate, me@inner:2222)"


def test_a_login_that_hangs_is_told_with_its_last_words_and_a_remedy() -> None:
    hosts = SshHosts([])
    try:
        hosts._hosts["a"] = SshHost("a", "a.lab")
        words = hosts.explain("a", "Choose an environment:" + "." * 1000, "ringtap was not started there", -9)
    finally:
        hosts.close()
    assert words == (
        f"ringtap was not started there; its login said at last: Choose an environment:{'.' * 278}; begin its login "
        "files (.bashrc) with [ -t 1 ] || return, as ringtap logs in without a terminal (try: ssh a.lab true)"
    )
