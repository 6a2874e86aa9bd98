"""What is decided before ranks start: whether environments agree, and where ranks meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ugro.features.environments.rules.versions import (
    Difference,
    Installed,
    Need,
    differences,
    judge_versions,
    lack_of_imports,
)
from ugro.kernel.agent.model import Grade
from ugro.kernel.jobs.model import Cause, Launcher
from ugro.kernel.links.diagnosis import Apart, Endpoint, Meeting, addresses_to_try, asked_for, meet, pairs
from ugro.kernel.links.rules import Unknown
from ugro.node.messages import Connections, Missed, Packages, Reached, Target

ON_GPUS = Need(Launcher.DDP, uses_gpus=True)
ON_CPUS = Need(Launcher.DDP)


def installed(node: str, torch: str | None = "2.6.0", python: str = "3.11.7", **more: Any) -> Installed:
    return Installed(node, python, "/usr/bin/python3", Packages(python, torch, **more))


def only(found: list[Difference]) -> Difference:
    assert len(found) == 1, found
    return found[0]


# --- environments -----------------------------------------------------------------------------------------------


def test_equal_environments_need_no_word() -> None:
    assert differences([installed("gpu1"), installed("gpu2", python="3.11.9")], ON_GPUS) == []


def test_another_torch_is_named_with_who_has_it_and_how_to_mend_it() -> None:
    found = only(differences([installed("gpu1"), installed("gpu2", "2.5.1+cpu"), installed("gpu3")], ON_CPUS))
    assert found.text == "torch differs: gpu1 and gpu3 have 2.6.0, gpu2 2.5.1 (+cpu)"
    assert found.hint == "ugro exec gpu2 -- /usr/bin/python3 -m pip install torch==2.6.0"
    assert (found.is_fatal, found.node) == (True, "gpu2")


@pytest.mark.parametrize(
    ("one", "other", "is_fatal"),
    [
        ({"torch": "2.6.0"}, {"torch": "2.6.1"}, False),
        ({"torch": "2.6.0"}, {"torch": "2.10.0"}, True),
        ({"python": "3.11.7"}, {"python": "3.12.7"}, True),
        ({"nccl": "2.21.5"}, {"nccl": "2.21.6"}, True),
        ({"torch": "2.6.0+cu124"}, {"torch": "2.6.0+cu121"}, False),
        ({"torch": "2.6.0+cu124"}, {"torch": "2.6.0+cpu"}, True),
    ],
)
def test_what_breaks_a_job_on_gpus_is_told_apart_from_what_does_not(
    one: dict[str, str], other: dict[str, str], is_fatal: bool
) -> None:
    assert only(differences([installed("gpu1", **one), installed("gpu2", **other)], ON_GPUS)).is_fatal is is_fatal


def test_a_job_without_gpus_does_not_care_about_cuda_and_nccl() -> None:
    nodes = [installed("gpu1", "2.6.0+cu124", nccl="2.21.5"), installed("gpu2", "2.6.0+cpu", nccl="2.19.3")]
    assert differences(nodes, ON_CPUS) == []


def test_torch_on_some_nodes_only_is_refused() -> None:
    found = only(differences([installed("gpu1"), installed("gpu2", None)], ON_CPUS))
    assert found.text == "torch is not installed on gpu2; others have 2.6.0"
    assert found.is_fatal


def test_torch_on_no_node_is_only_noted_unless_torchrun_needs_it() -> None:
    nodes = [installed("gpu1", None), installed("gpu2", None)]
    assert not only(differences(nodes, ON_CPUS)).is_fatal
    assert only(differences(nodes, Need(Launcher.TORCHRUN))).is_fatal


def test_missing_torch_is_a_warning_of_doctor_where_nodes_have_gpus() -> None:
    gpus = [replace(installed(name, None), has_gpus=True) for name in ("gpu1", "gpu2")]
    found = next(one for one in judge_versions(gpus) if "torch" in one.text)
    assert found.grade is Grade.WARNING
    assert found.text == "torch is not installed on gpu1 and gpu2: trainings cannot use the GPUs of gpu1 and gpu2"
    assert found.remedy == "ugro exec gpu1 gpu2 -- /usr/bin/python3 -m pip install torch"
    assert judge_versions(gpus[:1])[0].grade is Grade.WARNING, "also with one node"
    without = judge_versions([installed("cpu1", None), installed("cpu2", None)])
    assert {one.grade for one in without} == {Grade.OK}


def test_a_python_of_the_system_gets_a_virtual_environment_instead_of_pip() -> None:
    managed = installed("gpu2", None, is_managed=True)
    found = only(differences([installed("gpu1"), managed], ON_CPUS))
    assert found.hint == (
        "ugro exec gpu2 -- sh -c '/usr/bin/python3 -m venv ~/ugro-env && ~/ugro-env/bin/pip install torch==2.6.0', "
        "then under gpu2 in cluster.yaml: python: ~/ugro-env/bin/python"
    )


def test_who_lacks_what_the_script_imports_is_named_with_a_way_out() -> None:
    assert lack_of_imports({"gpu1": []}, {}) is None
    found = lack_of_imports({"gpu1": [], "gpu3": ["timm", "torch"]}, {"gpu3": "/usr/bin/python3"})
    assert found is not None
    assert (found.cause, found.node) == (Cause.IMPORT_ERROR, "gpu3")
    assert found.reason == "not started: gpu3 lacks timm and torch, which the script imports"
    several = lack_of_imports({"gpu1": ["torch"], "gpu2": ["timm"], "gpu3": ["torch"]}, {})
    assert several is not None
    assert several.reason == "not started: gpu1 and gpu3 lack torch; gpu2 lacks timm, which the script imports"
    assert found.hint is not None
    assert found.hint.startswith("install what is missing for /usr/bin/python3 on gpu3, or name a Python")


def test_a_node_that_cannot_tell_is_noted_and_not_blamed() -> None:
    silent = Installed("gpu2", "3.11.7", "/usr/bin/python3", Unknown("it hangs"))
    found = only(differences([installed("gpu1"), silent], ON_CPUS))
    assert found.text == "gpu2: cannot tell which packages are installed: it hangs"
    assert not found.is_fatal


def test_a_command_may_run_anywhere() -> None:
    assert differences([installed("gpu1"), installed("gpu2", None, "3.9.1")], Need(Launcher.COMMAND, True)) == []


def test_what_breaks_it_comes_first() -> None:
    nodes = [installed("gpu1", "2.6.0+cu124", nccl="2.19"), installed("gpu2", "2.6.0+cu121", nccl="2.20")]
    found = differences(nodes, ON_GPUS)
    assert [one.is_fatal for one in found] == [True, False]


# --- where to meet ----------------------------------------------------------------------------------------------

PORT, OTHER = 29500, 40000
A, B = "10.0.0.1", "192.168.1.1"
ENDPOINTS = [
    Endpoint("gpu1", "b1", (A, B)),
    Endpoint("gpu2", "b2", ("10.0.0.2",)),
    Endpoint("gpu3", "b3", ("10.0.0.3",)),
]


def both(node: str, address: str, interface: str, peer: str) -> tuple[Reached, Reached]:
    """At the port where ranks meet, and at any other."""
    return (
        Reached(node, PORT, address, interface, peer, 0.001),
        Reached(node, OTHER, address, interface, peer, 0.001),
    )


def crossings(**changed: Connections) -> dict[str, Connections]:
    """Everybody reaches everybody over 10.0.0.x."""
    usual = {
        "gpu1": Connections((*both("gpu2", "10.0.0.2", "eth0", "eth2"), *both("gpu3", "10.0.0.3", "eth0", "eth3"))),
        "gpu2": Connections((*both("gpu1", A, "eth2", "eth0"), *both("gpu3", "10.0.0.3", "eth2", "eth3"))),
        "gpu3": Connections((*both("gpu1", A, "eth3", "eth0"), *both("gpu2", "10.0.0.2", "eth3", "eth2"))),
    }
    return {**usual, **changed}


def test_ranks_meet_where_all_reach_the_first_node_over_each_ones_own_interface() -> None:
    found = meet(ENDPOINTS, PORT, crossings())
    assert found == Meeting(A, (("gpu1", "eth0"), ("gpu2", "eth2"), ("gpu3", "eth3")))


def test_an_address_that_one_node_does_not_reach_is_passed_over() -> None:
    reaches_both = Connections((*both("gpu1", A, "wlan0", "eth0"), *both("gpu1", B, "eth2", "eth1")))
    only_second = Connections(both("gpu1", B, "eth3", "eth1"), (Missed("gpu1", PORT, A, "timed out"),))
    back = Connections((*both("gpu2", "10.0.0.2", "eth1", "eth2"), *both("gpu3", "10.0.0.3", "eth1", "eth3")))
    seen = {
        "gpu1": back,
        "gpu2": Connections((*reaches_both.reached, *both("gpu3", "10.0.0.3", "eth2", "eth3"))),
        "gpu3": Connections((*only_second.reached, *both("gpu2", "10.0.0.2", "eth3", "eth2")), only_second.missed),
    }
    assert meet(ENDPOINTS, PORT, seen) == Meeting(B, (("gpu1", "eth1"), ("gpu2", "eth2"), ("gpu3", "eth3")))


def test_who_cannot_reach_the_first_node_is_named_with_what_was_tried() -> None:
    lonely = Connections(both("gpu2", "10.0.0.2", "eth3", "eth2"), (Missed("gpu1", PORT, A, "timed out"),))
    found = meet(ENDPOINTS, PORT, crossings(gpu3=lonely))
    assert isinstance(found, Apart)
    assert found.text == f"gpu3 cannot connect to gpu1 at port {PORT} ({A}: timed out)"
    assert "sudo ufw allow from 10.0.0.3" in found.hint


def test_two_nodes_that_only_reach_the_first_are_found_too() -> None:
    half = Connections(both("gpu1", A, "eth2", "eth0"), (Missed("gpu3", OTHER, "10.0.0.3", "refused"),))
    found = meet(ENDPOINTS, PORT, crossings(gpu2=half))
    assert isinstance(found, Apart)
    assert found.text == "gpu2 cannot connect to gpu3 (10.0.0.3: refused)"


def test_a_node_that_lets_nobody_in_but_at_the_rendezvous_is_no_place_for_ranks() -> None:
    half = Connections(
        (Reached("gpu1", PORT, A, "eth2", "eth0", 0.001), *both("gpu3", "10.0.0.3", "eth2", "eth3")),
        (Missed("gpu1", OTHER, A, "timed out"),),
    )
    found = meet(ENDPOINTS, PORT, crossings(gpu2=half))
    assert isinstance(found, Apart)
    assert "gpu2 cannot connect to gpu1" in found.text


def test_nodes_with_no_network_in_common_are_told_so() -> None:
    elsewhere = Connections((*both("gpu1", B, "eth3", "eth1"), *both("gpu2", "10.0.0.2", "eth3", "eth2")))
    found = meet(ENDPOINTS, PORT, crossings(gpu3=elsewhere))
    assert isinstance(found, Apart)
    assert found.text == f"no address of gpu1 can be reached by all: gpu2 reaches it at {A}; gpu3 reaches it at {B}"


def test_many_broken_pairs_blame_the_node_they_have_in_common() -> None:
    nobody = Connections((), (Missed("gpu2", OTHER, "10.0.0.2", "x"), Missed("gpu3", OTHER, "10.0.0.3", "x")))
    found = meet(ENDPOINTS, PORT, crossings(gpu1=nobody))
    assert isinstance(found, Apart)
    assert found.node == "gpu1"


def test_loopback_is_tried_only_between_nodes_of_one_machine() -> None:
    one, same, other = Endpoint("a", "b1"), Endpoint("b", "b1", ("10.0.0.5",)), Endpoint("c", "b2")
    assert addresses_to_try(one, same) == ["127.0.0.1", "10.0.0.5"]
    assert addresses_to_try(other, same) == ["10.0.0.5"]
    assert addresses_to_try(Endpoint("a", ""), Endpoint("b", "")) == []  # neither says which machine it is


def test_what_the_user_wants_and_dials_is_tried_first() -> None:
    place = Endpoint("a", "b1", ("172.17.0.1", "10.0.0.5"), host="10.0.0.5", wanted="10.9.9.9")
    assert addresses_to_try(Endpoint("b", "b2"), place) == ["10.9.9.9", "10.0.0.5", "172.17.0.1"]
    for host in ("", "gpu1.lan", "fd00::2", "10.0.0.5", "127.0.1.2"):
        by_name = Endpoint("a", "b1", ("10.0.0.5",), host=host)
        assert addresses_to_try(Endpoint("b", "b2"), by_name) == ["10.0.0.5"]


def test_an_address_that_nobody_asked_for_is_not_believed() -> None:
    target = Target("gpu1", (A, B), (PORT,), "word", "reply")
    honest = Reached("gpu1", PORT, B, "eth3", "eth1", 0.01)
    lies = [replace(honest, address="0.0.0.0"), replace(honest, port=22), replace(honest, node="gpu2")]
    missed = (Missed("gpu1", PORT, A, "refused"),)
    assert asked_for(Connections((*lies, honest), missed), [target]) == Connections((honest,), missed)


def test_of_many_nodes_all_try_the_first_and_each_its_neighbour() -> None:
    names = [f"n{number}" for number in range(50)]
    tried = pairs(names)
    assert {one for one, other in tried if other == "n0"} == set(names[1:])
    assert {("n7", "n8"), ("n49", "n0")} <= set(tried)
    assert len(tried) < 2 * len(names)
    assert len(pairs(names[:3])) == 6
