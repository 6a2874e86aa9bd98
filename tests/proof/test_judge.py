"""The judge can tell: each kind of contradiction, made on purpose, is found. Else its silence would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import witness
from tests.rig.judge import Book, Final, Ledger, Task, Verdict, judge, now_s, orphans
from tests.rig.waiting import wait_until

TASK = Task("job", lines=9)
DONE = {"job": Final("succeeded", 1, 0)}


class Court:
    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.ledger = Ledger(folder)
        self.book = Book()
        self.book.asked(TASK)
        self.book.acknowledged(TASK, 1)

    def rank(self, attempt: int = 1, task: Task = TASK, job: int = 1, keeps_log: bool = True) -> None:
        """A rank that runs to its end, with its log brought home."""
        self.wait(self.begin(attempt, task, job), attempt, task, job, keeps_log)

    def begin(self, attempt: int = 1, task: Task = TASK, job: int = 1) -> subprocess.Popen[bytes]:
        env = {**os.environ, **self.ledger.env, "UGRO_JOB": str(job), "UGRO_ATTEMPT": str(attempt), "UGRO_NODE": "n1"}
        argv = [sys.executable, "-I", "-S", witness.__file__, *task.words()]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait(self, process: subprocess.Popen[bytes], attempt: int, task: Task, job: int, keeps_log: bool) -> None:
        content, _ = process.communicate(timeout=20)
        file = self.home / "jobs" / str(job) / f"attempt_{attempt}" / "logs" / "rank_0.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if keeps_log else content[:-1])

    def verdict(self, finals: dict[str, Final] = DONE) -> Verdict:
        return judge(self.book, self.ledger, finals, self.home)


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)


def test_a_job_that_ran_once_and_well_is_not_complained_about(court: Court) -> None:
    court.rank()
    verdict = court.verdict()
    assert verdict.complaints == []
    assert (verdict.attempts, verdict.whole_logs) == (1, 1)
    assert verdict.log_bytes == len(witness.log_of("job", 0, 9))


def test_a_job_without_a_final_state_is_lost(court: Court) -> None:
    court.rank()
    assert court.verdict({}).lost != []


def test_an_attempt_that_began_twice_is_doubled(court: Court) -> None:
    court.rank()
    court.rank()
    assert court.verdict().doubled == ["job 1 attempt 1 rank 0 began 2 times"]


def test_a_submit_that_became_two_jobs_is_doubled(court: Court) -> None:
    court.rank()
    court.rank(job=2)
    court.book.acknowledged(TASK, 2)
    assert len(court.verdict().doubled) == 2


def test_an_id_that_two_submits_got_is_doubled(court: Court) -> None:
    court.rank()
    court.book.acknowledged(Task("other"), 1)
    assert court.verdict().doubled == ["other got the id of job: 1"]


def test_attempts_that_lived_at_the_same_time_overlap(court: Court) -> None:
    slow = Task("slow", lines=20, pause_s=0.1)
    first = court.begin(1, slow)
    wait_until(court.ledger.entries, 10, "the first attempt to begin")
    court.rank(attempt=2)
    court.wait(first, 1, slow, 1, keeps_log=True)
    verdict = court.verdict({"job": Final("succeeded", 2, 0)})
    assert any("attempt.1.1 was held" in text for text in verdict.overlapping), verdict
    assert any("lived" in text for text in verdict.overlapping), verdict


def test_success_that_no_rank_had_is_untrue(court: Court) -> None:
    court.rank(task=Task("job", codes=(7,)))
    assert court.verdict().untrue != []


def test_an_attempt_that_nobody_knows_of_is_untrue(court: Court) -> None:
    court.rank()
    court.rank(attempt=2)
    assert court.verdict().untrue != []


def test_a_cancel_that_ended_as_a_failure_is_untrue(court: Court) -> None:
    court.book.was_cancelled("job")
    assert court.verdict({"job": Final("failed", 1, 7)}).untrue != []


def test_a_log_that_lacks_its_last_byte_is_wrong(court: Court) -> None:
    court.rank(keeps_log=False)
    assert court.verdict().logs != []


@pytest.mark.parametrize(
    ("task", "word"),
    [
        (Task("job", lines=9, leaves_child=True), "witness.py"),
        (Task("job", lines=9, hides_child=True), "hidden-of-job"),
    ],
)
def test_a_child_that_left_its_session_and_every_variable_but_a_lock_is_an_orphan(
    court: Court, tmp_path: Path, task: Task, word: str
) -> None:
    process = court.begin(task=task)
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()
    try:
        # It says that it lives before it becomes the program that is looked for.
        wait_until(lambda: any(word in text for text in orphans(court.ledger, [tmp_path])), 10, "the child to be found")
        assert "attempt.1.1" in orphans(court.ledger, [tmp_path])
    finally:
        court.ledger.end_all()
    wait_until(lambda: not orphans(court.ledger, [tmp_path]), 10, "nothing to be left")


def test_only_what_a_copy_was_too_old_for_is_forgiven(tmp_path: Path) -> None:
    ledger, book, now = Ledger(tmp_path), Book(), now_s()
    for token in ("waited", "ran", "over"):
        book.asked(Task(token))
        book.acknowledged(Task(token), 7)
    assert not book.forgive("waited", ledger)  # nothing was put back
    book.was_restored(now - 60, now - 30)
    assert not book.forgive("waited", ledger)  # it was acknowledged later
    lines = [(event, token, at_s) for token, until_s in (("ran", now + 9), ("over", now + 1)) for event, at_s in
             (("begin", now + 0.5), ("end", until_s))]  # fmt: skip
    ledger.path.write_text("".join(f"{event} {token} 7 1 0 {2**22 + 1} 0 {at_s}\n" for event, token, at_s in lines))
    book.was_restored(now - 60, now + 3)
    assert not book.forgive("ran", ledger)  # a node ran it when the copy was put back
    assert book.forgive("waited", ledger)
    assert book.forgive("over", ledger)
    assert list(book.jobs) == ["ran"]


def test_a_copy_of_a_state_that_waits_for_a_decision_knows_no_more_than_that_state(tmp_path: Path) -> None:
    book, saved_s = Book(), now_s() - 60
    assert book.known_until(is_undecided=True) > saved_s + 50  # nothing was put back
    book.was_put_back(saved_s)
    assert book.known_until(is_undecided=True) == saved_s
    assert book.known_until(is_undecided=False) > saved_s + 50
    book.was_restored(saved_s, saved_s + 5)
    assert book.known_until(is_undecided=True) > saved_s + 50
