"""Members of Unix groups: also while the directory that knows them does not answer."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
from dataclasses import dataclass, field

import pytest

from ugro.features.quotas.usage_book import Directory, UnixGroup, UnixGroups


@dataclass
class Ldap:
    """Without a list of all users, as most are configured."""

    groups: dict[str, UnixGroup] = field(default_factory=lambda: {"lab": UnixGroup(700, frozenset({"ann"}))})
    users: dict[str, int] = field(default_factory=lambda: {"ann": 100, "bob": 700})
    is_away: bool = False

    @property
    def directory(self) -> Directory:
        return Directory(
            lambda name: None if self.is_away else self.groups.get(name),
            lambda user: None if self.is_away else self.users.get(user),
        )


async def looked(groups: UnixGroups, *users: str) -> None:
    """Now, however short ago the last look was."""
    groups._looked_at = float("-inf")
    await groups.keep_up(["lab"], users)
    if groups._task is not None:
        await groups._task


def test_those_that_it_lists_and_users_whose_own_group_it_is_are_members() -> None:
    async def scenario() -> None:
        groups = UnixGroups(Ldap().directory)
        await groups.keep_up(["lab"], ["bob", "eve", "odd\0name"])
        assert groups.members("lab") == {"ann", "bob"}
        assert groups.members("other") == frozenset()

    asyncio.run(scenario())


def test_a_directory_that_is_away_takes_no_member_out() -> None:
    async def scenario() -> None:
        ldap = Ldap()
        groups = UnixGroups(ldap.directory)
        await looked(groups, "bob")
        before = groups.version
        ldap.is_away = True
        await looked(groups, "bob", "eve")
        assert groups.members("lab") == {"ann", "bob"}
        assert "last members count" in str(groups.problem("lab"))
        ldap.is_away = False
        ldap.groups["lab"] = UnixGroup(700, frozenset({"eve"}))
        ldap.users["bob"] = 100
        await looked(groups)
        assert groups.members("lab") == {"eve"}, "what it says counts"
        assert groups.problem("lab") is None
        assert groups.version > before

    asyncio.run(scenario())


def test_a_group_that_never_was_is_missing() -> None:
    async def scenario() -> None:
        groups = UnixGroups(Ldap(groups={}).directory)
        await groups.keep_up(["lab"], ["bob"])
        assert groups.problem("lab") == "there is no Unix group lab"
        await UnixGroups().keep_up([], ["bob"])  # nothing to look up

    asyncio.run(scenario())


def test_this_machine_is_asked_by_default() -> None:
    me = pwd.getpwuid(os.geteuid())
    try:
        own = grp.getgrgid(me.pw_gid).gr_name
    except KeyError:
        pytest.skip("the group of this account has no name")

    async def scenario() -> None:
        groups = UnixGroups()
        await groups.keep_up([own], [me.pw_name, "nobody-has-this-name"])
        assert me.pw_name in groups.members(own)

    asyncio.run(scenario())
