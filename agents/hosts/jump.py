"""The jump hosts on the way to a server, as the user's ssh configuration names them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence

_SETTINGS_S = 10.0
_TRY_S = 20.0
_WORDS_BYTES = 1 << 16
_SSH_FAILED = 255


def jump_hosts(ssh: Sequence[str], destination: str) -> tuple[str, ...]:
    """The jump hosts on the way to a destination, in the order in which they are passed.

    Args:
        ssh: ssh and its options.
        destination: what ssh(1) takes.
    """
    try:
        done = subprocess.run(
            [*ssh, "-G", "--", destination],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SETTINGS_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    settings = dict(line.split(" ", 1) for line in done.stdout.decode(errors="replace").splitlines() if " " in line)
    hops = settings.get("proxyjump", "none")
    return () if hops == "none" else tuple(hops.split(","))


def failing_jump(ssh: Sequence[str], hops: Sequence[str]) -> tuple[str, str] | None:
    """The first jump host that ssh cannot use, and what ssh says of it; None where all can be used, or it is not known.

    Args:
        ssh: ssh and its options.
        hops: the jump hosts, in the order in which they are passed.
    """
    for at, hop in enumerate(hops):
        way = ["-J", ",".join(hops[:at])] if at else []
        target = hop if "://" in hop else f"ssh://{hop}"  # a hop may end in a port, which ssh takes in this form alone
        with tempfile.TemporaryFile() as words:
            try:
                done = subprocess.run(
                    [*ssh, *way, "--", target, "true"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                    start_new_session=True,  # without a terminal, on which the ssh to an earlier hop might ask
                    check=False,
                    timeout=_TRY_S,
                )
            except (OSError, subprocess.TimeoutExpired):  # a login there that hangs is no fault of the way
                return None
            words.seek(max(0, words.seek(0, os.SEEK_END) - _WORDS_BYTES))
            said = words.read().decode(errors="replace")
        if done.returncode == _SSH_FAILED:
            return hop, said
    return None
