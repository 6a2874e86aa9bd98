"""Links to nodes in the accounts of users, where the configuration says ``account``: opened for those who have jobs.

A login is kept while a job holds devices through it, a job of its user waits for its node, or it may have something of
a job; later it is closed. So is one that is refused: it would be tried for ever. Every login that a job was started
through is recorded, and an agent that starts asks those that were not found empty since. The same when a node is new,
or back: a run may have been left there.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from ugro.kernel.access.model import USER, account_of, login_name, node_of
from ugro.kernel.config.section import is_user
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Job, Placement
from ugro.kernel.jobs.scheduling.fit import LoginView, Seeker, objection
from ugro.kernel.jobs.scheduling.model import NoLogin
from ugro.kernel.links.node import Node
from ugro.kernel.support.errors import Unsatisfiable

_IDLE_S = 600.0
_LOOK_S = 1.0  # how often idle ones are looked for
_MOST_ACCOUNTS = 1 << 16  # of users on nodes, kept in memory: the engine asks for all of them many times a second


class _Account(NamedTuple):
    """Of a user on a node."""

    name: str
    login: str
    is_valid: bool  # whether ssh can be given it: users have names that their systems allow


class Logins:
    def __init__(self, watch: RunTracker, idle_s: float = _IDLE_S) -> None:
        self._inventory = watch.inventory
        self._watch = watch
        self._idle_s = idle_s
        self._known = self._inventory.known_logins
        self._unheard: set[str] = set()  # those of them that have to be asked
        self._needed_at: dict[str, float] = {}
        self._refused: dict[str, NoLogin] = {}  # those that were refused for good while their nodes were awake
        self._nodes: dict[str, Node] = {}  # at the last look
        self._looked_at = float("-inf")
        self._clear: Callable[[str], Awaitable[None]] = _forget

    def remember(self, recorded: Mapping[str, bool], clear: Callable[[str], Awaitable[None]]) -> None:
        """Those of agents before this one, and whether they are clear: the others are asked what runs there.

        ``clear`` records that one has nothing.
        """
        self._known.used.update(recorded)
        self._known.unclear.update(name for name, is_clear in recorded.items() if not is_clear)
        self._clear = clear

    def placed(self, placement: Placement) -> None:
        self._note_used({name for name in placement.nodes if account_of(name)})

    def _note_used(self, names: set[str]) -> None:
        self._known.used.update(names)
        self._known.unclear.update(names)

    @property
    def are_possible(self) -> bool:
        """Most clusters have none, and thousands of jobs that need not be looked at for them."""
        return bool(self._known.used or self._inventory.logins or any(node.spec.account for node in self._inventory))

    def keep_up(self, holding: Iterable[Job], waiting: Collection[Seeker]) -> list[str]:
        """Opens what is needed; returns what can be closed."""
        now = time.monotonic()
        held = {name for job in holding for name in (job.placement.nodes if job.placement else ()) if account_of(name)}
        self._note_used(held)  # also what was taken over from a node, and not placed by this agent
        self._ask_where_nodes_are_new()
        for name in self._needed(held, waiting):
            if self._inventory.open_login(name) is not None:
                self._needed_at[name] = now
        self._unheard = {name for name in self._unheard if self._is_awaited(name)}
        if now - self._looked_at < min(_LOOK_S, self._idle_s):
            return []
        self._looked_at = now
        self._rest_with_nodes()
        idle = [login.spec.name for login in self._inventory.logins if self._is_idle(login, now)]
        return [name for name in idle if name not in self._known.unclear or not self._may_say_more(name)]

    def _may_say_more(self, name: str) -> bool:
        return self._watch.has_runs(name) and not self._watch.is_refused(name)

    def _is_idle(self, login: Node, now: float) -> bool:
        name = login.spec.name
        if _is_at_work(login):
            self._needed_at[name] = now
            return False
        return now - self._needed_at.setdefault(name, now) > self._idle_s

    async def close(self, name: str) -> None:
        """It has nothing: it is not asked again before a job starts there.

        One that nobody is let in by may have something: it is asked when its node is new, or the agent starts.
        """
        if name in self._known.unclear and not self._watch.is_refused(name):
            self._known.unclear.discard(name)
            await self._clear(name)
            if name in self._known.unclear:  # a job was placed there meanwhile
                return
        self._needed_at.pop(name, None)
        await self._inventory.close_login(name)

    def _ask_where_nodes_are_new(self) -> None:
        """A node that was away, or was reached another way, may have runs that were given up here.

        A login that was found empty meanwhile may have been looked at elsewhere: in another folder, on another machine.
        """
        nodes = {node.spec.name: node for node in self._inventory}
        new = {name for name, node in nodes.items() if self._nodes.get(name) is not node}
        if self._nodes:  # not at the agent's start
            self._known.unclear.update(name for name in self._known.used if node_of(name) in new)
        self._unheard.update(name for name in self._known.unclear if node_of(name) in new)
        self._nodes = nodes

    def _rest_with_nodes(self) -> None:
        """Logins of a node that sleeps are dialled as rarely as the node, and at once when it is back."""
        for login in self._inventory.logins:
            node = self._nodes.get(node_of(login.spec.name))
            is_resting = node is not None and node.is_resting
            if login.is_resting and not is_resting:
                login.wake()
            login.is_resting = is_resting

    def name_for(self, node: Node, user: str) -> str:
        """The login through which a user's job is started on a node; or the node itself."""
        account = _account_of(node, user)
        return node.spec.name if account is None else account.login

    def opened_for(self, node: Node, user: str) -> str:
        """The same, and it is dialled; raises Unsatisfiable if there can be none."""
        account = _account_of(node, user)
        if account is None:
            return node.spec.name
        if not account.is_valid or self._inventory.open_login(account.login) is None:
            hint = "who runs the cluster can say which one: see account in docs/team.md"
            text = f"there is no account for {user}: {account.name!r:.80}"
            raise Unsatisfiable(text, subject=node.spec.name, hint=hint)
        return account.login

    def reached(self, user: str) -> list[str]:
        """Of each node that answers, the name through which a user's job reaches it: of the login if that is open."""
        nodes = [node for node in self._inventory if node.link is not None]
        logins = [self._inventory.opened_login(self.name_for(node, user)) for node in nodes]
        found = [login if login is not None and login.link is not None else None for login in logins]
        return [(login or node).spec.name for node, login in zip(nodes, found, strict=True)]

    def located(self, placement: Placement, user: str) -> tuple[str, ...]:
        """The names for the nodes of a placement, in its order."""
        found = ((name, self._inventory.find(name)) for name in placement.nodes)
        return tuple(self.name_for(node, user) if node is not None else name for name, node in found)

    def missing(self, node: Node, users: Iterable[str], is_asleep: bool) -> tuple[NoLogin, ...]:
        """Those of these users whose jobs cannot start on a node now; on one that sleeps, when it is awake."""
        if node.spec.account is None:
            return ()
        look = self._refusal if is_asleep else self._objection
        return tuple(found for user in sorted(set(users)) if (found := look(node, user)) is not None)

    def _refusal(self, node: Node, user: str) -> NoLogin | None:
        """The last known. It is not woken for somebody whom it refuses; for everybody else it is."""
        return self._refused.get(self.name_for(node, user))

    def _objection(self, node: Node, user: str) -> NoLogin | None:
        if (account := _account_of(node, user)) is None:
            return None
        found = objection(self._view(account, node, user))
        if found is not None and found.is_lasting:
            self._refused[account.login] = found
        elif found is None:
            self._refused.pop(account.login, None)
        return found

    def _view(self, account: _Account, node: Node, user: str) -> LoginView:
        login = self._inventory.opened_login(account.login) if account.is_valid else None
        if login is None or login.link is None:
            error = login.error if login is not None else None
            said = (error.message, error.cause) if error is not None else (None, None)
            return LoginView(user, account.name, account.is_valid, is_open=False, error=said[0], cause=said[1])
        # Only while both are open: after a reboot, one of them still knows the boot before.
        boots = {one.machine.boot_id for one in (node, login) if one.machine is not None and one.link is not None}
        has_reported = self._watch.moment(account.login) is not None and self._watch.silent_s(account.login) == 0
        return LoginView(
            user, account.name, is_open=True, is_other_machine=len(boots) > 1, has_reported=has_reported
        )

    def _needed(self, held: Iterable[str], waiting: Collection[Seeker]) -> Iterator[str]:
        yield from held
        yield from self._unheard
        awake = [node for node in self._inventory if node.machine is not None and not node.is_resting]
        personal = [node for node in awake if node.spec.account is not None]
        for node in personal:
            users = {one.user for one in waiting if one.may_use(node.spec.name, node.spec.labels)}
            accounts = (_account_of(node, user) for user in users)
            yield from (account.login for account in accounts if account is not None and account.is_valid)

    def _is_awaited(self, name: str) -> bool:
        login = self._inventory.opened_login(name)
        return login is not None and login.error is None and self._watch.moment(name) is None


def _is_at_work(login: Node) -> bool:
    """Somebody's files are on their way."""
    return login.link is not None and bool(login.link.work)


async def _forget(name: str) -> None:
    """Nothing is recorded."""


def _account_of(node: Node, user: str) -> _Account | None:
    """None: the user's jobs are started through the node itself."""
    spec = node.spec
    if spec.account is None or spec.transport != "ssh":
        return None
    account = _named(spec.account, user, spec.name)
    return None if node.machine is not None and node.machine.user == account.name else account


@lru_cache(_MOST_ACCOUNTS)
def _named(template: str, user: str, node: str) -> _Account:
    name = template.replace(USER, user)
    return _Account(name, login_name(name, node), is_user(name) and "@" not in name)
