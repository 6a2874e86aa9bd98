"""The sections ``quotas`` and ``fair_share`` of the cluster file: what users may have, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ugro.features.discovery.config import OneMap
from ugro.features.quotas.model import NO_LIMITS, Limits, Pool, Quotas
from ugro.features.quotas.rules import FairShare
from ugro.kernel.config.kinds import DAY_S, BadValueError, Duration, Kind, ListOf, MapOf, Number, Text, Whole
from ugro.kernel.config.section import LABEL, USER, Nested, Section, is_user, key, section
from ugro.kernel.jobs.config.schema import PRIORITIES

_MOST_NAMES = 10_000
_LONGEST_S = 365 * DAY_S
_HOURS = Number()
_UNIX_GROUP = Text("the name of a Unix group", is_user)


class _Weight(Kind):
    expected = "a number over 0 and up to 1000"
    metavar = "NUMBER"

    def parse(self, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < float(str(value)) <= 1000:
            raise self.refuse(value)
        return float(str(value))


@section
class LimitKeys(Section):
    """Limits. Null means that there is none."""

    noun = "a quota"

    gpus: int | None = key(None, Whole(0, 100_000), "The most GPUs that running jobs hold at once.", example=4)
    cpus: int | None = key(
        None, Whole(0, 1_000_000), "The most cores that running jobs without GPUs hold at once.", example=32
    )
    gpu_hours_per_day: float | None = key(
        None,
        _HOURS,
        "The most GPU-hours in any 24 hours. A running job counts with all that it may still use: up to its time "
        "limit, or for the whole time.",
        example=48,
    )
    gpu_hours_per_week: float | None = key(None, _HOURS, "The same in any 7 days.", example=200)
    queued_jobs: int | None = key(
        None, Whole(0, 10_000_000), "The most jobs that wait. Further ones are refused.", example=100
    )
    max_priority: int | None = key(
        None, Whole(0, 100, names=PRIORITIES), "The highest priority that a job may have.", example="normal"
    )
    max_time_limit: float | None = key(
        None,
        Duration(_LONGEST_S),
        "The longest time limit that a job may have. A job without one is refused.",
        example="1d",
    )

    def limits(self, default: Limits | None = None) -> Limits:
        """``default``: used for what these keys do not say. A key that is null lifts it."""
        names = [name for name in LimitKeys.known_keys() if default is None or name in self.given_keys]
        own = {name: getattr(self, name) for name in names}
        rest = {name: getattr(default, name) for name in LimitKeys.known_keys() if name not in own}
        return Limits(**own, **rest)


@section
class GroupKeys(LimitKeys):
    """Limits that the members of a group have together, besides their own."""

    noun = "a group"

    members: tuple[str, ...] = key(
        (), ListOf("a list of users such as [ann, bob]", USER), "Who belongs to it.", example=["ann", "bob"]
    )
    unix_group: str | None = key(
        None, _UNIX_GROUP, "A Unix group of this machine; its members belong to it, too.", example="students"
    )

    def check(self) -> None:
        if not self.members and self.unix_group is None:
            raise BadValueError("it has no members", hint="give members or unix_group")


class _Named(MapOf):
    def written(self, value: Mapping[str, Section]) -> object:
        return {name: keys.written() for name, keys in value.items()}


_USERS = _Named("a map of users to their quotas", USER, Nested(LimitKeys), most=_MOST_NAMES)
_GROUPS = _Named("a map of names to groups", LABEL, Nested(GroupKeys), most=_MOST_NAMES)


@section
class QuotaSection(Section):
    """What users and groups may have at most. A job above a quota waits. See docs/quotas.md."""

    noun = "quotas"

    default: LimitKeys | None = key(
        None,
        OneMap(LimitKeys, "a map of limits such as {gpus: 4}"),
        "What each user may have, unless `users` says otherwise.",
        example={"gpus": 4},
    )
    users: dict[str, LimitKeys] = key(
        {},
        _USERS,
        "What single users may have. Keys that are not given are those of `default`; null lifts a limit.",
        example={"ann": {"gpus": 8}},
    )
    groups: dict[str, GroupKeys] = key(
        {},
        _GROUPS,
        "What the members of a group may have together. Their own limits hold, too.",
        example={"students": {"members": ["bob", "eve"], "gpus": 6}},
    )

    def made_with(self, members_of: Callable[[str], frozenset[str]]) -> Quotas:
        """``members_of``: of a Unix group."""
        default = self.default.limits() if self.default is not None else NO_LIMITS
        users = {name: keys.limits(default) for name, keys in self.users.items()}
        groups = tuple(Pool(name, one.limits(), _members(one, members_of), True) for name, one in self.groups.items())
        return Quotas(default, users, groups)

    @property
    def unix_groups(self) -> frozenset[str]:
        return frozenset(one.unix_group for one in self.groups.values() if one.unix_group is not None)


def _members(group: GroupKeys, members_of: Callable[[str], frozenset[str]]) -> frozenset[str]:
    return frozenset(group.members) | (members_of(group.unix_group) if group.unix_group else frozenset())


@section
class FairShareSection(Section):
    """Whose jobs come first among those of one priority: those of the user who has used least lately."""

    noun = "fair_share"

    half_life: float = key(
        7 * DAY_S, Duration(_LONGEST_S), "What was used this long ago counts half as much as what is used now."
    )
    weights: dict[str, Any] = key(
        {},
        MapOf("a map of users to numbers", USER, _Weight(), most=_MOST_NAMES),
        "How much a user may use relative to others, who have 1.",
        example={"ann": 2},
    )

    def made_share(self) -> FairShare:
        return FairShare(self.half_life, dict(self.weights))
