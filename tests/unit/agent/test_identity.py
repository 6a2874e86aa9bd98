"""Roles, what each may do, and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ugro.features.recipes.service import path_of
from ugro.kernel.access.caller import (
    caller,
    disguised,
    enter,
    expect_visible,
    hides_values,
    shown,
    visible,
    without_values,
)
from ugro.kernel.access.model import Caller, Role, least
from ugro.kernel.access.operations import LONGEST_S
from ugro.kernel.access.service import MOST_LISTED, PREFIX, Tokens
from ugro.kernel.access.store import MOST_VALID
from ugro.kernel.files.results.job_folder import write_config
from ugro.kernel.jobs.model import Folder, Job, JobSpec, JobState
from ugro.kernel.operations.access_rules import PAGES, RULES, Access, check_owner, check_role
from ugro.kernel.operations.audit_rules import rule_for
from ugro.kernel.operations.request import Kind
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError

ANN = Caller("ann", Role.USER, "pid 1")
OPERATOR = Caller("olga", Role.OPERATOR, "pid 2")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECRET = Job(7, JobSpec("secret", ("x",), env=(("A", "hush"),), private=True), "bob", JobState.QUEUED, "", "")


def test_each_role_covers_those_before_it() -> None:
    order = [Role.VIEWER, Role.USER, Role.OPERATOR, Role.ADMIN]
    assert list(Role) == order
    for high, one in enumerate(order):
        assert [one.covers(other) for other in order] == [low <= high for low in range(4)]
        assert least(one, Role.VIEWER) is least(Role.VIEWER, one) is Role.VIEWER
        assert least(one, Role.ADMIN) is least(Role.ADMIN, one) is one


def test_a_route_without_a_rule_is_nobodys() -> None:
    with pytest.raises(NotAllowed, match="states no role"):
        check_role(Caller("root", Role.ADMIN, "", shares_account=True, is_alone=True), None)


@pytest.mark.parametrize("needed", Role)
@pytest.mark.parametrize("has", Role)
def test_a_weaker_role_is_refused(needed: Role, has: Role) -> None:
    who = replace(ANN, role=has)
    if has.covers(needed):
        check_role(who, Access(needed))
    else:
        with pytest.raises(NotAllowed, match=f"needs the role {needed}, and ann has the role {has}"):
            check_role(who, Access(needed))


def test_what_is_anothers_is_changed_by_operators_only() -> None:
    own = Access(Role.USER, Kind.JOB, is_own=True)
    check_owner(ANN, own, "ann", "job 1")
    check_owner(OPERATOR, own, "ann", "job 1")
    check_owner(ANN, Access(Role.VIEWER, Kind.JOB), "bob", "job 1")
    with pytest.raises(NotAllowed, match="job 1 is bob's"):
        check_owner(ANN, own, "bob", "job 1")


def test_a_refusal_says_whose_role_does_not_suffice() -> None:
    weak = Caller("ann", Role.VIEWER, "")
    with pytest.raises(NotAllowed, match="and ann has the role viewer") as of_a_person:
        check_role(weak, Access(Role.USER))
    assert "team.roles" in str(of_a_person.value.hint)
    with pytest.raises(NotAllowed, match="and this token has the role viewer") as of_a_token:
        check_role(replace(weak, by_token=True), Access(Role.USER))
    assert of_a_token.value.hint == "make one: ugro token create --role user"


def test_files_and_ways_in_are_not_for_everybody() -> None:
    admin = Caller("ann", Role.ADMIN, "")
    with pytest.raises(NotAllowed, match="files of its machine"):
        check_role(admin, Access(Role.ADMIN, needs_files=True))
    with pytest.raises(NotAllowed, match="a token cannot"):
        check_role(replace(admin, by_token=True), Access(Role.VIEWER, is_for_people=True))


def test_what_changes_something_needs_more_than_a_viewer() -> None:
    """But for one's own ways in, which are bounded by one's own role."""
    weak = [route for route, rule in {**RULES, **PAGES}.items() if rule.role in (None, Role.VIEWER)]
    changing = [route for route in weak if not route.startswith("GET ")]
    assert sorted(changing) == [
        "DELETE /v1/tokens/{word}", "POST /login", "POST /logout", "POST /v1/dashboard",
        "POST /v1/jobs/{word}/results/content",  # reads: it names too many files for a path
        "POST /v1/tokens",
    ]  # fmt: skip


def test_what_changes_something_has_a_name_in_the_audit_log() -> None:
    for route in RULES:
        method, _, path = route.partition(" ")
        if (found := rule_for(method, path.replace("{", "").replace("}", "").replace(":path", ""))) is not None:
            assert found[0].action != f"{method} {path}", route


def test_of_a_hidden_job_only_that_it_is_there_is_seen() -> None:
    def scenario() -> None:
        enter(ANN)
        assert visible([SECRET]) == []
        [hidden] = disguised([SECRET])
        assert (hidden.id, hidden.spec.name, hidden.spec.argv, hidden.spec.env) == (7, "private", ("private",), ())
        with pytest.raises(NotFound, match="there is no job 7"):
            expect_visible(SECRET, "7")
        enter(OPERATOR)
        assert visible([SECRET]) == [SECRET]
        assert dict(shown(SECRET).spec.env) == {"A": "***"}
        enter(Caller("bob", Role.VIEWER, ""))
        assert shown(SECRET) is SECRET

    in_own_context(scenario)
    assert caller() is None, "the agent itself"
    assert visible([SECRET]) == [shown(SECRET)] == [SECRET]
    assert "hush" not in repr(without_values(SECRET))


def test_who_has_another_account_does_not_learn_that_a_file_exists(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def scenario() -> None:
        enter(ANN)
        assert path_of("model", tmp_path) is None, "one of the hub"
        assert path_of("./model", tmp_path) == model, "refused, whether it exists or not"
        enter(replace(ANN, shares_account=True))
        assert (path_of("model", tmp_path), path_of("none", tmp_path)) == (model, None)

    in_own_context(scenario)


def test_whole_hashes_of_code_and_folders_are_for_the_jobs_user_alone(tmp_path: Path) -> None:
    code, tree = "c0de" * 16, "f01d" * 16
    spec = JobSpec("train", ("x",), snapshot=code, folders=(Folder("data", "/x", tree),))
    job = Job(8, spec, "bob", JobState.QUEUED, "", "")

    def scenario() -> None:
        for who in (ANN, OPERATOR):
            enter(who)
            seen = shown(job).spec
            assert (seen.snapshot, [one.tree for one in seen.folders]) == (code[:12], [tree[:12]])
            assert (seen.folders[0].source, hides_values(job)) == ("/x", False)
        for who in (Caller("bob", Role.VIEWER, ""), Caller("root", Role.ADMIN, "", is_alone=True)):
            enter(who)
            assert shown(job) is job

    in_own_context(scenario)
    assert shown(job) is job, "the agent itself"
    write_config(tmp_path, job, None)
    written = (tmp_path / "config.json").read_text()
    assert code[:12] in written
    assert code not in written, "the file is among the results that others see"
    assert tree not in written


def in_own_context(scenario: Callable[[], None]) -> None:
    async def run() -> None:
        scenario()

    asyncio.run(run())


# --- tokens ------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def with_tokens(folder: Path, scenario: Callable[[Tokens, Store, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        store, clock = Store(folder / "state.db"), Clock()
        await store.open()
        try:
            await scenario(Tokens(store.tokens, clock), store, clock)
        finally:
            await store.close()

    asyncio.run(run())


def test_a_token_is_valid_until_it_expires_or_is_revoked_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        made, secret = await tokens.create(ANN, Role.VIEWER, 60, "ci")
        assert secret.startswith(PREFIX)
        assert len(secret) > 40
        again = Tokens(store.tokens, clock)
        await again.load()
        assert [again.has_valid] == [True]
        found = again.check(secret, "10.0.0.1")
        assert found is not None
        assert (found.id, found.user, found.role, found.last_used_by) == (made.id, "ann", Role.VIEWER, "10.0.0.1")
        for wrong in ("", PREFIX, secret[:-1], secret + "x", secret.upper(), "\udcff"):
            assert again.check(wrong, "10.0.0.1") is None
        clock.now = NOW + timedelta(seconds=60)
        assert again.check(secret, "10.0.0.1") is None
        assert [again.has_valid] == [False]
        clock.now = NOW
        await again.revoke(ANN, "ci")
        assert again.check(secret, "10.0.0.1") is None
        clock.now = NOW + timedelta(days=40)
        await again.load()
        assert again.listed(ANN) == [], "what ended long ago is forgotten"

    with_tokens(tmp_path, scenario)


def test_a_token_has_no_more_than_its_makers_role_and_a_name_of_its_own(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        refused: tuple[tuple[Role, float, str, type[UgroError]], ...] = (
            (Role.OPERATOR, 60, "x", NotAllowed),
            (Role.USER, 0, "x", UsageError),
            (Role.USER, LONGEST_S + 1, "x", UsageError),
            (Role.USER, 60, "two words", UsageError),
            (Role.USER, 60, "12", UsageError),
        )
        for role, lifetime_s, name, kind in refused:
            with pytest.raises(kind):
                await tokens.create(ANN, role, lifetime_s, name)
        await tokens.create(ANN, Role.USER, 60, "ci")
        with pytest.raises(NotAllowed, match="you have a token 'ci' already"):
            await tokens.create(ANN, Role.USER, 60, "ci")
        await tokens.create(OPERATOR, Role.USER, 60, "ci")
        assert len({one.name for one in [(await tokens.create(ANN, Role.USER, 60, ""))[0] for _ in range(3)]}) == 3

    with_tokens(tmp_path, scenario)


def test_nobody_keeps_others_from_having_tokens(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        for number in range(MOST_VALID):
            await tokens.create(ANN, Role.VIEWER, LONGEST_S, f"t{number}")
        with pytest.raises(NotAllowed, match=f"you have {MOST_VALID} valid tokens, which is the most"):
            await tokens.create(ANN, Role.VIEWER, LONGEST_S, "more")
        await tokens.create(OPERATOR, Role.VIEWER, 60, "ci")

    with_tokens(tmp_path, scenario)


def test_tokens_that_are_made_and_revoked_all_day_do_not_pile_up(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        await tokens.create(OPERATOR, Role.VIEWER, LONGEST_S, "old")
        await tokens.revoke(OPERATOR, "old")
        _, secret = await tokens.create(ANN, Role.VIEWER, LONGEST_S, "first")
        for number in range(MOST_LISTED + 5):
            await tokens.create(ANN, Role.VIEWER, LONGEST_S, f"t{number}")
            await tokens.revoke(ANN, f"t{number}")
        await tokens.create(ANN, Role.VIEWER, 60, "last")
        kept = [one.name for _, one in await store.tokens.all()]
        assert len(kept) == MOST_LISTED + 3
        assert kept[:3] == ["old", "first", "t5"], "those of others, and valid ones, stay"
        assert tokens.check(secret, "") is not None
        clock.now += timedelta(days=31)
        await tokens.create(OPERATOR, Role.VIEWER, 60, "new")
        assert [one.name for _, one in await store.tokens.all()] == ["first", "new"], "what ended a month ago went"

    with_tokens(tmp_path, scenario)


def test_tokens_of_others_are_an_admins_matter(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        _, secret = await tokens.create(ANN, Role.USER, 60, "ci")
        assert tokens.listed(OPERATOR) == []
        with pytest.raises(NotFound):
            await tokens.revoke(OPERATOR, "ci")
        admin = Caller("root", Role.ADMIN, "")
        assert [one.name for one in tokens.listed(admin)] == ["ci"]
        await tokens.create(admin, Role.ADMIN, 60, "ci")
        assert (await tokens.revoke(admin, "ci")).user == "root", "one's own first"
        assert (await tokens.revoke(admin, "ci")).user == "ann"
        assert tokens.check(secret, "") is None

    with_tokens(tmp_path, scenario)


def test_the_use_of_a_token_is_noted_once_a_minute(tmp_path: Path) -> None:
    async def scenario(tokens: Tokens, store: Store, clock: Clock) -> None:
        _, secret = await tokens.create(ANN, Role.USER, 3600, "ci")

        async def changes(address: str) -> int:
            before = store.changes
            assert tokens.check(secret, address)
            await tokens.flush()
            return store.changes - before

        assert [await changes("a") for _ in range(3)] == [1, 0, 0]
        clock.now += timedelta(seconds=61)
        assert [await changes("a") for _ in range(2)] == [1, 0]
        assert await changes("b") == 1
        [(_, kept)] = await store.tokens.all()
        assert (kept.last_used_at, kept.last_used_by) == ("2026-01-01T00:01:01.000+00:00", "b")

    with_tokens(tmp_path, scenario)
