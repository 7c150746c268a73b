"""Agreement of ranks about the timeline, through Horovod's own rendezvous server: all of them have it, or none."""

import math
import threading
import time
from collections.abc import Iterator

import pytest

from ringtap.agents.hook.ringtap_hook.horovod_all_ranks_recorded import agree
from tests.horovod.conftest import needs_horovod

pytestmark = [pytest.mark.alone(1), needs_horovod]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from horovod.runner.http import http_server

    found = http_server.RendezvousServer()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(found.start()))
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "0.5")
    found.init([])
    yield
    found.stop()
    found._httpd.server_close()


def decisions(delays_s: list[float]) -> dict[int, str]:
    """Decision of each rank, from rank 0 on, if they come up after these times; inf: after the others have ended."""
    found: dict[int, str] = {}

    def decide(rank: int) -> None:
        if math.isinf(delays_s[rank]):
            for other in threads[:rank] + threads[rank + 1 :]:
                other.join()
        else:
            time.sleep(delays_s[rank])
        found[rank] = agree(rank, len(delays_s), "")

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in range(len(delays_s))]
    for thread in reversed(threads):  # those that rank 0 may wait for come first
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_all_come_up_have_a_timeline(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")
    assert decisions([0.1, 0.0, 0.1]) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize("late_s", [0.4, 0.5, 0.55, 0.7, 1.2, 1.45, 1.5, 1.55, math.inf])
def test_ranks_that_waited_in_vain_never_differ_from_rank_0(server: None, late_s: float) -> None:
    """Rank 0 comes up when the others have given up, or are just about to: at 0.5 s, and 1 s after it."""
    found = decisions([late_s, 0.0, 0.0])
    assert len({bool(reason) for reason in found.values()}) == 1, found
    assert late_s < 2 or all(found.values()), found
