"""What the cluster page shows: which job stands beside which GPU, and how many events become few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.alerts.config import AlertSection
from ugro.features.power.model import OwnerReport, Then, When
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Launcher, Placement, Share
from ugro.kernel.jobs.rows import Happened
from ugro.kernel.links.model import Facts, Gpu, GpuHolder, GpuProcess, NodeReport, Status
from ugro.web.pages.cluster import MANY, Burst, Grid, Line, activity, gpu_grid
from ugro.web.pages.overview import NodeRow, NodesQuery, chosen, node_table, said, totals, word

LIMITS = AlertSection()


def _gpu(index: int, *processes: GpuProcess) -> Gpu:
    return Gpu(index, f"GPU-{index}", "NVIDIA RTX", 100, 1, 0.0, 40.0, 20.0, processes=processes)


def _row(name: str, *gpus: Gpu, status: Status = Status.HEALTHY, is_late: bool = False) -> NodeRow:
    facts = Facts(1.0, 1.0, (0.0, 0.0, 0.0), 0.5, 100, 50, gpus=gpus)
    report = NodeReport(name, status, 100, facts=None if status is Status.UNREACHABLE else facts)
    return NodeRow(name, report, None, (), is_late, None, "")


def _job(number: int, *shares: Share, launcher: Launcher = Launcher.DDP, state: JobState = JobState.RUNNING) -> Job:
    spec = JobSpec("train", ("train.py",), launcher)
    return Job(number, spec, "ann", state, "", "2026-01-01T00:00:00+00:00", attempt=1, placement=Placement(shares))


def _beside(grid: Grid) -> dict[str, tuple[int, int | None] | None]:
    """By GPU: the job and the rank that stand there."""
    return {tile.key: (tile.holder.job.id, tile.holder.rank) if tile.holder else None for tile in grid.tiles}


def test_a_job_stands_beside_the_gpus_of_its_placement_only_and_each_with_its_rank() -> None:
    rows = [_row("gpu2", *map(_gpu, range(4))), _row("gpu10", *map(_gpu, range(2)))]
    training = _job(7, Share("gpu10", (1,)), Share("gpu2", (0, 3)))
    command = _job(8, Share("gpu2", (2,)), launcher=Launcher.COMMAND)
    assert _beside(gpu_grid(rows, [training, command], LIMITS)) == {
        "gpu2-0": (7, 1), "gpu2-1": None, "gpu2-2": (8, None), "gpu2-3": (7, 2), "gpu10-0": None, "gpu10-1": (7, 0),
    }  # fmt: skip


def test_a_machine_that_its_owner_uses_is_shown_as_such() -> None:
    rule = OwnerReport(When.ACTIVE, Then.PAUSE, 600.0, is_there=True, sign="ann types on pts/3", idle_s=1.0)
    row = _row("gpu1", _gpu(0))
    assert row.report is not None
    used = replace(row, report=replace(row.report, owner=rule))
    assert used.owner is not None
    assert used.owner.startswith("used by its owner (ann types on pts/3)")
    assert [tile.sign.word for tile in gpu_grid([used], [], LIMITS).tiles] == ["owner is there"]
    assert (word(used), word(row), word(replace(used, drained=""))) == ("owner", "healthy", "drained")
    assert said(word(used)) == "owner is there"
    assert chosen([row, used], "", "owner") == [used]
    assert chosen([row, used], "ann pts/3", "") == [used]
    gone = replace(row, report=replace(row.report, owner=replace(rule, is_there=False)))
    assert (gone.owner, word(gone)) == (None, "healthy")


@pytest.mark.parametrize("status", [Status.GOING_TO_SLEEP, Status.ASLEEP, Status.WAKING])
def test_a_machine_that_sleeps_is_shown_as_such_and_is_not_up(status: Status) -> None:
    row = replace(_row("gpu1"), report=NodeReport("gpu1", status, 100))
    assert (word(row), totals([row]).nodes_up) == (status, 0)
    table = node_table([row, _row("gpu2", status=Status.UNREACHABLE), _row("gpu3")], NodesQuery(sort="worst"))
    assert [one.name for one in table.rows] == ["gpu2", "gpu1", "gpu3"]


def test_ranks_without_a_gpu_count_too() -> None:
    job = _job(7, Share("box"), Share("gpu1", (0, 1)))
    found = gpu_grid([_row("box"), _row("gpu1", _gpu(0), _gpu(1))], [job], LIMITS)
    assert _beside(found) == {"gpu1-0": (7, 1), "gpu1-1": (7, 2)}
    assert [row.name for row in found.plain] == ["box"], "a node without GPUs is shown by its CPU"


def test_a_gpu_of_another_agents_job_is_not_free_and_a_second_name_shows_no_gpu_twice() -> None:
    ann = GpuHolder("other", "gpu1", "12", 1, "ann", 0.0)
    first = _row("gpu1", replace(_gpu(0), holder=ann), _gpu(1))
    second = _row("gpu1-lan", _gpu(0), _gpu(1))
    assert second.report is not None
    second = replace(second, report=replace(second.report, same_as="gpu1"))
    grid = gpu_grid([first, second], [], LIMITS)
    assert [(tile.key, tile.sign.state) for tile in grid.tiles] == [("gpu1-0", "taken"), ("gpu1-1", "free")]
    assert grid.free == 1
    whole = totals([first, second])
    assert (whole.nodes, whole.gpus) == (1, 2)
    still = gpu_grid([first, replace(second, jobs=(7,))], [_job(7, Share("gpu1-lan", (0,)))], LIMITS)
    assert "gpu1-lan-0" in _beside(still), "a job from before is shown where it runs"


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    [*tiles] = gpu_grid([_row("gpu1", *map(_gpu, (10, 2, 0)))], [], LIMITS).tiles
    assert [tile.index for tile in tiles] == [0, 2, 10]


def test_a_process_of_somebody_else_is_not_a_job_and_the_gpu_is_not_free() -> None:
    stranger, ours = GpuProcess(12, "python", 5), GpuProcess(13, "python", 5, is_ours=True, job="7")
    row = _row("gpu1", _gpu(0, stranger), _gpu(1, ours), _gpu(2, ours))
    grid = gpu_grid([row], [_job(7, Share("gpu1", (1,)))], LIMITS)
    assert [tile.others for tile in grid.tiles] == [(stranger,), (), (ours,)]
    assert [tile.sign.word for tile in grid.tiles] == ["other use", "running", "other use"]
    assert grid.free == 0


def test_a_gpu_that_another_agent_has_locked_is_not_free() -> None:
    gpu = replace(_gpu(0), holder=GpuHolder("b", "gpu1", "3", 1, "eve", 0.0))
    [tile] = gpu_grid([_row("gpu1", gpu)], [], LIMITS).tiles
    assert (tile.holder, tile.sign.word) == (None, "other use")


def test_a_machine_with_two_names_has_its_gpus_once() -> None:
    again = _row("again", _gpu(0))
    assert again.report is not None
    again = replace(again, report=replace(again.report, same_as="gpu1"))
    assert [tile.key for tile in gpu_grid([again, _row("gpu1", _gpu(0))], [], LIMITS).tiles] == ["gpu1-0"]


def test_a_gpu_that_works_for_nobody_known_is_not_called_free() -> None:
    busy, full = replace(_gpu(0), use_ratio=0.9), replace(_gpu(1), memory_used_bytes=60)
    grid = gpu_grid([_row("gpu1", busy, full, _gpu(2))], [], LIMITS)
    assert [tile.sign.word for tile in grid.tiles] == ["other use", "other use", "free"]
    assert grid.free == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"temperature_c": 100.0}, "too hot"),
        ({"error": "the GPU is lost"}, "cannot be read"),
        ({"throttle": ("power", "heat")}, "slowed: heat"),
        ({"throttle": ("power",)}, "running"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said_before_who_uses_it(change: dict[str, object], word: str) -> None:
    gpu = replace(_gpu(0), **change)  # type: ignore[arg-type]
    [tile] = gpu_grid([_row("gpu1", gpu)], [_job(7, Share("gpu1", (0,)))], LIMITS).tiles
    assert tile.sign.word == word
    assert tile.holder is not None


def test_what_was_last_heard_long_ago_is_not_shown_as_news() -> None:
    [tile] = gpu_grid([_row("gpu1", _gpu(0), is_late=True)], [], LIMITS).tiles
    assert tile.sign.word == "no news"


def test_a_gpu_on_an_unreachable_node_is_shown_while_a_job_holds_it() -> None:
    away = _row("gpu1", status=Status.UNREACHABLE)
    grid = gpu_grid([away], [_job(7, Share("gpu1", (3,)), state=JobState.UNREACHABLE)], LIMITS)
    assert [(tile.index, tile.gpu, tile.sign.word) for tile in grid.tiles] == [(3, None, "unreachable")]
    assert grid.away == (away,)


def test_gpus_of_an_unhealthy_node_take_no_jobs_and_are_not_free() -> None:
    [tile] = gpu_grid([_row("gpu1", _gpu(0), status=Status.UNHEALTHY)], [], LIMITS).tiles
    assert tile.sign.word == "unhealthy"


def test_many_gpus_have_small_tiles() -> None:
    assert not gpu_grid([_row("a", *map(_gpu, range(MANY)))], [], LIMITS).is_dense
    assert gpu_grid([_row("a", *map(_gpu, range(MANY + 1)))], [], LIMITS).is_dense


# --- activity -----------------------------------------------------------------------------------------------------


def _told(*told: tuple[int, str, JobState, str]) -> list[Happened]:
    """The newest first, from job, name, state now, and the kind of the event."""
    return [
        Happened(Event(len(told) - at, "2026-01-01T00:00:00+00:00", kind, f"{kind} text", job), name, state)
        for at, (job, name, state, kind) in enumerate(told)
    ]


def test_a_job_is_one_line_with_its_state_now_and_how_it_got_there() -> None:
    done = JobState.SUCCEEDED
    kinds = ("note", "succeeded", "stopping", "running", "starting", "running", "starting", "queued")
    [line] = activity(_told(*((3, "train", done, kind) for kind in kinds)))
    assert isinstance(line, Line)
    assert (line.job, line.name, line.state) == (3, "train", done)
    assert line.path == ("queued", "starting", "running", "starting", "running", "stopping", "succeeded")
    assert line.text == "succeeded text", "a note does not say how a job is"
    assert len(line.events) == 8


def test_many_jobs_of_one_name_are_one_line_with_their_states_and_failures_first() -> None:
    failed, done = JobState.FAILED, JobState.SUCCEEDED
    burst = [(at, f"eval-{at}", failed if at == 7 else done, "running") for at in range(500)]
    found = activity(_told((900, "train", JobState.RUNNING, "running"), *burst))
    assert [type(line) for line in found] == [Line, Burst]
    assert isinstance(found[1], Burst)
    assert (found[1].name, len(found[1].lines)) == ("eval", 500)
    assert found[1].counts == [(done, 499), (failed, 1)]
    assert found[1].named[0].job == 7
    assert len(found[1].named) <= 20


def test_a_burst_of_one_name_keeps_its_name_and_few_jobs_stay_apart() -> None:
    done = JobState.SUCCEEDED
    [burst] = activity(_told(*((at, "run2", done, "running") for at in range(5))))
    assert isinstance(burst, Burst)
    assert burst.name == "run2"
    assert len(activity(_told(*((at, "eval", done, "running") for at in range(3))))) == 3


def test_alerts_of_many_nodes_leave_room_for_jobs() -> None:
    at = "2026-01-01T00:00:00+00:00"
    nodes = [f"gpu{number}" for number in range(30)]
    storm = [Happened(Event(100 - seq, at, "alert", f"{node} is hot", node=node)) for seq, node in enumerate(nodes)]
    found = activity([*storm, *_told((3, "train", JobState.RUNNING, "running"))])
    assert [type(line) for line in found] == [Burst, Line]
    assert found[0].newest.text == "gpu0 is hot"


def test_a_node_that_is_called_like_a_job_has_a_line_of_its_own() -> None:
    at = "2026-01-01T00:00:00+00:00"
    events = [Event(2, at, "drained", "drained", node="4"), Event(1, at, "failed", "x", job=4)]
    found = activity([Happened(event) for event in events])
    assert [type(line) for line in found] == [Line, Line]
    assert len({line.key for line in found}) == 2


def test_events_of_nodes_and_of_removed_jobs_have_lines_too() -> None:
    at = "2026-01-01T00:00:00+00:00"
    told = [Happened(Event(3, at, "drained", "drained", node="gpu1")), Happened(Event(2, at, "failed", "x", job=4))]
    housekeeping = Happened(Event(4, at, "retention", "3 old jobs were removed"))
    node, removed = activity([housekeeping, *told])
    assert isinstance(node, Line)
    assert isinstance(removed, Line)
    assert (node.node, node.text) == ("gpu1", "drained")
    assert (removed.job, removed.state) == (4, None)
