"""Features of the kernel that a testbed is built of."""

import errno

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from ringtap.agents.testbed.build import need
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.computes


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "sch_netem",
            r"this kernel has no sch_netem, which delays links: load it \(modprobe sch_netem\) or use another",
        ),
        ("sch_tbf", r"this kernel has no sch_tbf: load it \(modprobe sch_tbf\) or use another kernel"),
    ],
)
def test_a_feature_that_the_kernel_lacks_is_named_with_what_to_do(kind: str, words: str) -> None:
    def refused() -> None:
        raise NetlinkError(errno.ENOENT)

    with pytest.raises(UsageError, match=f"^{words}"):
        need(kind, refused)


def test_another_error_of_the_kernel_stays_as_it_is() -> None:
    def refused() -> None:
        raise NetlinkError(errno.EPERM)

    with pytest.raises(NetlinkError):
        need("veth", refused)
