"""The runs on one node, asked over its link: start, look, follow, stop, remove. Typed; every call can be made again."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ugro.kernel.jobs.records import NodePlan
from ugro.kernel.links.node import NodeCalls
from ugro.kernel.support.errors import RemoteFailure, UgroError, UsageError
from ugro.node import wire
from ugro.node.files import listing
from ugro.node.runs import api
from ugro.node.runs import logs as inline_logs
from ugro.node.runs.notices import shown
from ugro.node.runs.rundir import EXIT_BYTES

# --- packing starts into messages -------------------------------------------------------------------------------------
# Runs are started in as few messages as they fit into.


_MOST_BYTES = wire.MAX_PAYLOAD // 2
_MOST_OF_ONE = wire.MAX_PAYLOAD - (32 << 10)  # with what every call has besides


def packed(runs: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]] | UgroError]:
    """As many in one message as fit into it; in its place, what fits into none."""
    if len(json.dumps(runs)) <= _MOST_BYTES:
        yield runs
        return
    part: list[dict[str, Any]] = []
    size = 0
    for run in runs:
        length = len(json.dumps(run))
        if part and size + length > _MOST_BYTES:
            yield part
            part, size = [], 0
        if length > _MOST_OF_ONE:
            yield UsageError(f"job {run['job']} is too large to send: {length} bytes (limit {_MOST_OF_ONE})")
            continue
        part.append(run)
        size += length
    if part:
        yield part


# --- the runs on one node ---------------------------------------------------------------------------------------------


T = TypeVar("T")

_START_S = 120.0
_PREPARE_S = 30.0
_MOST_PAGES = 20  # of tickets
_MOST_MARK = 4096
# What a node says is bounded: it may be wrong, or lie.
_MOST_RUNS = 1024  # in one message; the node sends far fewer
_MOST_RANKS = 4096
_MOST_NAME = 120
_MOST_NOTICES = 8
_MOST_REASON = 2000
_MOST_ATTEMPT = 10**9
_MOST_CODE = 2**31
_MOST_UNIX_S = 2**40
_MOST_BYTES_OF_MEMORY = 2**60


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    code: int | None = None
    signal: int | None = None
    ended_at: float | None = None
    is_oom: bool = False
    reached_bytes: int | None = None  # the memory limit of its run, if that was reached
    was_lost: bool = False  # it failed by itself, and the run went on
    starts: int = 1


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``dead``: the supervisor is gone without an exit record; the ranks may live on until they are stopped."""

    job: str
    attempt: int
    status: str  # starting, running, exited, dead; or absent: stopped where it had never come to be
    is_claimed: bool = False
    outcome: str | None = None
    reason: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    started_ranks: tuple[int, ...] = ()
    failed_rank: int | None = None
    is_programs_fault: bool = False  # it could not be started because of what it is, not because of where
    is_disk_full: bool = False  # when its first rank failed, or could not be started, nothing more could be written
    tail: tuple[str, ...] = ()
    was_rebooted: bool = False
    # By rank, of one that has ended: whole, where they are so small that they came with its exit.
    logs: tuple[tuple[int, bytes], ...] | None = None
    may_have_left: bool = False  # it is over, and a process that hides itself may still run
    has_outputs: bool = False  # of one that has ended: it wrote something to be kept
    is_metered: bool = False  # the energy of its devices is measured
    lost: tuple[RankRecord, ...] = ()  # of one that runs: its ranks that have failed, while others go on
    members: tuple[int, ...] = ()  # the ranks that train together, as its ranks say; empty: they do not say
    group: int = -1  # the number of that group: the newest one holds
    changes: int = 0  # while it runs
    notices: tuple[str, ...] = ()  # what is to be known of it besides how it ended

    @property
    def has_ended(self) -> bool:
        return self.status == "exited"

    @property
    def known_ranks(self) -> tuple[int, ...]:
        """Also of a run whose supervisor died without an exit record; none when it died before it could say which."""
        return tuple(sorted({rank.rank for rank in self.ranks} | set(self.started_ranks)))

    @property
    def progress(self) -> int:
        """Only ever grows: of two words about a run, the one that is further is the newer one."""
        if self.status == "dead":
            return 3 if self.is_claimed else 0
        return {"absent": 0, "starting": 1, "running": 2, "exited": 4}[self.status]

    @property
    def name(self) -> str:
        return f"{self.job}.{self.attempt}"

    def of_ranks(self, placed: range) -> RunStatus:
        """Without what it says of ranks that were not placed there; itself if it says nothing of others."""
        logs = self.logs
        named = {rank.rank for rank in (*self.ranks, *self.lost)}
        named = named.union(self.started_ranks, (rank for rank, _ in logs or ()))
        if all(rank in placed for rank in named) and (self.failed_rank is None or self.failed_rank in placed):
            return self
        return replace(
            self,
            ranks=tuple(rank for rank in self.ranks if rank.rank in placed),
            started_ranks=tuple(rank for rank in self.started_ranks if rank in placed),
            lost=tuple(rank for rank in self.lost if rank.rank in placed),
            failed_rank=self.failed_rank if self.failed_rank in placed else None,
            logs=None if logs is None else tuple(one for one in logs if one[0] in placed),
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant on a node's own clock, as the node reported it; given back, it says how fresh our request is."""

    boot_id: str
    clock_s: float

    def params(self) -> dict[str, Any]:
        return {"boot_id": self.boot_id, "clock_s": self.clock_s}

    def later(self, seconds: float) -> Moment:
        return replace(self, clock_s=self.clock_s + seconds)


@dataclass(frozen=True, slots=True)
class News:
    """What a node says of our runs: all of them when ``is_first``, later those that changed."""

    now: Moment
    runs: tuple[RunStatus, ...] = ()
    gone: tuple[str, ...] = ()  # JOB.ATTEMPT
    is_first: bool = False
    has_more: bool = False
    invalid: tuple[str, ...] = ()  # why some of the runs cannot be read
    mark: str | None = None  # that we left there, with the end of the first list; not believed without its seal


@dataclass(frozen=True, slots=True)
class Held:
    """A run with the ticket that came with its start; not believed without its seal."""

    job: str
    attempt: int
    status: str
    ticket: str


@dataclass(frozen=True, slots=True)
class Tickets:
    held: tuple[Held, ...]
    started: dict[int, int]  # by job, the newest attempt that ever came to the node


@dataclass(slots=True)
class Piece:
    """Some bytes of a followed file, and where they stand in it."""

    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run to be started on a node; the same one each time it is asked for."""

    job: int
    attempt: int
    plan: NodePlan
    settings: dict[str, Any]
    # Of the node when it was decided.
    boot_id: str | None = None
    root: str | None = None
    as_of: Moment | None = None  # the instant that its lease counts from
    ticket: str | None = None  # by which we recognize it should our state not know it

    def params(self) -> dict[str, Any]:
        ranks = [{"rank": rank.rank, "argv": list(rank.argv), "env": dict(rank.env)} for rank in self.plan.ranks]
        spec = {"ranks": ranks, "cwd": self.plan.cwd, **self.settings}
        if (store := self.plan.store) is not None:
            spec["store"] = {"rank": store.rank, "argv": list(store.argv), "env": dict(store.env)}
        where = {"boot_id": self.boot_id, "root": self.root} if self.boot_id else {}
        as_of = {"as_of": self.as_of.params()} if self.as_of else {}
        ticket = {"ticket": self.ticket} if self.ticket is not None else {}
        return {"job": str(self.job), "attempt": self.attempt, "spec": spec, **where, **as_of, **ticket}


@dataclass(frozen=True, slots=True)
class Runs(NodeCalls):
    answer_s: float

    async def start(self, starts: Sequence[RunStart]) -> list[RunStatus | UgroError]:
        """Each one's status, or why it was refused."""
        results: list[RunStatus | UgroError] = []
        for runs in packed([start.params() for start in starts]):
            if isinstance(runs, UgroError):
                results.append(runs)
                continue
            answer = await self._call(api.start, _START_S, runs=runs)
            asked = [(str(run["job"]), int(run["attempt"])) for run in runs]
            results += [self._started(one, *run) for run, one in self._each(asked, answer)]
        return results

    def _started(self, result: dict[str, Any], job: str, attempt: int) -> RunStatus | UgroError:
        try:
            return self._failure(result) or self._status_of(job, attempt, result)
        except RemoteFailure as error:
            return error

    def _each(self, asked: Sequence[T], answer: dict[str, Any]) -> list[tuple[T, dict[str, Any]]]:
        """What was asked for, and what was answered about it."""
        results = answer.get("results")
        is_valid = isinstance(results, list) and all(isinstance(one, dict) for one in results)
        if not is_valid or len(answer["results"]) != len(asked):
            raise RemoteFailure("invalid answer about runs", subject=self.node.spec.name, cause="damaged")
        return list(zip(asked, answer["results"], strict=True))

    def _status_of(self, job: str, attempt: int, answer: dict[str, Any]) -> RunStatus:
        """Of the run that was asked about, and of no other."""
        run = answer.get("run")
        status = parse_status(run) if isinstance(run, dict) else None
        if status is None or (status.job, status.attempt) != (job, attempt):
            text = f"answered about another run than {job}.{attempt}"
            raise RemoteFailure(text, subject=self.node.spec.name, cause="damaged")
        return status

    async def remove(self, runs: Sequence[tuple[int, int]]) -> list[RemoteFailure | None]:
        """Job and attempt of each: None where it is gone now."""
        answer = await self._call(api.remove, _PREPARE_S, runs=[[str(job), attempt] for job, attempt in runs])
        return [self._failure(one) for _, one in self._each(runs, answer)]

    def _failure(self, result: dict[str, Any]) -> RemoteFailure | None:
        if (error := result.get("error")) is None:
            return None
        error = error if isinstance(error, dict) else {}
        message, cause = str(error.get("message"))[:_MOST_REASON], str(error.get("kind"))[:_MOST_NAME]
        return RemoteFailure(message, subject=self.node.spec.name, cause=cause)

    async def watch(self) -> AsyncGenerator[News]:
        """All our runs on the node, then every change of one, until the link is lost."""
        link = await self.node.ready(self.connect_s, patiently=True)
        stream = link.stream(*self.identity.asks(api.watch))
        try:
            async for _, payload in stream:
                yield parse_news(payload)
            await stream.result()
        finally:
            stream.cancel()

    async def renew(self, as_of: Moment) -> Moment:
        """Says that we were alive at that moment: the runs there with a lease go on."""
        answer = await self._call(api.renew, self.answer_s, as_of=as_of.params())
        try:
            return _moment(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteFailure(f"invalid clock: {error!r:.200}", subject=self.node.spec.name) from error

    def renew_unheard(self, as_of: Moment) -> bool:
        """The same from another thread, while the loop stands still; nobody hears the answer."""
        link = self.node.link
        return link is not None and link.speak(*self.identity.asks(api.renew, as_of=as_of.params()))

    async def mark(self) -> str | None:
        """What we left there, if anything; also from a node that refuses us."""
        return _text((await self._call(api.mark, self.answer_s)).get("mark"))

    async def put_mark(self, mark: str) -> None:
        await self._call(api.mark, self.answer_s, mark=mark)

    async def tickets(self, runs: Sequence[str] | None, jobs: Sequence[int] = (), *, admits: bool = False) -> Tickets:
        """Of these runs (JOB.ATTEMPT) or of all, and the newest attempt of jobs; also from a node that refuses us.

        ``admits``: the node obeys our generation from now on, and none before it.
        """
        held: list[Held] = []
        after, wanted = "", [str(job) for job in jobs]
        for _ in range(_MOST_PAGES):
            answer = await self._call(api.tickets, _PREPARE_S, runs=runs, jobs=wanted, after=after, admits=admits)
            try:
                held += [_held(one) for one in answer["runs"]]
                started = {int(job): int(attempt) for job, attempt in answer["started"].items()}
                after = str(answer.get("more") or "")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RemoteFailure(f"invalid tickets: {error!r:.200}", subject=self.node.spec.name) from error
            if not after:
                return Tickets(tuple(held), started)
        raise RemoteFailure("it shows tickets without end", subject=self.node.spec.name)

    async def stop(self, job: int, attempt: int, reason: str, grace_s: float) -> RunStatus:
        limit_s = grace_s + _PREPARE_S
        answer = await self._call(api.stop, limit_s, job=str(job), attempt=attempt, reason=reason, grace_s=grace_s)
        return self._status_of(str(job), attempt, answer)

    async def trace(self, job: int, attempt: int, steps: int, key: str) -> None:
        """Asks the ranks to record their next steps; once for each key."""
        await self._call(api.control, self.answer_s, job=str(job), attempt=attempt, trace_steps=steps, key=key)

    async def take_part(self, job: int, attempt: int, part: float, *, binds_cores: bool) -> None:
        """Asks the ranks to take no more than that part of an equal share of each batch; 1: as much as they can.

        ``binds_cores``: of their cores instead, which they need not agree to.
        """
        await self._call(
            api.control, self.answer_s, job=str(job), attempt=attempt, binds_cores=binds_cores, part=part
        )

    async def start_again(self, job: int, attempt: int, rank: int, starts: int) -> None:
        """Orders that a lost rank is started again; nothing happens if it was started more often than ``starts``."""
        await self._call(api.start_again, self.answer_s, job=str(job), attempt=attempt, rank=rank, starts=starts)

    async def follow(
        self, run: tuple[int, int], file: str, offset: int, most_bytes: Callable[[], int], *, promptly: bool = False
    ) -> AsyncIterator[Piece]:
        """The file's bytes from ``offset`` on, live, until the run has ended; a cut head makes the offset jump.

        ``most_bytes``: how large the file can be by now. ``promptly``: it matters how soon they are here.
        """
        (job, attempt), link = run, await self.node.ready(self.connect_s, patiently=True)
        asks = self.identity.asks
        stream = link.stream(
            *asks(api.follow, job=str(job), attempt=attempt, file=file, offset=offset, promptly=promptly)
        )
        try:
            async for kind, payload in stream:
                end = _offset(payload) if kind == wire.ERR else offset + len(payload)
                if not offset < end <= most_bytes():
                    text = f"{file} of {job}.{attempt} cannot have {end} bytes"
                    raise RemoteFailure(text, subject=self.node.spec.name, cause="damaged")
                if kind != wire.ERR:
                    yield Piece(offset, payload)
                offset = end
            await stream.result()
        finally:
            stream.cancel()


def _held(answer: dict[str, Any]) -> Held:
    return Held(str(answer["job"]), int(answer["attempt"]), str(answer["status"])[:20], str(answer["ticket"]))


def parse_news(payload: bytes) -> News:
    try:
        document = wire.parse(payload)
        reports, gone = document["runs"], document.get("gone", ())
        if len(reports) > _MOST_RUNS or len(gone) > _MOST_RUNS:
            raise ValueError(f"{len(reports)} runs and {len(gone)} removals in one message")
        runs, invalid = [], []
        for report in reports:
            try:
                runs.append(parse_status(report))
            except RemoteFailure as error:  # the others go on
                invalid.append(error.message)
        return News(
            _moment(document),
            tuple(runs),
            tuple(str(name)[:_MOST_NAME] for name in gone),
            bool(document.get("is_first")),
            bool(document.get("has_more")),
            tuple(invalid),
            (_text(document.get("mark")) or "")[:_MOST_MARK] or None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, wire.ProtocolError) as error:
        raise RemoteFailure(f"invalid report on its runs: {error!r:.200}") from error


def _moment(answer: dict[str, Any]) -> Moment:
    boot_id, clock_s = str(answer["now"]["boot_id"]), float(answer["now"]["clock_s"])
    if len(boot_id) > _MOST_NAME or not 0 <= clock_s < _MOST_UNIX_S:
        raise ValueError(f"no clock of a node: {clock_s} of {boot_id:.40}")
    return Moment(boot_id, clock_s)


def _offset(payload: bytes) -> int:
    try:
        return _whole(wire.parse(payload)["offset"], 0, listing.MOST_BYTES)
    except (KeyError, ValueError, wire.ProtocolError) as error:
        raise RemoteFailure(f"invalid offset in a log: {error!r:.200}", cause="damaged") from error


def parse_status(answer: dict[str, Any]) -> RunStatus:
    """By hand, for it is most of what is heard of a thousand small jobs; every value is made what it should be."""
    try:
        state, record = answer.get("state") or {}, answer.get("exit") or {}
        failure = record.get("failure") or {}
        return RunStatus(
            job=str(answer["job"])[:_MOST_NAME],
            attempt=_whole(answer["attempt"], 1, _MOST_ATTEMPT),
            status=_STATUS[answer["status"]],
            is_claimed=bool(answer["is_claimed"]),
            outcome=_text(record.get("outcome")),
            reason=_text(record.get("reason")),
            ranks=tuple([_rank(rank) for rank in _few(record.get("ranks", ()))]),
            started_ranks=tuple([_whole(rank["rank"], 0, _MOST_RANKS) for rank in _few(state.get("ranks", ()))]),
            failed_rank=_number(failure.get("rank"), _MOST_RANKS),
            is_programs_fault=failure.get("kind") == "program",
            is_disk_full=bool(failure.get("is_disk_full")),
            tail=_tail(failure.get("tail") or ()),
            was_rebooted=bool(record and answer.get("claimed_in") and answer["claimed_in"] != record.get("boot_id")),
            may_have_left=bool(record.get("may_have_left")),
            logs=_logs(answer["logs"]) if answer.get("logs") else None,
            has_outputs=bool(answer.get("has_outputs")),
            is_metered=state.get("is_metered") is True,
            notices=_notices(record.get("notices") or state.get("notices") or ()),
            **(_elastic(state, record) if "changes" in state or "members" in record else {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteFailure(f"invalid run status: {error!s:.200}") from error


_STATUS = {word: word for word in ("starting", "running", "exited", "dead", "absent")}


def _notices(texts: Sequence[Any]) -> tuple[str, ...]:
    """Ranks wrote them: anything may be in them."""
    return tuple([shown(str(text)) for text in texts[:_MOST_NOTICES]])


def _elastic(state: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    members = record.get("members") or state.get("members") or {}
    return {
        "lost": tuple(_rank(rank) for rank in _few(state.get("lost", ()))),
        "members": tuple(_whole(rank, 0, _MOST_RANKS) for rank in _few(members.get("ranks", ()))),
        "group": _whole(members.get("number", -1), -1, _MOST_ATTEMPT),
        "changes": _whole(state.get("changes", 0), 0, _MOST_ATTEMPT),
    }


def _rank(record: dict[str, Any]) -> RankRecord:
    ended_at: Any = record.get("ended_at")
    return RankRecord(
        _whole(record["rank"], 0, _MOST_RANKS),
        _number(record.get("code"), _MOST_CODE),
        _number(record.get("signal"), _MOST_CODE),
        float(ended_at) if type(ended_at) in (int, float) and abs(ended_at) < _MOST_UNIX_S else None,
        bool(record.get("is_oom")),
        _number(record.get("reached_bytes"), _MOST_BYTES_OF_MEMORY),
        record.get("was_lost") is True,
        _number(record.get("starts"), _MOST_ATTEMPT) or 1,
    )


def _few(ranks: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    if len(ranks) > _MOST_RANKS:
        raise ValueError(f"{len(ranks)} ranks")
    return ranks


def _tail(lines: Sequence[Any]) -> tuple[str, ...]:
    """The last of them, as many as an exit record can have."""
    kept: list[str] = []
    left = EXIT_BYTES
    for line in reversed(lines):
        text = str(line)
        left -= len(text) + 1
        if left < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))


def _logs(logs: dict[str, Any]) -> tuple[tuple[int, bytes], ...] | None:
    """None when they are more than is sent like that: then they are fetched."""
    found, total = [], 0
    for rank, log in logs.items():
        content = base64.b64decode(log["content"], validate=True)
        if len(content) != log["size"]:
            raise ValueError("a log is not as long as it says")
        found.append((int(rank), content))
        total += len(content)
    return tuple(found) if total <= inline_logs.MOST_BYTES and len(found) <= _MOST_RANKS else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:_MOST_REASON]


def _number(value: Any, most: int) -> int | None:
    """None also for what cannot be."""
    return value if type(value) is int and -most <= value <= most else None


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number from {least} to {most}")
    return value
