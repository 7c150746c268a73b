"""Lets the ranks of a Horovod job agree that all are recorded, through the key-value server of ``hvd.init()``.

Every recorded rank puts its own key. Rank 0 waits for all keys and puts the decision, for which the other ranks wait. A
rank that is not recorded puts only Horovod's own key, when it calls ``init()``. A rank that has waited as long as
Horovod would withdraws: rank 0 then decides against the timeline. Either all ranks decide "yes" or none does.
"""

from __future__ import annotations

import http.client
import os
import time

_HOROVOD_SCOPE = "global"  # HOROVOD_GLOO_GLOBAL_PREFIX
_OK = 200
_POLL_S = 0.02
_POLL_S_PER_RANK = 0.002
_WITHDRAWAL_S = 1.0  # longer than rank 0 takes from its last look at the keys to its decision
_RECORDED, _WITHDRAWN = b"recorded", b"withdrawn"


def agree(rank: int, size: int, veto: str) -> str:
    """Agree with all ranks that each of them is recorded. Call this once per job: the keys stay.

    Args:
        rank: rank of this process.
        size: number of ranks in the job.
        veto: rank 0's own reason against it; empty for none.

    Returns:
        Empty if all ranks are recorded, in every rank alike; else the reason.
    """
    store = _Store("ringtap")
    pause_s = max(_POLL_S, size * _POLL_S_PER_RANK)  # the server is one Python process
    deadline = time.monotonic() + float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
    if rank:
        if not store.put(str(rank), _RECORDED, deadline):
            return "Horovod's rendezvous server did not answer"
        return _wait_for_decision(store, rank, pause_s, deadline)
    reason = veto or _wait_for_ranks(store, size, pause_s, deadline)
    if not store.put("decision", reason.encode() or b"yes", deadline):
        return "Horovod's rendezvous server did not answer"
    return reason


def _wait_for_ranks(store: _Store, size: int, pause_s: float, deadline: float) -> str:
    """Wait, in rank 0, for the keys of all other ranks; returns the reason if one has none, else empty."""
    missing = list(range(1, size))
    while missing and time.monotonic() < deadline:
        # Each rank puts our key before Horovod's: a rank with Horovod's key and without ours has no recorder.
        initialized = [other for other in missing if store.has(_HOROVOD_SCOPE, str(other))]
        missing = [other for other in missing if not store.has(store.scope, str(other))]
        unrecorded = [other for other in initialized if other in missing]
        if unrecorded:
            return f"rank {unrecorded[0]} is not recorded, and Horovod needs the variable in all ranks or in none"
        if missing:
            time.sleep(pause_s)
    if missing:
        return f"rank {missing[0]} did not come up in time"
    withdrawn = [other for other in range(1, size) if store.get(store.scope, str(other)) != _RECORDED]
    return f"rank {withdrawn[0]} has waited for rank 0 in vain" if withdrawn else ""


def _wait_for_decision(store: _Store, rank: int, pause_s: float, deadline: float) -> str:
    """Wait, in the other ranks, for rank 0's decision; returns empty for "yes", else the reason."""
    withdrawn = False
    while True:
        is_initialized = store.has(_HOROVOD_SCOPE, "0")
        decision = store.get(store.scope, "decision")
        if decision is not None:
            return "" if decision == b"yes" else decision.decode("utf-8", "replace")
        if is_initialized:
            return "rank 0 is not recorded"
        if time.monotonic() < deadline:
            time.sleep(pause_s)
        elif withdrawn:
            return "rank 0 did not come up in time"
        else:  # rank 0 may be deciding at this moment
            withdrawn = True
            deadline = time.monotonic() + max(_WITHDRAWAL_S, 4 * pause_s)
            store.put(str(rank), _WITHDRAWN, deadline)


class _Store:
    """Horovod's rendezvous server: keys in scopes, over HTTP."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self._address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        self._port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])

    def put(self, key: str, value: bytes, deadline: float) -> bool:
        """Set a key of this scope, with retries until the deadline because other ranks need it; True on success."""
        while True:
            status, _ = self._ask("PUT", self.scope, key, value)
            if status == _OK:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def get(self, scope: str, key: str) -> bytes | None:
        """A key's value; None if it does not exist or the server did not answer."""
        status, value = self._ask("GET", scope, key)
        return value if status == _OK else None

    def has(self, scope: str, key: str) -> bool:
        """True if the key exists."""
        return self.get(scope, key) is not None

    def _ask(self, method: str, scope: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=5)
        try:
            connection.request(method, f"/{scope}/{key}", body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()
