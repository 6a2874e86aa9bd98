"""Tokens, and which jobs a user may see, on both databases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.stores import in_store
from ugro.kernel.access.model import ApiToken, Role
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed, NotFound

_TOKEN = ApiToken(
    id=0,
    name="ci",
    user="ann",
    role=Role.VIEWER,
    created_at="2026-01-01T00:00:00Z",
    expires_at="2026-02-01T00:00:00Z",
)


def test_a_token_is_kept_by_its_hash_and_its_name_is_free_again_once_it_is_revoked(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        first = await store.tokens.add(_TOKEN, "hash 1")
        with pytest.raises(NotAllowed, match="you have a token 'ci' already"):
            await store.tokens.add(_TOKEN, "hash 2")
        await store.tokens.used(first.id, "2026-01-02T00:00:00Z", "10.0.0.9")
        await store.tokens.revoke(first.id, "2026-01-03T00:00:00Z")
        second = await store.tokens.add(replace(_TOKEN, created_at="2026-01-04T00:00:00Z"), "hash 2")
        [(digest, kept), (_, other)] = await store.tokens.all()
        assert (digest, kept.last_used_by, kept.revoked_at) == ("hash 1", "10.0.0.9", "2026-01-03T00:00:00Z")
        assert other == second
        await store.tokens.remove([first.id])
        assert [token.id for _, token in await store.tokens.all()] == [second.id]

    in_store(tmp_path, work)


def test_a_name_that_no_visible_job_has_is_not_found(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        assert await store.visibility.hidden_from("ann") == frozenset()
        for word, without in (("last", ()), ("train", ()), ("train", (1, 2))):
            with pytest.raises(NotFound):
                await store.visibility.find(word, "ann", without)

    in_store(tmp_path, work)
