"""The records beside the state: what is not sealed with our key, or is damaged, shows nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ugro.features.safe_mode.model import Mark
from ugro.features.safe_mode.records import Comparison, Journal, Records, agent_key, read_mark, write_mark
from ugro.features.safe_mode.rules import Entry
from ugro.kernel.jobs.engine.plan import read_ticket, ticket_of
from ugro.kernel.jobs.model import Ending, Job, JobSpec, JobState, Placement, Share
from ugro.kernel.store.standing import Numbers
from ugro.kernel.support.state_dir import StateDir

JOB = Job(
    7, JobSpec("train", ("a", "b"), env=(("X", "1"),)), "ann", JobState.STARTING, "free now", "2026-01-01T00:00:00",
    attempt=2, placement=Placement((Share("n1", (0, 1), cpus=4),)), submit_key="key",
)  # fmt: skip
MARK = Mark("agent", 5, 1000)
KEY, OTHER = b"k" * 32, b"o" * 32


def test_the_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    key = agent_key(tmp_path / "agent.key")
    assert len(key) == 32
    assert agent_key(tmp_path / "agent.key") == key
    assert (tmp_path / "agent.key").stat().st_mode & 0o777 == 0o600


def test_a_mark_or_a_ticket_is_believed_only_with_our_seal_and_for_this_agent() -> None:
    mark, ticket = write_mark(KEY, MARK), ticket_of(KEY, "agent", JOB)
    assert ticket is not None
    assert (read_mark(KEY, "agent", mark), read_ticket(KEY, "agent", ticket)) == (MARK, JOB)
    for message in (write_mark(OTHER, MARK), mark.replace("1000", "9999"), mark[:-1], "", None, 5, "x" * 64 + " {}"):
        assert read_mark(KEY, "agent", message) is None
    for message in (ticket_of(OTHER, "agent", JOB), ticket.replace('"id":7', '"id":8'), "", None, mark):
        assert read_ticket(KEY, "agent", message) is None
    assert read_mark(KEY, "another", mark) is None
    assert read_ticket(KEY, "another", ticket) is None
    assert (read_mark(b"", "agent", write_mark(b"", MARK)), ticket_of(b"", "agent", JOB)) == (None, None)


def test_every_state_and_every_ending_has_its_place_in_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.create("agent")
    for state in JobState:
        for ending in (None, *Ending):
            journal.note(replace(JOB, state=state, ending=ending))
            assert journal.get(7) == Entry(2, state, ending)
    journal.close()


def test_the_journal_has_the_last_word_on_each_job_and_leaves_out_what_is_damaged(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert not journal.open("agent")
    journal.create("agent")
    journal.note(JOB)
    journal.note(replace(JOB, state=JobState.STOPPING, ending=Ending.CANCELLED))
    journal.note(replace(JOB, id=1007, attempt=0, state=JobState.QUEUED))
    assert journal.get(7) == Entry(2, JobState.STOPPING, Ending.CANCELLED)
    assert [journal.get(number) for number in (0, 6, 8)] == [None] * 3
    assert list(journal.after(7)) == [(1007, Entry(0, JobState.QUEUED))]
    journal.close()
    content = bytearray((tmp_path / "journal").read_bytes())
    content[7 * 16 + 4] ^= 1
    (tmp_path / "journal").write_bytes(content)
    assert journal.open("agent")
    assert journal.get(7) is None


def test_the_journal_of_another_agent_is_set_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.create("agent-1")
    journal.note(JOB)
    journal.close()
    other = Journal(tmp_path / "journal")
    assert not other.open("agent-2")
    other.create("agent-2")
    assert other.get(7) is None
    assert len(list(tmp_path.iterdir())) == 2


def test_the_state_is_compared_with_the_records(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    assert Records(home).compare("agent", Numbers(0, 0, 0), []).is_checked  # a new state
    assert not Records(home).compare("agent", Numbers(5, 7, 1000), []).is_checked  # they were lost
    records = Records(home)
    records.compare("agent", Numbers(0, 0, 0), [])
    records.write(Mark("agent", 5, 1000))
    records.journal.note(JOB)
    assert Records(home).compare("agent", Numbers(5, 7, 1000), [JOB]).reasons == ()
    assert Records(home).compare("agent", Numbers(4, 7, 1000), [JOB]).reasons
    assert Records(home).compare("agent", Numbers(5, 6, 1000), []).reasons
    assert Records(home).compare("agent", Numbers(5, 7, 0), [JOB]).reasons  # a backup of before the upgrade
    assert Records(home).compare("agent", Numbers(5, 7, 1000), [replace(JOB, attempt=1)]).reasons
    home.key.unlink()
    assert not Records(home).compare("agent", Numbers(5, 7, 1000), [JOB]).is_checked


def test_records_that_could_not_be_written_are_written_when_there_is_room_again(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    records = Records(home)
    records.compare("agent", Numbers(0, 0, 0), [])
    blocked = tmp_path / "agent.journal.part"
    blocked.mkdir()
    assert not records.write(MARK)
    blocked.rmdir()
    assert records.write(MARK)
    assert Records(home).compare("agent", Numbers(5, 0, 1000), []) == Comparison((), MARK)
