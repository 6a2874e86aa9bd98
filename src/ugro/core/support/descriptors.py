"""How many files and connections this process may have open, and what its children start with."""

from __future__ import annotations

import contextlib
import resource
import sys

_ENOUGH = 65_536
# Many programs still assume that no descriptor is above 1023: children get the limit that this process was given.
_given: list[tuple[int, int]] = []


def raise_limit() -> int:
    """Raises the limit as far as it needs no privileges, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse what they offer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _given[:] = [(soft, hard)]
    return limit()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def restore_limit(pid: int) -> None:
    """Gives a new child the limit that this process was given, before the child has started others."""
    if sys.platform != "linux":
        return
    for given in _given:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, given)
