"""Lists the transports of training traffic: their labels in plans, and the environment variables that select them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringtap.core.errors import did_you_mean

# by transport: variables of NCCL, whose network is forced so that a job without RDMA fails instead of falling back
VARIABLES: dict[str, dict[str, str]] = {
    "tcp": {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
    "rdma": {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"},
}
_LABEL = re.compile(rf"({'|'.join(VARIABLES)})(-[A-Za-z0-9._]+)*")


def carrier_of(label: str) -> str:
    """Return the transport of a label: ``tcp`` of ``tcp-small-window``."""
    return label.partition("-")[0].lower()


def is_rdma(label: str) -> bool:
    """Return True if training over this transport carries its traffic by RDMA."""
    return carrier_of(label) == "rdma"


def label_problem(label: str) -> str:
    """Return the reason that a label does not name a transport; empty if it does."""
    if _LABEL.fullmatch(label) and len(label) <= 40:
        return ""
    hint = did_you_mean(carrier_of(label), VARIABLES)
    return f"is not a transport: {hint}give tcp or rdma, or a label that begins with one, such as tcp-small-window"


def contradiction(label: str, environment: Mapping[str, str]) -> str:
    """Return the variable by which a job would not use its transport; empty if there is none."""
    network = environment.get("NCCL_NET", "").lower()
    if is_rdma(label):
        wrong = {"NCCL_IB_DISABLE": environment.get("NCCL_IB_DISABLE", "0") != "0", "NCCL_NET": network == "socket"}
    else:
        wrong = {"NCCL_NET": network == "ib"}
    return next((f"{name} = {environment[name]!r}" for name, is_wrong in wrong.items() if is_wrong), "")
