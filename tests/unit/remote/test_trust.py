"""Which folders are safe from other users: owner, mode, sticky bit, private group, access list."""

from __future__ import annotations

import os
import stat

import pytest

from ugro.node.home import Account, fault_above, fault_inside

ME, OTHER = 1000, 1001
PRIVATE, SHARED = 1000, 100


def found(uid: int, mode: int, gid: int = SHARED, kind: int = stat.S_IFDIR) -> os.stat_result:
    return os.stat_result((kind | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


def account(private_gid: int | None = None) -> Account:
    return Account(ME, frozenset({0}), lambda: private_gid)


@pytest.mark.parametrize(
    ("folder", "private_gid", "has_acl", "above", "inside"),
    [
        (found(ME, 0o700), None, False, None, None),
        (found(ME, 0o755), None, False, None, None),
        (found(0, 0o755), None, False, None, "owner"),
        (found(OTHER, 0o700), None, False, "owner", "owner"),
        (found(ME, 0o777), None, False, "writable", "writable"),
        (found(ME, 0o702), None, False, "writable", "writable"),
        (found(0, 0o1777), None, False, None, "owner"),
        (found(ME, 0o1777), None, False, None, "writable"),
        (found(OTHER, 0o1777), None, False, "owner", "owner"),
        (found(ME, 0o775), None, False, "writable", "writable"),
        (found(ME, 0o775, PRIVATE), PRIVATE, False, None, None),
        (found(ME, 0o775, SHARED), PRIVATE, False, "writable", "writable"),
        (found(ME, 0o777, PRIVATE), PRIVATE, False, "writable", "writable"),
        (found(ME, 0o775, PRIVATE), PRIVATE, True, "acl", "acl"),
        (found(ME, 0o777, kind=stat.S_IFLNK), None, False, None, "link"),
        (found(OTHER, 0o777, kind=stat.S_IFLNK), None, False, "owner", "owner"),
        (found(ME, 0o600, kind=stat.S_IFREG), None, False, None, None),
        (found(ME, 0o666, kind=stat.S_IFREG), None, False, "writable", "writable"),
    ],
)
def test_each_owner_and_mode_has_its_verdict(
    folder: os.stat_result, private_gid: int | None, has_acl: bool, above: str | None, inside: str | None
) -> None:
    assert fault_above(folder, account(private_gid), has_acl) == above
    assert fault_inside(folder, account(private_gid), has_acl) == inside
