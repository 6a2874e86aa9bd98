"""Which names are one machine, which of them is used, and who is named as the holder of a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from ugro.kernel.links.model import Facts, Gpu, GpuHolder, Machine
from ugro.kernel.links.rules import (
    Sighting,
    drained_machines,
    is_same_machine,
    judge_names,
    second_names,
    with_other_holders,
)

MACHINE = Machine(
    hostname="gpu1",
    os="Debian",
    kernel="6.1",
    arch="x86_64",
    boot_id="boot-1",
    user="ann",
    root="/home/ann/grid_workspace",
    python="3.11",
    python_path="/usr/bin/python3",
    cores=8,
    cpu_model="x",
    memory_total_bytes=2**34,
    machine_id="id-1",
    home="/home/ann",
    home_id="1:2",
)
GPUS = frozenset({"GPU-a", "GPU-b"})
GPU1 = Sighting("gpu1", MACHINE, GPUS)
LAN = Sighting("gpu1-lan", MACHINE, GPUS)


def other(fields: dict[str, Any]) -> Sighting:
    return Sighting("other", replace(MACHINE, **fields))


def test_a_second_name_with_the_same_gpus_or_the_same_folder_is_the_same_machine() -> None:
    assert is_same_machine(GPU1, LAN)
    assert is_same_machine(replace(GPU1, gpus=frozenset()), LAN), "by its home and folder"
    bob = replace(MACHINE, user="bob", home="/home/bob", home_id="1:3", root="/home/bob/grid_workspace")
    assert is_same_machine(GPU1, Sighting("bob", bob, frozenset({"GPU-b"}))), "another account, and a GPU in common"


@pytest.mark.parametrize(
    "fields",
    [
        {"boot_id": "boot-2"},  # a copy of a virtual machine, with its machine id and home
        {"machine_id": "id-2"},  # a container
        {"home_id": "9:9"},  # a container of the same image
        {"home": "/lab/n2", "home_id": "1:9", "root": "/lab/n2/grid_workspace"},  # a simulated node
        {"user": "bob", "home": "/home/bob", "home_id": "1:3"},  # another account
        {"root": "/data/second"},  # a node of its own in another folder, as somebody wanted it
        {"home_id": ""},  # nothing is known of its home
    ],
)
def test_nodes_that_have_only_something_in_common_are_different(fields: dict[str, str]) -> None:
    assert not is_same_machine(Sighting("gpu1", MACHINE), other(fields))


def test_without_a_boot_id_nothing_is_concluded() -> None:
    unknown = replace(MACHINE, boot_id="")
    assert not is_same_machine(replace(GPU1, machine=unknown), replace(LAN, machine=unknown))


def test_the_same_gpus_on_another_boot_are_no_proof() -> None:
    assert not is_same_machine(GPU1, replace(LAN, machine=replace(MACHINE, boot_id="boot-2")))


def test_the_first_name_is_used_unless_the_second_has_jobs_or_alone_answers() -> None:
    assert second_names([GPU1, LAN]) == {"gpu1-lan": "gpu1"}
    assert second_names([GPU1, replace(LAN, has_jobs=True)]) == {"gpu1": "gpu1-lan"}
    assert second_names([replace(GPU1, is_reachable=False), LAN]) == {"gpu1": "gpu1-lan"}
    unreachable = replace(GPU1, is_reachable=False, has_jobs=True)
    assert second_names([unreachable, LAN]) == {"gpu1-lan": "gpu1"}, "its jobs may well go on"
    both = [replace(GPU1, has_jobs=True), replace(LAN, has_jobs=True)]
    assert second_names(both) == {"gpu1-lan": "gpu1"}


def test_of_many_names_one_is_used_in_whatever_order_they_stand() -> None:
    gpu2 = Sighting("gpu2", replace(MACHINE, boot_id="boot-2"), frozenset({"GPU-c"}))
    third = Sighting("gpu1-vpn", MACHINE)
    for names in permutations([GPU1, LAN, third, gpu2]):
        seconds = second_names(names)
        first = next(one.name for one in names if one is not gpu2)
        assert seconds == {one.name: first for one in names if one is not gpu2 and one.name != first}


def test_a_drain_holds_for_the_machine_under_whichever_name_it_is_used() -> None:
    seconds = {"gpu1": "gpu1-lan"}  # the first name cannot be reached
    assert drained_machines({"gpu1": "new fans"}, seconds) == {"gpu1": "new fans", "gpu1-lan": "new fans"}
    assert drained_machines({"gpu1": "a", "gpu1-lan": "b"}, seconds)["gpu1-lan"] == "b"
    assert drained_machines({"gpu2": ""}, seconds) == {"gpu2": ""}


def test_doctor_has_one_finding_for_each_second_name() -> None:
    [finding] = judge_names(["gpu1", "gpu1-lan"], {"gpu1-lan": "gpu1"})
    assert (finding.subject, finding.grade, finding.text) == (
        "gpu1-lan",
        "warning",
        "the same machine as gpu1: not used",
    )
    assert finding.remedy == "remove the name: ugro node rm gpu1-lan"


def facts(*holders: GpuHolder | None) -> Facts:
    gpus = tuple(Gpu(index, f"GPU-{index}", "x", holder=holder) for index, holder in enumerate(holders))
    return Facts(0.0, 0.0, (0.0, 0.0, 0.0), None, 1, 1, gpus=gpus)


def test_a_long_name_of_ours_that_a_claim_has_cut_is_no_strangers() -> None:
    node = "gpu-03.hpc.physics.university-of-somewhere.example.edu"
    cut = GpuHolder("me", node[:40], "7", 1, "ann", 0.0)
    short = replace(cut, node=node[:6])
    assert [gpu.holder is None for gpu in with_other_holders(facts(cut, short), "me", node).gpus] == [True, False]


def test_only_strangers_are_named_as_holders() -> None:
    own = GpuHolder("me", "gpu1", "7", 1, "ann", 0.0)
    strangers = [
        replace(own, agent="you"),  # the same job number says nothing
        replace(own, node="gpu1-lan"),
        replace(own, is_leftover=True),  # of a job of ours whose processes have not ended
    ]
    elsewhere = replace(own, node="ann@gpu1")  # in the account of a person
    strangers.append(replace(own, node="ann@gpu2"))
    strangers += [GpuHolder("", "", "", 0, user, 0.0) for user in ("eve", "")]
    seen = with_other_holders(facts(None, own, elsewhere, *strangers), "me", "gpu1")
    assert [str(gpu.holder) if gpu.holder else None for gpu in seen.gpus] == [
        None,
        None,
        None,
        "job 7 of another agent (user ann, since 00:00 UTC)",
        "job 7 on gpu1-lan (user ann, since 00:00 UTC)",
        "processes that are left of job 7 on gpu1 (user ann, since 00:00 UTC)",
        "job 7 on ann@gpu2 (user ann, since 00:00 UTC)",
        "a process of user eve",
        "a process of another account",
    ]
