"""The quotas in one pass of the scheduler: what each user may still take. Taking only ever leaves less."""

from __future__ import annotations

from collections.abc import Iterable

from ugro.core.quota import Pool
from ugro.policy.quotas.accounts import Accounts
from ugro.policy.quotas.pool import Ask, Caps, Earmark, Over, PoolAccount, Taken

_NEVER_KNOWN = float("inf")


class QuotaBook:
    def __init__(self, accounts: Accounts, taken: Iterable[Taken], now: float) -> None:
        self._accounts = accounts
        self._now = now
        self._pools: dict[str, PoolAccount] = {}
        self._of: dict[str, tuple[PoolAccount, ...]] = {}
        self._taken: dict[str, list[Taken]] = {}
        for one in sorted(taken):
            self._taken.setdefault(one.user, []).append(one)

    def caps(self, user: str, seconds: float | None) -> Caps:
        found = [account.caps(seconds) for account in self._accounts_of(user)]
        return Caps(min(one.gpus for one in found), min(one.cpus for one in found))

    def over(self, user: str, ask: Ask) -> Over | None:
        """The limit that it must wait for longest, if it would exceed any."""
        found = [one for account in self._accounts_of(user) for one in account.over(ask)]
        return max(found, key=_severity, default=None)

    def take(self, taken: Taken) -> None:
        """A job starts in this pass."""
        for account in self._accounts_of(taken.user):
            account.take(taken)
        self._taken.setdefault(taken.user, []).append(taken)

    def earmark(self, user: str, mark: Earmark, only: Pool | None = None) -> None:
        """Leaves room for a job; those behind it in the queue do not count on it. ``only``: in this pool alone."""
        for account in self._accounts_of(user):
            if only is None or account.pool is only:
                account.earmark(mark)

    def _accounts_of(self, user: str) -> tuple[PoolAccount, ...]:
        found = self._of.get(user)
        if found is None:
            pools = self._accounts.quotas.pools_of(user)
            found = self._of[user] = tuple(self._account(pool) for pool in pools)
        return found

    def _account(self, pool: Pool) -> PoolAccount:
        known = self._pools.get(str(pool))
        if known is None:
            past = (hour for member in pool.members for hour in self._accounts.hours.get(member, ()))
            known = self._pools[str(pool)] = PoolAccount(pool, past, self._now)
            for member in sorted(pool.members):
                for one in self._taken.get(member, ()):
                    known.take(one)
        return known


def _severity(over: Over) -> tuple[bool, float]:
    return (over.is_never, _NEVER_KNOWN if over.until is None else over.until)
