from __future__ import annotations

from ugro.core.job import Job, JobSpec, JobState, Launcher, Placement, Share
from ugro.core.plan import Rendezvous
from ugro.workloads.planning import Surroundings, needs_rendezvous, plan

MEETING = Rendezvous("10.0.0.1", 29500, (("gpu1", "eth0"),))
PYTHONS = {"gpu1": "/opt/a/python3", "gpu2": "/opt/b/python3"}
UNEQUAL = Placement((Share("gpu1", gpus=(0, 2)), Share("gpu2", gpus=(1,))))


def job(launcher: Launcher, *argv: str, env: tuple[tuple[str, str], ...] = ()) -> Job:
    spec = JobSpec("j", argv, launcher, env=env)
    return Job(7, spec, "ann", JobState.STARTING, "", "2026-01-01T00:00:00+00:00", attempt=1)


def test_a_command_is_one_process_on_its_first_node_and_sees_only_its_devices() -> None:
    made = plan(job(Launcher.COMMAND, "python", "eval.py", env=(("A", "1"),)), 1, UNEQUAL, Surroundings(None, PYTHONS))
    (node,) = made.nodes
    (rank,) = node.ranks
    assert (node.node, rank.argv) == ("gpu1", ("python", "eval.py"))
    assert dict(rank.env)["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert dict(rank.env)["A"] == "1"
    assert made.world_size == 1


def test_a_job_without_gpus_cannot_see_those_of_others() -> None:
    made = plan(job(Launcher.COMMAND, "x"), 1, Placement((Share("gpu1"),)), Surroundings(None, PYTHONS))
    assert dict(made.nodes[0].ranks[0].env)["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks_count_on_over_nodes_with_different_numbers_of_devices() -> None:
    made = plan(job(Launcher.DDP, "train.py", "--epochs", "3"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    ranks = [rank for node in made.nodes for rank in node.ranks]
    seen = [[dict(rank.env)[key] for key in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")] for rank in ranks]
    assert seen == [["0", "0", "0", "2"], ["1", "1", "0", "2"], ["2", "0", "1", "1"]]
    assert {dict(rank.env)["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert {dict(rank.env)["MASTER_PORT"] for rank in ranks} == {"29500"}
    assert ranks[2].argv == ("/opt/b/python3", "-u", "train.py", "--epochs", "3")
    assert dict(ranks[0].env)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in dict(ranks[2].env)


def test_torchrun_gets_static_rendezvous_and_no_restarts_of_its_own() -> None:
    made = plan(job(Launcher.TORCHRUN, "train.py"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    argv = made.nodes[1].ranks[0].argv
    assert argv[:4] == ("/opt/b/python3", "-u", "-m", "torch.distributed.run")
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=1", "--max-restarts=0", "train.py"} <= set(argv)


def test_only_what_has_ranks_needs_a_place_to_meet() -> None:
    assert [needs_rendezvous(job(launcher)) for launcher in Launcher] == [False, True, True]
