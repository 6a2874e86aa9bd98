"""Delivers the calls of one hook in order: each at least once, with the same id and content, however often it is tried.

A try that an agent did not survive is made again, so a receiver may see an id twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path

from ugro.agent.support import command, signed_post
from ugro.agent.support.change_signal import ChangeSignal
from ugro.agent.support.crashpoint import point
from ugro.config.hooks import Hook
from ugro.core.errors import TimedOut, UgroError
from ugro.core.hook import Delivery, DeliveryState, HookName
from ugro.core.support import clock
from ugro.core.support.moment import elapsed_s
from ugro.policy.hooks.triggers import HOUR_S
from ugro.policy.lifecycle.backoff import delay_s
from ugro.store.hooks import HookStore
from ugro.telemetry.channels import SendFailure

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_GIVEN_UP_S = 24 * HOUR_S


class Courier:
    def __init__(self, name: HookName, store: HookStore, hook: Callable[[], Hook | None], folder: Callable[[], Path]):
        """``hook`` is called for each try, so that an edit of the configuration takes effect at once."""
        self.name = name
        self._store = store
        self._hook = hook
        self._folder = folder
        self.added = ChangeSignal()
        self._sent_s: list[float] = []

    async def run(self) -> None:
        while True:
            seen = self.added.count
            try:
                delivery = await self._store.next(self.name)
            except UgroError as error:
                log.error("cannot read the calls of %s: %s", self.name, error)
                delivery = None
            if delivery is None:
                await self.added.wait(seen, _LOOK_S)
            else:
                await self._deliver(delivery)

    async def try_once(self, delivery: Delivery) -> None:
        """Raises SendFailure."""
        hook = self._hook()
        if hook is None:
            raise SendFailure(f"hook {self.name}: it is no longer in the cluster file", may_pass=False)
        if isinstance(hook.call, str):
            await self._post(hook, hook.call, delivery)
        else:
            await self._run(hook, hook.call, delivery)

    async def _deliver(self, delivery: Delivery) -> None:
        """Returns when it is over, one way or the other."""
        try:
            await self._within_budget()
            error = await self._attempt(delivery)
            if error is None:
                await self._store.tried(delivery, DeliveryState.DELIVERED)
                return
            age_s = elapsed_s(await self._store.age(delivery), clock.now())
            if not error.may_pass or age_s > _GIVEN_UP_S:
                log.error("%s; given up: %s", error.message, delivery.id)
                await self._store.tried(delivery, DeliveryState.FAILED, error.message)
                return
            log.warning("%s; it is tried again", error.message)
            await self._store.tried(delivery, DeliveryState.WAITING, error.message)
        except UgroError as trouble:
            log.error("cannot note a call of %s: %s", self.name, trouble)
        pause_s = delay_s(delivery.tries + 1, random.random(), base_s=_FIRST_PAUSE_S, cap_s=_LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)

    async def _attempt(self, delivery: Delivery) -> SendFailure | None:
        point("hook.sending")
        try:
            await self.try_once(delivery)
        except SendFailure as error:
            return error
        point("hook.sent")
        return None

    async def _within_budget(self) -> None:
        """Tries count, too: one that always fails is not made more often either."""
        while (hook := self._hook()) is not None:
            now_s = clock.boot_clock_s()
            self._sent_s = [at_s for at_s in self._sent_s if now_s - at_s < HOUR_S]
            if len(self._sent_s) < hook.most_per_hour:
                self._sent_s.append(now_s)
                return
            # The budget may be raised meanwhile, or the hook be taken out of the cluster file.
            await asyncio.sleep(min(_LOOK_S, self._sent_s[0] + HOUR_S - now_s))

    async def _post(self, hook: Hook, address: str, delivery: Delivery) -> None:
        what = f"hook {self.name}"
        key = signed_post.key_of(what, hook.secret_file, hook.secret_env)
        names = {"hook": self.name.value, "delivery": delivery.id}
        await signed_post.send(what, address, delivery.body.encode(), key, hook.timeout, **names)

    async def _run(self, hook: Hook, argv: tuple[str, ...], delivery: Delivery) -> None:
        env = {"UGRO_HOOK": self.name.value, "UGRO_DELIVERY": delivery.id}
        content = delivery.body.encode()
        try:
            ended = await command.run(argv, env=env, cwd=self._folder(), timeout_s=hook.timeout, content=content)
        except (TimedOut, command.NotStarted) as error:
            raise SendFailure(f"hook {self.name}: {error.message}") from error
        for line in ended.said.splitlines()[-20:]:
            log.info("hook %s: %s", self.name, line[:500])
        if ended.complaint is not None:
            raise SendFailure(f"hook {self.name}: {ended.complaint}")
