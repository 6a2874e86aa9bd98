from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.environments.model import EnvRequest, Made
from ugro.features.hardware.rules import Speeds
from ugro.kernel.jobs.engine.plan import Surroundings, follows_from_spec, needs_rendezvous, plan, ranks_on
from ugro.kernel.jobs.model import Elastic, Job, JobSpec, JobState, Launcher, Placement, Retry, Share
from ugro.kernel.jobs.records import Plan, Rendezvous

MEETING = Rendezvous("10.0.0.1", 29500, (("gpu1", "eth0"),))
PYTHONS = {"gpu1": "/opt/a/python3", "gpu2": "/opt/b/python3"}
UNEQUAL = Placement((Share("gpu1", gpus=(0, 2)), Share("gpu2", gpus=(1,))))
Env = dict[str, str]


def job(launcher: Launcher, *argv: str, env: Env | None = None, attempt: int = 1, retries: int = 0) -> Job:
    spec = JobSpec("j", argv, launcher, env=tuple((env or {}).items()), retry=Retry(max_retries=retries))
    return Job(7, spec, "ann", JobState.STARTING, "", "2026-01-01T00:00:00+00:00", attempt=attempt)


def environments(made: Plan) -> list[Env]:
    return [dict(rank.env) for node in made.nodes for rank in node.ranks]


def ddp_environments(
    env: Env | None = None, node_env: Env | None = None, extra: Env | None = None, attempt: int = 1
) -> list[Env]:
    around = Surroundings(MEETING, PYTHONS, {"gpu1": node_env or {}}, {"gpu1": extra or {}})
    return environments(plan(job(Launcher.DDP, "train.py", env=env, attempt=attempt), attempt, UNEQUAL, around))


def test_a_command_is_one_process_on_its_first_node_and_sees_only_its_devices() -> None:
    made = plan(job(Launcher.COMMAND, "python", "eval.py", env={"A": "1"}), 1, UNEQUAL, Surroundings(None, PYTHONS))
    (node,) = made.nodes
    (rank,) = node.ranks
    assert (node.node, rank.argv) == ("gpu1", ("python", "eval.py"))
    assert dict(rank.env) == {
        "A": "1",
        "CUDA_VISIBLE_DEVICES": "0,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "UGRO_NODE": "gpu1",
    }
    assert made.world_size == 1


def test_a_job_without_gpus_cannot_see_those_of_others() -> None:
    made = plan(job(Launcher.COMMAND, "x"), 1, Placement((Share("gpu1"),)), Surroundings(None, PYTHONS))
    assert environments(made)[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks_count_on_over_nodes_with_different_numbers_of_devices() -> None:
    made = plan(job(Launcher.DDP, "train.py", "--epochs", "3"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    ranks = [rank for node in made.nodes for rank in node.ranks]
    keys = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK")
    assert [[env[key] for key in keys] for env in environments(made)] == [
        ["0", "0", "0", "2", "0"],
        ["1", "1", "0", "2", "1"],
        ["2", "0", "1", "1", "2"],
    ]
    assert {env["WORLD_SIZE"] for env in environments(made)} == {"3"}
    assert {env["MASTER_PORT"] for env in environments(made)} == {"29500"}
    assert {env["UGRO_NODE"] for env in environments(made)[:2]} == {"gpu1"}
    assert ranks[2].argv == ("/opt/b/python3", "-u", "train.py", "--epochs", "3")


def test_a_rank_uses_the_interface_that_reaches_the_others() -> None:
    first, _, last = ddp_environments()
    assert first["GLOO_SOCKET_IFNAME"] == "eth0"
    assert first["NCCL_SOCKET_IFNAME"] == "=eth0", "NCCL would take eth01, too"
    assert "GLOO_SOCKET_IFNAME" not in last


def test_a_rank_has_every_variable_that_torchrun_gives_but_its_agents_own() -> None:
    agents_own = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    expected = {  # as seen in a rank of torch 2.13
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "7",
        "WORLD_SIZE": "3",
    }
    env = ddp_environments()[1]
    assert {name: env.get(name) for name in expected} == expected
    assert not agents_own & set(env)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in env, "torch's default ends a rank without a clean-up that may hang"


def test_only_nodes_with_several_processes_are_told_to_share_their_cores() -> None:
    assert ["OMP_NUM_THREADS" in env for env in ddp_environments()] == [True, True, False]


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [(Launcher.COMMAND, ["9"]), (Launcher.DDP, ["4", "4", "4"]), (Launcher.TORCHRUN, ["4", "4"])],
)
def test_a_job_that_is_limited_to_some_cores_has_as_many_threads(launcher: Launcher, expected: list[str]) -> None:
    placement = Placement((replace(UNEQUAL.shares[0], cpus=9), replace(UNEQUAL.shares[1], cpus=4)))
    free = job(launcher, "x")
    limited = replace(free, spec=replace(free.spec, resources=replace(free.spec.resources, cpus=4)))

    def threads(of: Job) -> list[str | None]:
        made = plan(of, 1, placement, Surroundings(MEETING, PYTHONS))
        return [env.get("OMP_NUM_THREADS") for env in environments(made)]

    assert threads(limited) == expected
    assert set(threads(free)) <= {"1", None}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_said_of_a_job_or_a_node_is_not_overridden_by_a_default(name: str) -> None:
    assert ddp_environments(env={name: "mine"})[0][name] == "mine"
    assert name not in ddp_environments(node_env={name: "mine"})[0]  # a rank inherits it there
    assert ddp_environments(node_env={name: "mine"}, env={name: "job's"})[0][name] == "job's"


def test_a_job_cannot_say_who_its_ranks_are_or_what_ugro_tells_them() -> None:
    wrong = {"RANK": "9", "MASTER_PORT": "1", "UGRO_NODE": "x", "UGRO_RESUME_DIR": "x", "CUDA_VISIBLE_DEVICES": "9"}
    env = ddp_environments(env=wrong, extra={"UGRO_RESUME_DIR": "/right"})[0]
    assert [env[name] for name in wrong] == ["0", "29500", "gpu1", "/right", "0,2"]


def test_a_rank_knows_how_often_it_was_tried_before() -> None:
    third = job(Launcher.DDP, "x", attempt=3, retries=5)
    env = environments(plan(third, 3, UNEQUAL, Surroundings(MEETING, PYTHONS)))[0]
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "5")
    free_of_charge = ddp_environments(attempt=3)[0]
    assert free_of_charge["TORCHELASTIC_MAX_RESTARTS"] == "2"


def test_torchrun_gets_static_rendezvous_and_no_restarts_of_its_own() -> None:
    made = plan(job(Launcher.TORCHRUN, "train.py", "--x"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    first, second = (node.ranks[0] for node in made.nodes)
    assert second.argv[:4] == ("/opt/b/python3", "-u", "-m", "torch.distributed.run")
    assert second.argv[4:] == (
        *("--nnodes=2", "--node-rank=1", "--nproc-per-node=1"),
        *("--master-addr=10.0.0.1", "--master-port=29500", "--max-restarts=0", "train.py", "--x"),
    )
    assert "--nproc-per-node=2" in first.argv
    assert dict(first.env)["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "RANK" not in dict(first.env)


def test_only_what_has_ranks_needs_a_place_to_meet() -> None:
    assert [needs_rendezvous(job(launcher)) for launcher in Launcher] == [False, True, True, True]


def balanced(
    launcher: Launcher, balance: str | None, env: Env | None = None, speeds: Speeds | None = None
) -> list[Env]:
    plain = job(launcher, "train.py", env=env)
    made = plan(
        replace(plain, spec=replace(plain.spec, balance=balance)),
        1,
        UNEQUAL,
        Surroundings(MEETING, PYTHONS, speeds=speeds),
    )
    return environments(made)


def test_ranks_are_told_how_often_to_synchronise() -> None:
    plain = job(Launcher.DDP, "train.py")
    for mode in ("local", None):
        asked = replace(plain, spec=replace(plain.spec, train_sync=mode))
        for env in environments(plan(asked, 1, UNEQUAL, Surroundings(MEETING, PYTHONS))):
            assert env.get("UGRO_SYNC") == mode


@pytest.mark.parametrize("launcher", [Launcher.DDP, Launcher.TORCHRUN])
def test_ranks_are_told_how_to_balance_and_how_fast_they_should_be(launcher: Launcher) -> None:
    speeds = Speeds((1.0, 1.0, 0.49432), "the models")
    for env in balanced(launcher, "static", speeds=speeds):
        assert env["UGRO_BALANCE"] == "static"
        assert env["UGRO_SPEEDS"] == "1,1,0.494"
        assert env["UGRO_SPEEDS_SOURCE"] == "the models"


def test_speeds_that_the_user_gave_win_and_without_a_wish_nothing_is_said() -> None:
    given = balanced(Launcher.DDP, "static", {"UGRO_SPEEDS": "3,2,1"}, Speeds((1.0, 1.0, 1.0), "cores"))
    assert [env["UGRO_SPEEDS"] for env in given] == ["3,2,1"] * 3
    unknown = balanced(Launcher.DDP, "static", speeds=Speeds((), "equal: no figures for X"))
    assert "UGRO_SPEEDS" not in unknown[0]
    assert not [name for name in balanced(Launcher.DDP, None)[0] if name.startswith(("UGRO_BAL", "UGRO_SPE"))]


@pytest.mark.parametrize("launcher", Launcher)
@pytest.mark.parametrize("where", [UNEQUAL, Placement((Share("gpu2"), Share("gpu1", gpus=(0, 1, 3))))])
def test_the_ranks_of_a_node_are_those_that_a_plan_starts_there(launcher: Launcher, where: Placement) -> None:
    one = job(launcher, "train.py")
    planned = {part.node: part.ranks for part in plan(one, 1, where, Surroundings(MEETING, PYTHONS)).nodes}
    for node in where.nodes:
        assert [*ranks_on(one.spec, where, node)] == [rank.rank for rank in planned.get(node, ())]


MADE = Made("e1", "/root/.ugro/environments/e1/bin/python", "3.11.2", 0, "", "", is_made=True)
FOUND = Made("/opt/conda", "/opt/conda/bin/python", "3.11.2", 0, "", "")


@pytest.mark.parametrize(("launcher", "word"), [(Launcher.DDP, "-u"), (Launcher.TORCHRUN, "-u")])
def test_ranks_start_with_the_python_of_their_environment(launcher: Launcher, word: str) -> None:
    around = Surroundings(MEETING, PYTHONS, environments={"gpu1": MADE, "gpu2": FOUND})
    first, second = plan(job(launcher, "train.py"), 1, UNEQUAL, around).nodes
    assert first.ranks[0].argv[:2] == (MADE.python, word)
    assert (first.environment, first.path) == ("e1", ("/root/.ugro/environments/e1/bin",))
    assert dict(first.ranks[0].env)["VIRTUAL_ENV"] == "/root/.ugro/environments/e1"
    assert second.ranks[0].argv[0] == FOUND.python
    assert (second.environment, second.path) == (None, ("/opt/conda/bin",)), "a user's own is not UGRO's to keep"


def test_a_command_finds_the_programs_of_its_environment_first() -> None:
    around = Surroundings(None, PYTHONS, environments={"gpu1": MADE})
    (node,) = plan(job(Launcher.COMMAND, "python", "eval.py", env={"VIRTUAL_ENV": "mine"}), 1, UNEQUAL, around).nodes
    assert node.ranks[0].argv == ("python", "eval.py")
    assert node.path == ("/root/.ugro/environments/e1/bin",)
    assert dict(node.ranks[0].env)["VIRTUAL_ENV"] == "/root/.ugro/environments/e1"


def test_without_an_environment_nothing_is_different_and_nothing_is_found_out() -> None:
    (node,) = plan(job(Launcher.COMMAND, "true"), 1, UNEQUAL, Surroundings(None, PYTHONS)).nodes
    assert (node.environment, node.path) == (None, ())
    assert "VIRTUAL_ENV" not in dict(node.ranks[0].env)
    assert follows_from_spec(JobSpec("a", ("true",)))
    assert not follows_from_spec(JobSpec("a", ("true",), environment=EnvRequest(requirements=("x",))))


@pytest.mark.parametrize("launcher", list(Launcher))
def test_ugros_own_package_is_part_of_the_plan_of_every_node_and_that_is_recorded(launcher: Launcher) -> None:
    made = plan(job(launcher, "train.py"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS, sdk="a1"))
    assert {node.sdk for node in made.nodes} == {"a1"}
    # A newer agent that asks for the same run again must not ask for another package.
    assert not follows_from_spec(replace(job(Launcher.COMMAND, "x").spec, sdk=True))


def test_an_elastic_training_has_a_store_on_its_first_node_that_outlives_its_ranks_and_has_no_device() -> None:
    elastic = job(Launcher.DDP, "train.py")
    elastic = replace(elastic, spec=replace(elastic.spec, elastic=Elastic(2, 60.0)))
    made = plan(elastic, 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    first, second = made.nodes
    assert first.store is not None
    assert second.store is None
    assert first.store.argv == ("/opt/a/python3", "-m", "ugro.train.elastic_meeting")
    assert dict(first.store.env)["MASTER_PORT"] == "29500"
    assert dict(first.store.env)["CUDA_VISIBLE_DEVICES"] == ""
    for env in environments(made):
        assert (env["UGRO_MIN_RANKS"], env["UGRO_RANK_TIMEOUT_S"]) == ("2", "60.0")
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    usual = plan(job(Launcher.DDP, "train.py"), 1, UNEQUAL, Surroundings(MEETING, PYTHONS))
    assert all(node.store is None for node in usual.nodes)
    assert all("UGRO_MIN_RANKS" not in env for env in environments(usual))
