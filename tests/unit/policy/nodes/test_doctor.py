from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ugro.features.environments.rules.versions import Installed, judge_versions
from ugro.features.health.rules import judge_folders, judge_node
from ugro.features.power.model import OwnerReport, Then, When
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.jobs.model import Placement, Share
from ugro.kernel.jobs.scheduling.fit import unlimited_memory
from ugro.kernel.links.diagnosis import Endpoint, judge_pairs
from ugro.kernel.links.model import Facts, Gpu, GpuProcess, Limits, LinkQuality, Machine, NodeSpec
from ugro.kernel.links.rules import Examination, SshSettings, Unknown
from ugro.node.messages import Connections, Missed, Packages, Ports, PortUse, Reached, Root, Survival

GIB = 2**30
FACTS = Facts(0.0, 1.0, (0.0, 0.0, 0.0), 0.1, 16 * GIB, 8 * GIB)
PORT_KEYS = {29500: "cluster.master_port", 6379: "ray.redis_port"}
FREE_PORTS = (PortUse(29500, True), PortUse(6379, True))


def machine(name: str = "gpu1", *, python: str = "3.11.4", boot_id: str = "") -> Machine:
    return Machine(
        name, "Debian", "6.1", "x86_64", boot_id or f"boot-{name}", "ann", "/home/ann/ws", python, "/usr/bin/python3",
        8, "CPU", 16 * GIB,
    )


def node(name: str = "gpu1", **changes: Any) -> Examination:
    healthy = Examination(
        spec=NodeSpec(name),
        machine=machine(name),
        quality=LinkQuality(0.0005, 0.0, 0.002),
        facts=FACTS,
        ssh=SshSettings("ask", "~/.ssh/known_hosts"),
        root=Root("/home/ann/ws", None, 50 * GIB, "ext4"),
        ports=Ports(FREE_PORTS),
        port_keys=PORT_KEYS,
        survival=Survival("ann", has_logind=True, kills_processes=False, lingers=False),
        packages=Packages("3.11.4"),
    )
    return replace(healthy, **changes)


def findings(examined: Examination, check: str) -> list[Finding]:
    return [finding for finding in judge_node(examined) if finding.check == check]


def only(examined: Examination, check: str) -> Finding:
    [finding] = findings(examined, check)
    return finding


def test_what_is_looked_at_for_an_owner_is_said_and_what_cannot_be() -> None:
    rule = OwnerReport(When.ACTIVE, Then.PAUSE, 600.0, sources=("terminals",))
    seen = only(node(owner=rule), "owner")
    assert (seen.grade, seen.text) == (Grade.OK, "noticed by terminals; not there now, then pause")
    assert not findings(node(), "owner")
    keyboard = "Logitech (/dev/input/event3) cannot be read"
    blind, rest = findings(node(owner=replace(rule, blind=(keyboard,))), "owner")
    assert (blind.grade, blind.remedy) == (Grade.WARNING, "on gpu1: sudo usermod -aG input ann")
    assert blind.text == f"somebody there is not always noticed: {keyboard}"
    assert rest.grade is Grade.OK
    for broken in (replace(rule, sources=()), replace(rule, is_known=False), replace(rule, error="broken")):
        found = only(node(owner=broken), "owner")
        assert found.grade is Grade.WARNING
        assert found.remedy


def test_what_is_not_enforced_is_said_and_how_to_have_it() -> None:
    bound = node(facts=replace(FACTS, limits=Limits("affinity", "none")))
    finding = only(bound, "limits")
    assert finding.grade is Grade.OK
    assert finding.text == (
        "cpus of jobs are limited by affinity, their memory is not limited; "
        "to limit it, on gpu1: sudo loginctl enable-linger ann"
    )
    held = node(facts=replace(FACTS, limits=Limits("cgroup2", "cgroup2")))
    assert only(held, "limits").text == "cpus and memory of jobs are limited by control groups"
    assert findings(node(), "limits") == []


def test_a_job_that_asks_for_memory_is_told_where_that_is_not_enforced() -> None:
    placement = Placement((Share("a", memory_bytes=4 * GIB), Share("b", memory_bytes=4 * GIB)))
    limits = {"a": Limits("affinity", "none"), "b": Limits("systemd", "systemd")}
    note = unlimited_memory(placement, limits)
    assert note == "4.0 GiB of memory is reserved on a, and not enforced there: the job could take more"
    assert unlimited_memory(placement, {"b": limits["b"]}) is None
    assert unlimited_memory(Placement((Share("a", cpus=2),)), limits) is None


def installed(name: str, packages: Packages | Unknown | None = None, **more: Any) -> Installed:
    fields = {"python": "3.11.4", "python_path": "/usr/bin/python3", **more}
    return Installed(name, packages=packages or Packages("3.11.4"), **fields)


def versions(*nodes: Installed) -> list[tuple[Grade, str]]:
    return [(finding.grade, finding.text) for finding in judge_versions(nodes)]


# --- one node --------------------------------------------------------------------------------------------------------


def test_a_healthy_node_has_one_good_line_for_each_check_and_no_remedies() -> None:
    found = judge_node(node())
    assert [finding.check for finding in found] == [
        "reach", "host key", "python", "root", "clock", "ports", "gpu", "logout",
    ]
    assert {finding.grade for finding in found} == {Grade.OK}
    assert {finding.subject for finding in found} == {"gpu1"}
    assert {finding.remedy for finding in found} == {None}


def test_a_node_that_reports_runs_which_it_was_not_given_is_named() -> None:
    found = only(node(strange_runs="reports runs that were never placed there: no job 7"), "runs")
    assert found.grade is Grade.WARNING
    assert found.text == "reports runs that were never placed there: no job 7; they are ignored"
    assert "ugro exec gpu1 -- ls -l /home/ann/ws/.ugro/agents" in (found.remedy or "")
    assert "ugro node drain gpu1" in (found.remedy or "")


def test_the_connection_says_how_and_how_far() -> None:
    assert only(node(), "reach").text == "connected by ssh as ann, round trip 0.50 ms"
    by_docker = NodeSpec("gpu1", transport=("docker", "exec", "-i", "gpu1"))
    assert only(node(spec=by_docker, quality=LinkQuality()), "reach").text == "connected by docker as ann"


def test_what_could_not_be_checked_is_a_warning_and_spares_the_other_checks() -> None:
    hung = node(root=Unknown("it did not end within 9 s"))
    assert only(hung, "root").grade is Grade.WARNING
    assert only(hung, "root").text == "could not be checked: it did not end within 9 s"
    assert only(hung, "ports").grade is Grade.OK


@pytest.mark.parametrize("strict", ["false", "no", "off"])
def test_host_keys_that_are_not_checked_are_a_warning_with_the_line_to_write(strict: str) -> None:
    finding = only(node(ssh=SshSettings(strict, "~/.ssh/known_hosts")), "host key")
    assert finding.grade is Grade.WARNING
    assert finding.remedy == "in your ssh configuration, for gpu1: StrictHostKeyChecking ask"


@pytest.mark.parametrize("file", ["/dev/null", "none"])
@pytest.mark.parametrize("strict", ["accept-new", "ask", "true"])
def test_host_keys_that_are_not_remembered_are_a_warning(strict: str, file: str) -> None:
    finding = only(node(ssh=SshSettings(strict, file)), "host key")
    assert finding.grade is Grade.WARNING
    assert file in finding.text
    assert finding.remedy == "in your ssh configuration, for gpu1: UserKnownHostsFile ~/.ssh/known_hosts"


def test_a_node_without_ssh_has_no_host_key_and_this_machine_no_logout() -> None:
    local = node(spec=NodeSpec("here", transport="local"), ssh=None, survival=None)
    assert findings(local, "host key") == []
    assert findings(local, "logout") == []


@pytest.mark.parametrize(
    ("free_bytes", "grade"),
    [
        (2**30, Grade.OK),
        (2**30 - 1, Grade.WARNING),
        (100 * 2**20, Grade.WARNING),
        (100 * 2**20 - 1, Grade.FAILED),
        (0, Grade.FAILED),
    ],
)
def test_little_room_is_a_warning_and_next_to_none_a_failure(free_bytes: int, grade: Grade) -> None:
    finding = only(node(root=Root("/ws", None, free_bytes, "ext4")), "root")
    assert finding.grade is grade
    assert (finding.remedy is None) is (grade is Grade.OK)


def test_a_root_that_cannot_be_written_has_failed_whatever_room_there_is() -> None:
    finding = only(node(root=Root("/ws", "Permission denied", 50 * GIB, "ext4")), "root")
    assert finding.grade is Grade.FAILED
    assert finding.text == "/ws cannot be written: Permission denied"
    assert finding.remedy is not None
    assert "sudo chown ann /ws" in finding.remedy


def test_a_read_only_root_is_not_cured_by_another_owner() -> None:
    finding = only(node(root=Root("/ws", "Read-only file system", 50 * GIB, "ext4")), "root")
    assert finding.remedy is not None
    assert "chown" not in finding.remedy
    assert "remote_root:" in finding.remedy


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3"])
def test_a_root_on_a_file_server_is_good_enough_and_said_to_be_one(kind: str) -> None:
    finding = only(node(root=Root("/ws", None, 50 * GIB, kind)), "root")
    assert finding.grade is Grade.OK
    assert f"({kind}, as fast as the network)" in finding.text


def shared(*nodes: Examination) -> list[tuple[Grade, str]]:
    return [(finding.grade, finding.text) for finding in judge_folders(nodes)]


def test_nodes_that_share_a_folder_are_named_and_what_that_means() -> None:
    root = Root("/ws", None, 50 * GIB, "nfs4", folder_id="f1")
    own = node("gpu3", root=replace(root, folder_id="f2"))
    [(grade, text)] = shared(node("gpu1", root=root), node("gpu2", root=root), own)
    assert grade is Grade.OK
    assert text.startswith("gpu1 and gpu2 share one folder")
    assert shared(node("gpu1", root=root), own) == []


def test_two_names_that_lead_to_one_machine_and_folder_are_a_warning() -> None:
    root = Root("/ws", None, 50 * GIB, "ext4", folder_id="f1")
    second = node("gpu1-lan", root=root, machine=machine("gpu1-lan", boot_id="boot-gpu1"))
    [(grade, text)] = shared(node("gpu1", root=root), second)
    assert grade is Grade.WARNING
    assert "lead to the same machine" in text


@pytest.mark.parametrize(
    ("offset_s", "grade", "word"),
    [
        (0.9, Grade.OK, "within"),
        (-1.0, Grade.OK, "within"),
        (1.5, Grade.WARNING, "ahead of"),
        (-30.0, Grade.WARNING, "behind"),
        (-31.0, Grade.FAILED, "behind"),
        (3600.0, Grade.FAILED, "ahead of"),
    ],
)
def test_a_clock_may_be_a_second_off_and_fails_at_half_a_minute(offset_s: float, grade: Grade, word: str) -> None:
    finding = only(node(quality=LinkQuality(0.001, 0.0, offset_s)), "clock")
    assert finding.grade is grade
    assert word in finding.text
    assert (finding.remedy or "").endswith("sudo timedatectl set-ntp true") is (grade is not Grade.OK)


def test_a_clock_that_was_not_read_is_not_judged() -> None:
    assert findings(node(quality=LinkQuality(0.001)), "clock") == []


def test_a_taken_port_names_its_key_its_process_and_the_line_to_write() -> None:
    taken = PortUse(29500, False, pid=4711, process="python3", user="ann")
    finding = only(node(ports=Ports((taken, PortUse(6379, True)))), "ports")
    assert finding.grade is Grade.WARNING
    assert finding.text == "cluster.master_port 29500 is taken by python3 (pid 4711, user ann)"
    assert finding.remedy is not None
    assert "ugro exec gpu1 -- kill 4711" in finding.remedy
    assert "cluster: {master_port: 29501}" in finding.remedy


def test_nobody_is_told_to_kill_what_belongs_to_others() -> None:
    taken = PortUse(6379, False, pid=12, process="redis-server", user="redis")
    finding = only(node(ports=Ports((taken,))), "ports")
    assert finding.remedy == "set another port in cluster.yaml, such as ray: {redis_port: 6380}"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (PortUse(6379, False, user="bob"), "is taken by a process of bob"),
        (PortUse(6379, False), "is taken"),
        (PortUse(6379, False, error="Permission denied"), "cannot be used: Permission denied"),
    ],
)
def test_a_port_is_explained_as_far_as_could_be_seen(use: PortUse, words: str) -> None:
    assert only(node(ports=Ports((use,))), "ports").text == f"ray.redis_port 6379 {words}"


def test_a_gpu_that_cannot_be_read_has_failed() -> None:
    lost = Gpu(1, "GPU-1", "RTX 4070", error="GPU is lost")
    finding = only(node(facts=replace(FACTS, gpus=(Gpu(0, "GPU-0", "RTX 4070"), lost))), "gpu")
    assert finding.grade is Grade.FAILED
    assert finding.text == "GPU 1 RTX 4070 cannot be read: GPU is lost"


def test_gpus_that_cannot_be_asked_for_are_a_warning() -> None:
    finding = only(node(facts=replace(FACTS, gpu_error="the GPU driver does not answer")), "gpu")
    assert finding.grade is Grade.WARNING
    assert finding.remedy == "run: ugro exec gpu1 -- nvidia-smi"


def test_gpus_in_use_by_others_are_a_warning_with_names_and_our_own_are_not() -> None:
    processes = (GpuProcess(7, "blender"), GpuProcess(8, "python", is_ours=True), GpuProcess(9, "game"))
    finding = only(node(facts=replace(FACTS, gpus=(Gpu(0, "u", "RTX 4070", processes=processes),))), "gpu")
    assert finding.grade is Grade.WARNING
    assert finding.text == "GPU 0 RTX 4070 is in use by others: blender (pid 7), game (pid 9)"


@pytest.mark.parametrize(
    ("survival", "grade"),
    [
        (Survival("ann", has_logind=True, kills_processes=True, lingers=False), Grade.WARNING),
        (Survival("ann", has_logind=True, kills_processes=True, lingers=True), Grade.OK),
        (Survival("ann", has_logind=True, kills_processes=False, lingers=False), Grade.OK),
        (Survival("ann", has_logind=False, kills_processes=True, lingers=False), Grade.OK),
    ],
)
def test_a_logout_that_ends_jobs_is_a_warning_unless_the_user_lingers(survival: Survival, grade: Grade) -> None:
    finding = only(node(survival=survival), "logout")
    assert finding.grade is grade
    expected = "on gpu1: sudo loginctl enable-linger ann" if grade is Grade.WARNING else None
    assert finding.remedy == expected


# --- versions --------------------------------------------------------------------------------------------------------


def torch(version: str, cuda: str | None = None, nccl: str | None = None) -> Packages:
    return Packages("3.11.4", torch=version, torch_cuda=cuda, nccl=nccl)


@pytest.mark.parametrize(
    ("packages", "cuda"),
    [
        (torch("2.9.0+cu128", "12.8"), "12.8"),
        (torch("2.9.0+cu130"), "13.0"),
        (torch("2.9.0+cpu"), "none (cpu)"),
        (torch("2.9.0+rocm6.4"), "none (rocm6.4)"),
        (torch("2.9.0"), None),
        (Packages("3.11.4", torch="2.9.0", cuda_runtime="12.8.90"), "12.8"),
        (Packages("3.11.4", cuda_runtime="12.8.90"), None),
    ],
)
def test_cuda_is_what_torch_was_built_for(packages: Packages, cuda: str | None) -> None:
    assert packages.cuda == cuda


def test_nodes_that_agree_get_one_line() -> None:
    nodes = [installed(name, torch("2.9.0+cu128", "12.8", "2.27.3")) for name in ("gpu1", "gpu2")]
    expected = "nodes agree on Python 3.11, torch 2.9.0, CUDA 12.8, NCCL 2.27.3"
    assert versions(*nodes) == [(Grade.OK, expected)]


def test_a_difference_names_who_has_what_and_how_to_follow_the_most() -> None:
    nodes = [
        installed("gpu1", torch("2.8.0+cu128", "12.8")),
        installed("gpu2", torch("2.9.0+cu128", "12.8")),
        installed("gpu3", torch("2.9.0+cu128", "12.8")),
    ]
    [difference, _] = judge_versions(nodes)
    assert difference.grade is Grade.WARNING
    assert difference.text == "torch differs: gpu2 and gpu3 have 2.9.0 (+cu128), gpu1 2.8.0 (+cu128)"
    assert difference.remedy == "ugro exec gpu1 -- /usr/bin/python3 -m pip install torch==2.9.0"


def test_builds_of_the_same_torch_for_other_cudas_differ_in_cuda_alone() -> None:
    nodes = [
        installed("gpu1", torch("2.9.0+cu128", "12.8")),
        installed("gpu2", torch("2.9.0+cu130", "13.0")),
        installed("gpu3", torch("2.9.0+cu128", "12.8")),
    ]
    [difference, _] = judge_versions(nodes)
    assert difference.text == "CUDA differs: gpu1 and gpu3 have 12.8, gpu2 13.0"
    assert difference.remedy is not None
    assert difference.remedy.endswith("torch==2.9.0 --index-url https://download.pytorch.org/whl/cu128")


def test_python_is_compared_by_its_minor_version() -> None:
    same = [installed("gpu1"), installed("gpu2", python="3.11.9")]
    assert {grade for grade, _ in versions(*same)} == {Grade.OK}
    other = [installed("gpu1"), installed("gpu2", Unknown("timed out"), python="3.12.1")]
    assert (Grade.WARNING, "Python differs: gpu1 has 3.11, gpu2 3.12") in versions(*other)


def test_drivers_are_compared_where_there_are_gpus() -> None:
    nodes = [installed("gpu1", gpu_driver="570.1"), installed("gpu2", gpu_driver="580.2"), installed("cpu1")]
    assert (Grade.WARNING, "GPU driver differs: gpu1 has 570.1, gpu2 580.2") in versions(*nodes)


def test_torch_that_is_nowhere_is_no_fault() -> None:
    assert versions(installed("gpu1"), installed("gpu2")) == [
        (Grade.OK, "torch is not installed on gpu1 and gpu2"),
        (Grade.OK, "nodes agree on Python 3.11"),
    ]


def test_torch_that_is_missing_on_some_nodes_is_a_warning() -> None:
    [missing, agreed] = judge_versions([installed("gpu1", torch("2.9.0")), installed("gpu2")])
    assert agreed.text == "nodes agree on Python 3.11", "one node alone agrees with nobody"
    assert missing.grade is Grade.WARNING
    assert missing.text == "torch is not installed on gpu2; others have 2.9.0"
    assert missing.remedy == "ugro exec gpu2 -- /usr/bin/python3 -m pip install torch==2.9.0"


def test_a_node_whose_packages_are_unknown_is_not_taken_to_have_none() -> None:
    nodes = [installed("gpu1", torch("2.9.0")), installed("gpu2", Unknown("timed out"))]
    assert {grade for grade, _ in versions(*nodes)} == {Grade.OK}


def test_no_node_no_findings() -> None:
    assert judge_versions([]) == []
    assert judge_pairs([], {}) == []
    assert judge_pairs(endpoints("a"), {"a": Connections()}) == []


# --- between nodes ---------------------------------------------------------------------------------------------------


def endpoints(*names: str) -> list[Endpoint]:
    return [Endpoint(name, f"boot-{name}", (f"10.0.0.{number}",)) for number, name in enumerate(names, 1)]


def reached(*nodes: str, connect_s: float = 0.0002) -> Connections:
    return Connections(tuple(Reached(node, 40000, "10.0.0.1", "eth0", "eth0", connect_s) for node in nodes))


def test_pairs_that_work_are_told_in_one_line() -> None:
    found = {"a": reached("b"), "b": reached("a", connect_s=0.0004)}
    [finding] = judge_pairs(endpoints("a", "b"), found)
    assert (finding.subject, finding.grade) == ("cluster", Grade.OK)
    assert finding.text == "all 2 pairs reach each other, connecting in at most 0.40 ms"


def test_of_many_nodes_the_good_line_says_that_not_all_pairs_were_tried() -> None:
    names = [f"n{number}" for number in range(13)]
    [finding] = judge_pairs(endpoints(*names), dict.fromkeys(names, reached(*names)))
    assert finding.text.startswith("all 24 pairs that were tried reach each other")


def test_a_pair_that_fails_names_what_was_tried_and_the_firewall_and_ends_the_good_news() -> None:
    missed = (Missed("b", 40000, "10.0.0.2", "timed out"), Missed("b", 40000, "127.0.0.1", "Connection refused"))
    [finding] = judge_pairs(endpoints("a", "b"), {"a": Connections((), missed), "b": reached("a")})
    assert (finding.subject, finding.grade) == ("a → b", Grade.FAILED)
    assert finding.text == "a cannot connect to b (10.0.0.2: timed out)"
    assert finding.remedy == "if a firewall blocks a on b: sudo ufw allow from 10.0.0.1"


def test_a_pair_that_could_not_be_tried_is_a_warning_and_no_good_news() -> None:
    broken = Unknown("b: the link broke")
    found = judge_pairs(endpoints("a", "b", "c"), {"a": reached("c"), "b": broken, "c": reached("a", "b")})
    assert [(finding.subject, finding.grade) for finding in found] == [
        ("a → b", Grade.WARNING), ("b → a", Grade.WARNING), ("b → c", Grade.WARNING),
    ]
    assert {finding.text for finding in found} == {"could not be tried: b: the link broke"}


def test_a_node_without_any_address_is_told_as_such() -> None:
    [finding] = judge_pairs(endpoints("a", "b"), {"a": Connections(), "b": reached("a")})
    assert finding.text == "a cannot connect to b: it has no address to try"
