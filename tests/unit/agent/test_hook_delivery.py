"""The calls of a hook: what becomes of those that wait when it is taken out of the cluster file."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.rig.stores import store_at
from ugro.features.hooks.config import NodeLostHook
from ugro.features.hooks.model import DeliveryState, HookName
from ugro.features.hooks.service import Courier, _shown
from ugro.features.hooks.store import NewDelivery


def test_calls_of_a_hook_that_is_gone_are_given_up_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        courier = Courier(HookName.NODE_LOST, store.hooks, lambda: None, lambda: tmp_path)
        await store.hooks.add([NewDelivery(str(number), HookName.NODE_LOST, "{}") for number in range(3)])
        calling = asyncio.create_task(courier.run())
        try:
            deadline = time.monotonic() + 60
            while (waiting := await store.hooks.waiting()) and time.monotonic() < deadline:
                await asyncio.wait([calling], timeout=0.01)
            assert not waiting
            assert {one.state for one in await store.hooks.newest(9)} == {DeliveryState.FAILED}
        finally:
            calling.cancel()
            await asyncio.wait([calling])
            await store.close()

    asyncio.run(work())


@pytest.mark.parametrize("rest", ["/T0/secret", "?token=secret", "#secret", ""])
def test_of_the_address_of_a_hook_only_the_host_is_shown(rest: str) -> None:
    assert _shown(NodeLostHook(call=f"https://example.org:8443{rest}")) == "https://example.org:8443/…"


def test_of_the_command_of_a_hook_no_secret_is_shown() -> None:
    assert _shown(NodeLostHook(call=("./page", "--token", "abc", "--node", "gpu1"))) == "./page --token *** --node gpu1"
