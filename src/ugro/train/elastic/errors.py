"""What is raised when a rank is lost, and how torch says it."""

from __future__ import annotations

from ugro.core.errors import UgroError

# Gloo raises plain RuntimeErrors, most of which name its own source files; NCCL's and the store's have classes.
_GLOO = (
    "gloo/", "Gloo ", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "pair closure",
    "error when running the callback",  # of DDP's exchange
)  # fmt: skip


LEFT_BEHIND = 75  # the exit code of such a rank: a temporary failure, by convention


class LeftBehind(UgroError):
    """The others have gone on without this rank; a process that is started again can join them."""

    exit_code = LEFT_BEHIND


class PeerLost(RuntimeError):
    """Some rank of the group is gone, and this one has learnt it before it noticed itself."""


def is_lost(error: BaseException | None) -> bool:
    """Whether it says that another rank does not answer, as opposed to an error of this rank's own."""
    if isinstance(error, PeerLost):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from torch import distributed

    return isinstance(error, distributed.DistError) or any(part in str(error) for part in _GLOO)
