"""The records beside the state: key, mark and journal. They show whether the state is the newest one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.agent.safe_mode.journal import Journal
from ugro.agent.safe_mode.key import agent_key
from ugro.agent.safe_mode.mark import MarkFile
from ugro.core.job import Job
from ugro.core.safe_mode import Mark
from ugro.core.support.state_dir import StateDir
from ugro.policy.lifecycle.newer_state import Entry, older_than_journal, older_than_mark
from ugro.policy.wording import count_of
from ugro.store.standing import Numbers

log = logging.getLogger(__name__)

HERE = "this machine"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``reasons``: why the state is an older one. ``is_checked``: False: there is nothing to compare it with."""

    reasons: tuple[str, ...] = ()
    mark: Mark | None = None
    is_checked: bool = True
    is_moved: bool = False  # the state was last used on another machine, or in another folder


class Records:
    def __init__(self, home: StateDir) -> None:
        self._home = home
        self.key = agent_key(home.key)
        self._mark_file = MarkFile(home.mark, self.key)
        self.journal = Journal(home.journal)
        self._agent = ""
        self._complaint = ""
        self.place = _place(home)
        self.is_complete = True  # False: they were lost, and do not tell what came after the state was saved

    def compare(self, agent: str, numbers: Numbers, live: Sequence[Job], *, is_moved: bool = False) -> Comparison:
        """With the state as it was found. Records that came with it are as old as it is. Blocks."""
        self._agent = agent
        mark = self._mark_file.read(agent)
        has_journal = self.journal.open(agent)
        if not numbers.reserved and mark is None:  # a new state
            return Comparison()
        self.is_complete = has_journal and mark is not None and not is_moved
        if mark is None or not has_journal:
            return Comparison(is_checked=False, mark=mark, is_moved=is_moved)
        own = Mark(agent, numbers.generation, numbers.reserved)
        reasons = [*self._beyond(numbers, live), *older_than_mark(own, mark, HERE)]
        return Comparison(tuple(reasons), mark, is_checked=not is_moved, is_moved=is_moved)

    def newer_entries(
        self, numbers: Numbers, live: Sequence[Job], found: Iterable[int] = ()
    ) -> Iterator[tuple[int, Entry]]:
        """Of jobs that came further than the state says. ``found``: jobs that nodes have and it does not. Blocks."""
        yield from self.journal.after(numbers.highest)
        for number in found:  # also of ids that an earlier decision has left out
            if (entry := self.journal.get(number)) is not None:
                yield number, entry
        for job in live:
            entry = self.journal.get(job.id)
            if entry is not None and older_than_journal(job, entry):
                yield job.id, entry

    def write(self, mark: Mark) -> bool:
        """The state is the newest, and from now on recorded. If that fails, an older one may go unnoticed. Blocks."""
        try:
            self.journal.create(self._agent)
            self._mark_file.write(mark)
        except OSError as error:
            if str(error) != self._complaint:  # each once: it is tried again
                log.error("the records beside the state cannot be written: %s", error)
            self._complaint = str(error)
            return False
        self.is_complete, self._complaint = True, ""
        return True

    @property
    def highest(self) -> int:
        """The highest id of which this machine has a trace: a folder of files, or an entry of the journal. Blocks."""
        return max(_highest(self._home.jobs), self.journal.highest)

    def close(self) -> None:
        self.journal.close()

    def _beyond(self, numbers: Numbers, live: Sequence[Job]) -> Iterator[str]:
        newer = [job for job, _ in self.newer_entries(numbers, live)]
        if newer:
            jobs = count_of(len(newer), "job")
            yield f"{HERE} has a record of {jobs} newer than the state (job {max(newer)} is the newest)"


def _place(home: StateDir) -> str:
    """Where a state is used: this machine and folder. Containers have no id, and a host name that says nothing."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    return f"{machine}:{os.path.realpath(home.path)}"


def _highest(folder: Path) -> int:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return 0
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)
