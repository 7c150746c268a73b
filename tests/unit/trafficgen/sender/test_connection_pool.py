"""The launcher's connection pools."""

from __future__ import annotations

import socket

import pytest

from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.connection_pool import ConnectionPool, WorkerHandle
from ringtap.trafficgen.sender.worker import Destination

pytestmark = pytest.mark.computes


def test_a_pool_opens_connections_up_to_its_limit() -> None:
    here, there = ipc.pair()
    place = Destination("", socket.AF_INET, ("127.0.0.1", 5001), "127.0.0.1:5001", 0, 0)
    pool = ConnectionPool(0, place, [WorkerHandle(ipc.Channel(here), ipc.SharedSlots(5))], 5, False)
    pool.open_ahead(2)
    pool.joined()
    pool.joined()
    assert (pool.pending, pool.busy()) == (0, 2)
    pool.open_ahead(10)
    asked = [(what, count) for what, _, count, _ in ipc.Channel(there).messages()]
    assert asked == [(ipc.OPEN, 2), (ipc.OPEN, 3)]
    for end in (here, there):
        end.close()
