from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.jobs.engine.rules.postmortem import MOST_LINES, Lost, RankEnd, classify
from ugro.kernel.jobs.model import Cause, Failure

TRACEBACK = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 7, in step'
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600000 ms"
)
CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 7.7 GiB"


def end(rank: int, at: float = 0.0, *lines: str, node: str = "gpu1", code: int | None = 1, **more: object) -> RankEnd:
    return RankEnd(rank, node, code, ended_unix_s=at, last_lines=lines, **more)  # type: ignore[arg-type]


def killed(rank: int, by: int, at: float = 0.0, *lines: str, **more: object) -> RankEnd:
    return RankEnd(rank, "gpu1", None, by, at, last_lines=lines, **more)  # type: ignore[arg-type]


def test_a_program_that_could_not_write_why_it_ended_died_of_the_full_disk() -> None:
    silent = classify([end(0, was_disk_full=True)])
    assert (silent.cause, silent.exit_code) == (Cause.DISK_FULL, 1)
    assert silent.reason == (
        "rank 0 on gpu1 ended with exit code 1: the disk of the node is full, and its log could not be written"
    )
    assert silent.hint == "make room: ugro node gc gpu1, or see what takes it: ugro exec gpu1 -- df -h"
    cut = classify([end(0, 0.0, "epoch 3", TRACEBACK, FRAME, was_disk_full=True)])
    assert cut.cause is Cause.DISK_FULL
    said = classify([end(0, 0.0, TRACEBACK, FRAME, "ValueError: no such model", was_disk_full=True)])
    assert said.cause is Cause.RANK_FAILED, "what it could still write is the reason"
    by_another = classify([killed(0, signal.SIGKILL, was_disk_full=True)])
    assert by_another.cause is Cause.KILLED


def test_of_a_rank_in_a_persons_account_the_node_is_named() -> None:
    found = classify([end(0, was_disk_full=True, node="ann@gpu1")])
    assert found.reason.startswith("rank 0 on gpu1 ended with exit code 1")
    assert found.hint == "make room: ugro node gc gpu1, or see what takes it: ugro exec gpu1 -- df -h"
    assert found.node == "ann@gpu1", "what decides about a retry knows the login"
    lost = classify([], lost=[Lost("ann@gpu1", Cause.NODE_REBOOTED, may_have_left=True)])
    assert "ann@" not in f"{lost.reason} {lost.hint}"
    assert "ugro exec gpu1 -- ps" in str(lost.hint)


def alone(*lines: str) -> Failure:
    return classify([end(0, 0.0, *lines)])


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (CUDA_OOM, Cause.CUDA_OOM),
        ("RuntimeError: CUDA error: out of memory", Cause.CUDA_OOM),
        ("RuntimeError: HIP out of memory. Tried to allocate 20.00 MiB", Cause.CUDA_OOM),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Cause.CUDA_OOM),
        ("MemoryError", Cause.OOM),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes", Cause.OOM),
        ("OSError: [Errno 12] Cannot allocate memory", Cause.OOM),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed.", Cause.OOM),
        ("RuntimeError: DataLoader worker (pid(s) 71) is killed by signal: Bus error. It is possible", Cause.OOM),
        ("terminate called after throwing an instance of 'std::bad_alloc'", Cause.OOM),
        ("OSError: [Errno 28] No space left on device: 'ckpt/last.pt'", Cause.DISK_FULL),
        ("RuntimeError: unable to write to file </torch_71_2_0>: No space left on device (28)", Cause.OOM),
        ("OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL),
        ("RuntimeError: The server socket has failed to bind (errno: 98 - Address already in use)", Cause.PORT_IN_USE),
        ("torch.distributed.DistNetworkError: EADDRINUSE, address already in use", Cause.PORT_IN_USE),
        ("ModuleNotFoundError: No module named 'transformers'", Cause.IMPORT_ERROR),
        ("ImportError: libcudart.so.12: cannot open shared object file", Cause.IMPORT_ERROR),
        ("train: error while loading shared libraries: libcudart.so.12", Cause.IMPORT_ERROR),
        ("AssertionError: shapes differ", Cause.RANK_FAILED),
        ("ValueError: OutOfMemoryErrors are not what this is about", Cause.RANK_FAILED),
        ("ConnectionRefusedError: [Errno 111] Connection refused", Cause.RANK_FAILED),
    ],
)
def test_the_last_exception_tells_the_cause(line: str, cause: Cause) -> None:
    failed = alone("step 1", TRACEBACK, FRAME, "    loss.backward()", line, "")
    assert (failed.cause, failed.line) == (cause, line)
    assert failed.reason == f"rank 0 on gpu1 ended with exit code 1: {line}"
    assert (failed.rank, failed.node, failed.exit_code) == (0, "gpu1", 1)
    peer = classify([end(0, 0.0, TRACEBACK, FRAME, line), end(1, -1.0, TRACEBACK, FRAME, RESET)])
    assert (peer.cause, peer.rank) == (cause, 0), "with peers it is the same"


def test_lines_with_the_rank_before_them_are_read_too() -> None:
    lines = [f"[rank3]: {line}" for line in (TRACEBACK, FRAME, "ValueError: bad shape")]
    assert alone(*lines).line == "ValueError: bad shape"


def test_code_in_a_traceback_and_the_chatter_of_nccl_are_not_taken_for_errors() -> None:
    code = '    dist.init_process_group("nccl", timeout=LONG)  # raises MemoryError'
    chatter = "gpu1:71:99 [0] NCCL INFO Plugin load: Address already in use, trying another"
    failed = classify([end(0, 0.0, TRACEBACK, FRAME, code, "ValueError: no such backend", chatter), end(1, 1.0, RESET)])
    assert (failed.cause, failed.line) == (Cause.RANK_FAILED, "ValueError: no such backend")


def test_an_error_that_was_caught_and_survived_is_not_the_cause() -> None:
    failed = alone(TRACEBACK, FRAME, CUDA_OOM, "halving the batch", "step 2", TRACEBACK, FRAME, "KeyError: 'loss'")
    assert (failed.cause, failed.line) == (Cause.RANK_FAILED, "KeyError: 'loss'")


@pytest.mark.parametrize(
    "link",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_an_error_that_the_last_one_was_raised_from_is_the_cause(link: str) -> None:
    failed = alone(TRACEBACK, FRAME, CUDA_OOM, "", link, "", TRACEBACK, FRAME, "RuntimeError: step 7 failed")
    assert failed.cause is Cause.CUDA_OOM


def test_an_error_in_a_loader_worker_is_found_under_the_one_that_reports_it() -> None:
    outer = "OSError: Caught OSError in DataLoader worker process 0."
    inner = "OSError: [Errno 28] No space left on device"
    failed = alone(TRACEBACK, FRAME, outer, f"Original {TRACEBACK}", FRAME, inner)
    assert (failed.cause, failed.line) == (Cause.DISK_FULL, inner)


def test_without_a_traceback_a_line_that_looks_like_an_error_is_shown() -> None:
    assert alone("epoch 1", "train.sh: error: no such option --lr", "bye").line == (
        "train.sh: error: no such option --lr"
    )
    assert alone("epoch 1", "bye").reason == "rank 0 on gpu1 ended with exit code 1"
    assert alone().line is None


def test_long_lines_are_cut_and_old_lines_not_read() -> None:
    line = alone("ValueError: " + "x" * 5000).line
    assert line is not None
    assert len(line) == 300
    assert alone("MemoryError", *["fine"] * MOST_LINES).cause is Cause.RANK_FAILED


def test_the_first_to_fail_is_named_not_those_that_lost_it() -> None:
    ends = [
        end(0, 10.0, RESET, node="gpu0"),
        end(1, 10.2, "what():  NCCL error: remote process exited or there was a network error, NCCL version 2.14.3"),
        end(2, 10.4, TRACEBACK, FRAME, "ValueError: nan loss", node="gpu2"),
        killed(3, signal.SIGTERM, 9.0, was_stopped_by_us=True),
        killed(4, signal.SIGTERM, 9.5),
        end(5, 1.0, code=0),
    ]
    failed = classify(ends)
    assert (failed.rank, failed.node) == (2, "gpu2")
    assert failed.reason == "rank 2 on gpu2 ended with exit code 1: ValueError: nan loss"


def test_between_nodes_clocks_are_compared_without_their_offsets() -> None:
    ends = [
        end(0, 100.0, "ValueError: later", node="a"),
        end(1, 160.0, "ValueError: sooner", node="b", clock_offset_s=61.0),
    ]
    assert classify(ends).rank == 1


def test_within_a_node_the_monotonic_clock_decides() -> None:
    ends = [
        end(0, 100.0, "ValueError: later", ended_monotonic_s=50.2),
        end(1, 100.5, "ValueError: sooner", ended_monotonic_s=50.1),
    ]
    assert classify(ends).rank == 1


def test_a_kill_for_want_of_memory_is_said_so() -> None:
    failed = classify([killed(2, signal.SIGKILL, was_oom_killed=True), end(0, 5.0, RESET)])
    assert failed.reason == "rank 2 on gpu1 was killed by SIGKILL (out of memory)"
    assert (failed.cause, failed.exit_code) == (Cause.OOM, 137)
    assert failed.hint is not None


def test_a_kill_that_nobody_explains_is_just_that() -> None:
    failed = classify([killed(1, signal.SIGKILL, 0.0, CUDA_OOM, "recovered, going on")])
    assert (failed.cause, failed.reason) == (Cause.KILLED, "rank 1 on gpu1 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("ended", "words", "cause"),
    [
        (killed(0, signal.SIGSEGV), "crashed with SIGSEGV", Cause.RANK_FAILED),
        (killed(0, signal.SIGTERM), "was killed by SIGTERM", Cause.KILLED),
        (killed(0, 77), "crashed with signal 77", Cause.RANK_FAILED),
        (end(0, code=137), "ended with exit code 137 (a child was killed by SIGKILL)", Cause.KILLED),
        (end(0, code=127), "ended with exit code 127 (command not found)", Cause.RANK_FAILED),
        (end(0, code=3), "ended with exit code 3", Cause.RANK_FAILED),
        (end(0, code=None), "ended for an unknown reason", Cause.RANK_FAILED),
    ],
)
def test_codes_and_signals_are_put_in_words(ended: RankEnd, words: str, cause: Cause) -> None:
    failed = classify([ended])
    assert (failed.reason, failed.cause) == (f"rank 0 on gpu1 {words}", cause)


def test_a_timeout_of_all_names_nobody_but_points_at_who_was_silent() -> None:
    ends = [
        killed(0, signal.SIGABRT, 1.0, WATCHDOG),
        killed(1, signal.SIGABRT, 1.1, WATCHDOG),
        RankEnd(2, "gpu3", None, signal.SIGTERM, 9.0, was_stopped_by_us=True),
    ]
    failed = classify(ends)
    assert (failed.cause, failed.rank, failed.node) == (Cause.NCCL_TIMEOUT, None, None)
    assert failed.reason.startswith("the ranks lost touch, rank 0 on gpu1 first: [Rank 0] Watchdog")
    assert failed.reason.endswith("rank 2 on gpu3 did not complain and may have hung")


def test_a_timeout_that_another_rank_explains_is_not_the_cause() -> None:
    ends = [killed(0, signal.SIGABRT, 1.0, WATCHDOG), end(1, 600.0, TRACEBACK, FRAME, CUDA_OOM)]
    assert (classify(ends).cause, classify(ends).rank) == (Cause.CUDA_OOM, 1)


def test_broken_connections_everywhere_are_the_networks_fault() -> None:
    failed = classify([end(0, 1.0, RESET), end(1, 1.1, RESET, node="gpu2")])
    assert (failed.cause, failed.rank) == (Cause.NCCL_TIMEOUT, None)
    assert failed.hint == "look at the network between the nodes: ugro doctor"


def test_a_rank_that_had_ended_well_before_the_others_lost_it_is_named() -> None:
    failed = classify([end(0, 9.0, RESET), end(1, 8.5, node="gpu2", code=0), end(2, 9.1, RESET)])
    assert failed.cause is Cause.NCCL_TIMEOUT
    assert failed.reason.endswith("; rank 1 on gpu2 had ended with 0 before, while the others still trained")
    assert "the same number of steps" in str(failed.hint)
    after = classify([end(0, 9.0, RESET), end(1, 9.5, node="gpu2", code=0)])
    assert "had ended" not in after.reason, "it may have been asked to"


def test_who_was_alone_cannot_blame_others() -> None:
    failed = alone(TRACEBACK, FRAME, "ConnectionResetError: [Errno 104] Connection reset by peer")
    assert (failed.cause, failed.rank) == (Cause.RANK_FAILED, 0)


def test_a_lost_node_explains_what_the_others_say() -> None:
    lost = [Lost("gpu2", Cause.NODE_LOST)]
    failed = classify([end(0, 1.0, RESET), end(1, 1.0, "ValueError: odd")], lost=lost)
    assert (failed.cause, failed.node, failed.reason) == (Cause.NODE_LOST, "gpu2", "lost the node gpu2")
    assert classify([], lost=[*lost, Lost("gpu3", Cause.NODE_REBOOTED)]).reason == "lost the node gpu2, and 1 more"
    killed = Lost("a", Cause.SUPERVISOR_LOST)
    assert classify([], lost=[killed]).reason == "the supervisor was killed on a"
    assert classify([], lost=[killed]).hint is None
    hint = "a process that hid from UGRO may still run on b; see: ugro exec b -- ps xf"
    assert classify([], lost=[killed, Lost("b", Cause.SUPERVISOR_LOST, may_have_left=True)]).hint == hint
    own = classify([end(0, 1.0, CUDA_OOM)], lost=lost)
    assert own.cause is Cause.CUDA_OOM


def test_what_we_stopped_ourselves_is_told_as_that() -> None:
    stopped = [killed(0, signal.SIGTERM, was_stopped_by_us=True)]
    assert classify(stopped, stopped_for=Cause.TIME_LIMIT) == Failure(Cause.TIME_LIMIT, "it reached its time limit")
    assert classify(stopped, stopped_for=Cause.PREEMPTED).reason == "it made way for a more urgent job"


def test_a_job_that_reached_its_time_limit_ends_with_the_code_of_a_timeout() -> None:
    stopped = [killed(0, signal.SIGTERM, was_stopped_by_us=True)]
    assert classify(stopped, stopped_for=Cause.TIME_LIMIT).exit_code_of_job == 124
    assert classify(stopped, stopped_for=Cause.PREEMPTED).exit_code_of_job == 1
    assert classify([end(0, code=7)]).exit_code_of_job == 7


def test_there_is_no_failure_where_nothing_failed() -> None:
    with pytest.raises(ValueError, match="no rank failed"):
        classify([end(0, code=0), killed(1, signal.SIGTERM, was_stopped_by_us=True)])


log_lines = st.one_of(st.sampled_from([TRACEBACK, FRAME, RESET, WATCHDOG, CUDA_OOM]), st.text())
any_end = st.builds(
    RankEnd, st.integers(0, 9), st.sampled_from(["a", "b"]), st.one_of(st.none(), st.integers(0, 255)),
    st.one_of(st.none(), st.integers(1, 99)), st.floats(0, 99), st.one_of(st.none(), st.floats(0, 99)),
    st.floats(-9, 9), st.lists(log_lines).map(tuple), st.booleans(), st.booleans(),
)  # fmt: skip


@given(st.lists(any_end, max_size=6, unique_by=lambda end: end.rank))
def test_whatever_ranks_leave_behind_can_be_told(ends: list[RankEnd]) -> None:
    own = [one for one in ends if one.has_failed and not one.was_stopped_by_us]
    if not own:
        return
    failed = classify(ends)
    assert failed.reason
    assert failed.rank is None or failed.rank in {one.rank for one in own}


def test_a_memory_limit_that_was_reached_is_named_with_its_size() -> None:
    limit = 4 * 2**30
    failure = classify([killed(0, signal.SIGKILL, was_oom_killed=True, reached_bytes=limit)])
    assert failure.cause is Cause.OOM
    assert failure.reason == "rank 0 on gpu1 was killed by SIGKILL: the job reached its memory limit of 4.0 GiB"
    assert failure.hint == "ask for more with --memory, or use fewer loader workers or a smaller batch"
    worker = classify([end(0, 0.0, "RuntimeError: a worker is gone", reached_bytes=limit)])
    assert worker.cause is Cause.OOM
    assert worker.reason.endswith("reached its memory limit of 4.0 GiB")
    other = classify([end(0, 0.0, "torch.cuda.OutOfMemoryError: CUDA out of memory", reached_bytes=limit)])
    assert other.cause is Cause.CUDA_OOM
