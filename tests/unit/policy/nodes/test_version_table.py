"""Versions of Python environments side by side: where nodes differ, whose wish that is, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

from ugro.features.environments.model import EnvRequest, Made, NodeVersions, Setup
from ugro.features.environments.rules.naming import in_words
from ugro.features.environments.rules.versions import (
    Found,
    Installed,
    Need,
    compared,
    differences,
    differing_packages,
    judge_machines,
    packages_among,
    packages_in,
)
from ugro.kernel.agent.model import Grade
from ugro.kernel.jobs.model import Launcher

ON_GPUS = Need(Launcher.DDP, uses_gpus=True)


def found(node: str, *packages: str, python: str = "3.11.2", label: str = "", environment: str | None = "e1") -> Found:
    pairs = tuple((name, version) for name, _, version in (package.partition("==") for package in packages))
    path = f"/root/.ugro/environments/{environment}/bin/python"
    installed = Installed(
        node, python, path, packages_among(python, pairs), "570.1", True, environment=environment, label=label
    )
    return Found(installed, pairs)


def test_all_packages_of_an_environment_say_what_ranks_must_share() -> None:
    packages = packages_among("3.11.2", [("torch", "2.13.0"), ("nvidia_nccl_cu12", "2.27"), ("numpy", "2.3")])
    assert (packages.python, packages.torch, packages.nccl, packages.cuda) == ("3.11.2", "2.13.0", "2.27", None)
    with_cuda = packages_among("3.11.2", [("torch", "2.13.0"), ("nvidia-cuda-runtime", "13.0.48")])
    assert (with_cuda.cuda, with_cuda.nccl) == ("13.0", None)
    assert packages_among("3.11.2", [("torch", "2.13.0+cu126")]).cuda == "12.6"


def test_equal_environments_are_said_to_agree_and_nothing_is_marked() -> None:
    nodes = [found("n1", "torch==2.13.0", "numpy==2.3"), found("n2", "torch==2.13.0", "numpy==2.3")]
    rows, findings = compared([NodeVersions("n1", seconds=2.0), NodeVersions("n2")], nodes)
    assert [(row.torch, row.driver, row.environment, row.differs, row.others) for row in rows] == [
        ("2.13.0", "570.1", "e1", (), ())
    ] * 2
    assert rows[0].seconds == 2.0, "what the row had stays"
    assert [one.text for one in findings] == ["nodes agree on Python 3.11, torch 2.13.0, GPU driver 570.1"]


def test_what_differs_is_marked_at_the_node_that_is_unlike_most() -> None:
    nodes = [found(f"n{n}", "torch==2.13.0", "numpy==2.3", "pip==23") for n in (1, 2)]
    nodes.append(found("n3", "torch==2.12.1", "numpy==1.26", "timm==1.0", "pip==24"))
    rows, findings = compared([NodeVersions(f"n{n}") for n in (1, 2, 3)], nodes)
    assert [row.differs for row in rows] == [(), (), ("torch", "numpy", "timm")], "pip is nobody's business"
    assert rows[2].others == (("numpy", "1.26"), ("timm", "1.0"))
    assert rows[0].others == (("numpy", "2.3"), ("timm", None))
    texts = {one.text: one for one in findings}
    torch = texts["torch differs: n1 and n2 have 2.13.0, n3 2.12.1"]
    assert torch.grade is Grade.WARNING
    assert torch.remedy == "pin it for all nodes, below environment: packages: [torch==2.13.0, …]"
    assert "2 other packages differ: numpy (n1 and n2 2.3, n3 1.26), timm (n1 and n2 none, n3 1.0)" in texts


def test_existing_environments_that_differ_so_that_jobs_break_are_a_failure() -> None:
    nodes = [found(f"n{n}", f"torch=={torch}", environment=None) for n, torch in ((1, "2.13.0"), (2, "2.12.1"))]
    rows = [NodeVersions("n1"), NodeVersions("n2")]
    checked, findings = compared(rows, nodes, must_agree=True)
    [failed] = [one for one in findings if one.grade is Grade.FAILED]
    assert failed.text == "torch differs: n1 has 2.13.0, n2 2.12.1"
    assert Setup("~/env", tuple(checked), tuple(findings)).exit_code == 1
    patch = [nodes[0], found("n2", "torch==2.13.1", environment=None)]
    assert all(one.grade is not Grade.FAILED for one in compared(rows, patch, must_agree=True)[1])


def test_a_build_for_cpus_is_told_from_one_for_cuda_of_the_same_version() -> None:
    torch = (("torch", "2.13.0"),)
    made = Made("/env", "/env/bin/python", "3.11.2", 0, "", "", torch, torch_cuda="12.6", nccl="2.27.3")
    nodes = [
        Found(Installed(node, one.version, one.python, packages_in(one)), one.packages)
        for node, one in (("n1", made), ("n2", replace(made, torch_cuda="none (cpu)", nccl=None)))
    ]
    [refused] = [one for one in differences([one.installed for one in nodes], ON_GPUS) if one.is_fatal]
    assert refused.text == "CUDA differs: n1 has 12.6, n2 none (cpu)"
    rows, findings = compared([NodeVersions("n1"), NodeVersions("n2")], nodes, must_agree=True)
    assert [(row.cuda, row.nccl) for row in rows] == [("12.6", "2.27.3"), ("none (cpu)", None)]
    assert [one.text for one in findings if one.grade is Grade.FAILED] == [refused.text]
    older = replace(nodes[1].installed, packages=packages_in(replace(made, nccl="2.26.2")))
    assert any(one.is_fatal for one in differences([nodes[0].installed, older], ON_GPUS)), "NCCL differs"


def test_a_node_that_failed_is_in_the_table_and_in_no_comparison() -> None:
    rows, _ = compared([NodeVersions("n1", error="no space"), NodeVersions("n2")], [found("n2", "torch==2.13.0")])
    assert [(row.error, row.torch) for row in rows] == [("no space", None), (None, "2.13.0")]


def test_a_difference_that_a_label_asked_for_is_said_and_needs_no_remedy() -> None:
    nodes = [found(f"n{n}", "torch==2.13.0+cu126") for n in (1, 2)]
    nodes.append(found("n3", "torch==2.13.0+cu118", label="old", environment="e2"))
    rows, findings = compared([NodeVersions(f"n{n}") for n in (1, 2, 3)], nodes)
    assert (rows[2].label, rows[2].differs) == ("old", ("CUDA",))
    said = next(one for one in findings if one.text.startswith("CUDA"))
    assert said.text == "CUDA differs: n1 and n2 have 12.6, n3 11.8; n3 has the override for label old"
    assert (said.grade, said.remedy) == (Grade.OK, None)


def test_a_difference_among_nodes_with_the_same_label_is_not_the_labels_wish() -> None:
    nodes = [
        found("n1", "torch==2.13.0+cu126"),
        found("n2", "torch==2.13.0+cu118", label="old"),
        found("n3", "torch==2.13.0+cu126", label="old"),
    ]
    _, findings = compared([NodeVersions(f"n{n}") for n in (1, 2, 3)], nodes)
    said = next(one for one in findings if one.text.startswith("CUDA"))
    assert (said.grade, "override" in said.text) == (Grade.WARNING, False)


def test_an_override_that_breaks_the_job_is_refused_all_the_same() -> None:
    nodes = [found("n1", "torch==2.13.0"), found("n2", "torch==2.6.0", label="old")]
    [refused] = [one for one in differences([one.installed for one in nodes], ON_GPUS) if one.is_fatal]
    assert refused.text == "torch differs: n1 has 2.13.0, n2 2.6.0; n2 has the override for label old"
    assert refused.hint is not None


def test_where_jobs_bring_their_packages_doctor_compares_the_drivers_alone() -> None:
    nodes = [found("n1", "torch==2.13.0", environment=None).installed, found("n2", environment=None).installed]
    assert [one.grade for one in judge_machines(nodes)] == [Grade.OK]
    older = replace(nodes[1], gpu_driver="470.1")
    assert [one.text for one in judge_machines([nodes[0], older])] == [
        "GPU driver differs: n1 has 570.1, n2 470.1",
        "jobs run in the Python environment of cluster.yaml; for its versions: ugro node setup",
    ]


def test_what_an_environment_lacks_is_added_where_it_is_asked_for() -> None:
    nodes = [found("n1", "torch==2.13.0", python="3.12.1"), found("n2", "numpy==2.3")]
    hints = {one.text.split()[0]: one.hint for one in differences([one.installed for one in nodes], ON_GPUS)}
    assert hints["torch"] == "add it below environment: packages: [torch==2.13.0, …]"
    assert hints["Python"] == 'pin it for all nodes, below environment: python: "3.12"'


def test_names_of_packages_are_compared_as_an_index_does() -> None:
    assert differing_packages({"n1": [("Typing_Extensions", "4.1")], "n2": [("typing-extensions", "4.1")]}) == {}


def test_the_exit_code_is_that_of_doctor() -> None:
    ok, failed = NodeVersions("n1"), NodeVersions("n2", error="no space")
    away = NodeVersions("n3", error="refused", is_unreachable=True)
    codes = [Setup("torch", nodes).exit_code for nodes in ((ok,), (ok, failed), (ok, failed, away))]
    assert codes == [0, 1, 5]


def test_what_was_asked_for_is_said_in_a_few_words_without_passwords() -> None:
    lines = ("--extra-index-url https://x", "# mine", "torch==2.13.0 --hash=sha256:00", "a", "b", "c", "d # why", "e")
    assert in_words(EnvRequest(requirements=lines, python="3.11")) == "torch==2.13.0, a, b, c and 2 more, Python 3.11"
    assert in_words(EnvRequest(lock="…", lock_name="uv.lock")) == "the packages of uv.lock"
    assert in_words(EnvRequest(existing="~/env")) == "~/env, which exists already"
    assert "hunter2" not in in_words(EnvRequest(requirements=("x @ https://ann:hunter2@host/x.whl",)))
