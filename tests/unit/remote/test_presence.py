"""Signs of a machine's owner: real terminals, and the files of a kernel and a desktop as a folder has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.person import Person
from tests.rig.waiting import wait_until
from ugro.features.power.node.presence import (
    Displays,
    GpuUsers,
    InputDevices,
    Terminals,
    graphical,
    idle_by,
    interrupts_of,
    is_ours,
    is_telling,
    parse_devices,
    terminal_of,
    used_by_people,
)
from ugro.features.power.node.signs import Record, Sign, Watch
from ugro.node.hardware.gpu_facts import GpuProcess, gpu_process, unread_gpu
from ugro.node.hardware.gpus import Answer
from ugro.node.machine import user_name

# --- terminals ------------------------------------------------------------------------------------------------------


def test_somebody_who_logs_in_and_types_is_noticed_and_one_who_rests_is_not(tmp_path: Path) -> None:
    terminals = Terminals(str(tmp_path))
    assert terminals.look() is None
    with Person(tmp_path) as ann:
        assert terminals.look() == Sign(0.0, f"{user_name(os.getuid())} types on {ann.name}"), "a new one is a sign"
        ann.rest()
        terminals.look()
        assert terminals.look() is None
        ann.type()
        assert wait_until(terminals.look, 10, "the typing to be noticed")
        found = Terminals(str(tmp_path)).look()
        assert found is not None
        assert found.idle_s < 60, "who looks for the first time sees how long ago that was"


def test_what_a_program_prints_is_no_sign_of_a_person(tmp_path: Path) -> None:
    terminals = Terminals(str(tmp_path))
    with Person(tmp_path, script="while :; do echo line; sleep 0.01; done") as ann:
        ann.rest()
        terminals.look()
        written = os.stat(ann.path).st_mtime_ns
        wait_until(lambda: os.stat(ann.path).st_mtime_ns != written, 20, "output on the terminal")
        assert terminals.look() is None


@pytest.mark.parametrize("mark", ["UGRO_RUN", "UGRO_EXEC"])
def test_a_terminal_of_our_own_jobs_and_commands_is_nobodys(mark: str, tmp_path: Path) -> None:
    with Person(tmp_path / "a", {mark: "agent/7.1"}) as job, Person(tmp_path / "b") as ann:
        assert is_ours(job.pid)
        assert not is_ours(ann.pid)
        assert terminal_of(ann.pid) == ann.device
        assert used_by_people([job.device, ann.device]) == {ann.device}
        assert Terminals(str(tmp_path / "a")).look() is None
        assert Terminals(str(tmp_path / "b")).look() is not None
        assert Terminals().can_look()


def test_a_terminal_without_any_process_is_nobodys() -> None:
    master, slave = os.openpty()
    number = os.fstat(slave).st_rdev
    try:
        assert used_by_people([(os.major(number), os.minor(number))]) == set()
    finally:
        os.close(master)
        os.close(slave)


# --- keyboards and mice ---------------------------------------------------------------------------------------------

DEVICES = """\
I: Bus=0019 Vendor=0000 Product=0001 Version=0000
N: Name="Power Button"
P: Phys=LNXPWRBN/button/input0
H: Handlers=kbd event0
B: EV=3

I: Bus=0011 Vendor=0001 Product=0001 Version=ab41
N: Name="AT Translated Set 2 keyboard"
P: Phys=isa0060/serio0/input0
H: Handlers=sysrq kbd event1 leds
B: EV=120013

I: Bus=0018 Vendor=04f3 Product=3195 Version=0100
N: Name="ELAN0676:00 04F3:3195 Touchpad"
P: Phys=i2c-ELAN0676:00
H: Handlers=mouse0 event2
B: EV=b

I: Bus=0003 Vendor=046d Product=c31c Version=0110
N: Name="Logitech USB Keyboard"
P: Phys=usb-0000:00:14.0-1/input0
H: Handlers=sysrq kbd event3 leds
B: EV=120013
"""
INTERRUPTS = """\
            CPU0       CPU1
   1:          0        {keys}   IO-APIC    1-edge      i8042
  16:       5551          0   IO-APIC   16-fasteoi   xhci_hcd:usb1
  51:         {moves}          0  intel-gpio   18  ELAN0676:00
 NMI:          3          4   Non-maskable interrupts
"""


def test_devices_for_people_are_told_from_buttons_and_their_interrupts_found() -> None:
    devices = parse_devices(DEVICES)
    people = [one for one in devices if one.is_for_people]
    assert [one.node for one in devices] == ["event0", "event1", "event2", "event3"]
    assert [one.node for one in people] == ["event1", "event2", "event3"]
    counted, count = interrupts_of(people, INTERRUPTS.format(keys=40, moves=2))
    assert counted == ["AT Translated Set 2 keyboard", "ELAN0676:00 04F3:3195 Touchpad"], "a USB hub counts for others"
    assert count == 42
    assert interrupts_of(people, "") == ([], 0)
    assert parse_devices("N: nonsense\n\n\xff\n") == []


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., InputDevices]:
    (tmp_path / "proc" / "bus" / "input").mkdir(parents=True)
    (tmp_path / "dev" / "input").mkdir(parents=True)

    def at(keys: int, moves: int = 2, devices: str = DEVICES) -> InputDevices:
        (tmp_path / "proc" / "bus" / "input" / "devices").write_text(devices)
        (tmp_path / "proc" / "interrupts").write_text(INTERRUPTS.format(keys=keys, moves=moves))
        return InputDevices(str(tmp_path / "dev"), str(tmp_path / "proc"))

    return at


def test_interrupts_of_a_keyboard_are_a_sign(machine: Callable[..., InputDevices]) -> None:
    seen = machine(40)
    assert seen.look() is None, "there is nothing to compare with yet"
    machine(40)
    assert seen.look() is None
    machine(41)
    assert seen.look() == Sign(0.0, "somebody uses its keyboard, mouse or touchpad")
    assert seen.look() is None
    assert seen.can_look()


def test_a_device_that_may_be_opened_is_asked_and_one_that_may_not_is_named(
    machine: Callable[..., InputDevices], tmp_path: Path
) -> None:
    seen = machine(40)
    seen.look()
    path = tmp_path / "dev" / "input" / "event3"
    assert seen.blind() == [f"Logitech USB Keyboard ({path}) cannot be read"]
    os.mkfifo(path)
    assert seen.look() is None
    assert seen.blind() == []
    pressed = os.open(path, os.O_WRONLY)
    os.write(pressed, b"some key")
    os.close(pressed)
    assert seen.look() == Sign(0.0, "somebody uses Logitech USB Keyboard")
    assert seen.look() is None, "what has come was not read, but is gone"
    machine(40, devices="")
    seen.look()
    assert not seen.can_look(), "it was unplugged"


# --- displays -------------------------------------------------------------------------------------------------------


def test_a_display_is_used_unless_it_is_idle_or_locked() -> None:
    used = {"IdleHint": "no", "IdleSinceHintMonotonic": "90000000", "LockedHint": "no"}
    assert idle_by(used, 100.0) == 0.0
    assert idle_by({**used, "IdleHint": "yes"}, 100.0) == 10.0
    assert idle_by({**used, "LockedHint": "yes"}, 100.0) is None
    assert is_telling(used)
    assert not is_telling({**used, "IdleSinceHintMonotonic": "0"}), "it has never said when it is idle"
    assert not is_telling({})


def test_the_desktop_of_a_session_is_asked_through_logind(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    for name, kind, is_active in (("1", "tty", 1), ("2", "wayland", 1), ("3", "x11", 0)):
        text = f"# private\nUID=1000\nACTIVE={is_active}\nTYPE={kind}\nCLASS=user\n"
        (sessions / name).write_text(text)
    assert graphical(str(sessions)) == ["2"]
    answer = tmp_path / "answer"
    program = tmp_path / "loginctl"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "show-session 2" ] && cat {answer}\n')
    program.chmod(0o755)
    displays = Displays(str(sessions), str(program))
    answer.write_text("Name=ann\nIdleHint=no\nIdleSinceHintMonotonic=5\nLockedHint=no\n")
    assert displays.look() == Sign(0.0, "ann uses the display")
    assert displays.can_look()
    answer.write_text("Name=ann\nIdleHint=no\nIdleSinceHintMonotonic=0\nLockedHint=no\n")
    assert displays.look() is None
    assert displays.blind() == ["the desktop of ann does not say when it is idle"]
    answer.unlink()
    assert displays.look() is None
    assert not displays.can_look()
    assert Displays(str(tmp_path / "nothing")).look() is None


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpu_answer(*processes: tuple[int, str, bool]) -> Answer:
    gpu = unread_gpu(0, "GPU-a", "A100")
    gpu["processes"] = [
        GpuProcess(pid=pid, name=name, memory_bytes=1, is_ours=ours, job=None) for pid, name, ours in processes
    ]
    return {"gpus": [gpu], "source": "nvml", "driver": "1", "error": None}


def test_a_process_on_a_gpu_that_is_not_ours_counts_when_it_is_seen_twice() -> None:
    here = os.getpid()
    answers = [
        gpu_answer((here, "python3", True), (here, "Xorg", False)),
        gpu_answer((here, "python3", False)),  # as one of ours that is about to end
        gpu_answer(),
        gpu_answer((here, "game", False)),
        gpu_answer((here, "game", False)),
    ]
    users = GpuUsers(lambda: answers.pop(0))
    assert [users.look() for _ in range(4)] == [None] * 4
    assert users.look() == Sign(0.0, f"game (pid {here}) uses GPU 0")
    assert users.blind() == []


@pytest.mark.parametrize("marks", [{"UGRO_RUN": "agent/7.1", "UGRO_JOB": "7"}, {"UGRO_EXEC": "x"}])
def test_a_process_of_ours_that_emptied_its_environment_is_still_ours(marks: dict[str, str]) -> None:
    script = "env -i sleep 600 & echo $!; wait"
    env = {"PATH": os.environ["PATH"], **marks}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        try:
            wait_until(lambda: gpu_process(pid, None)["name"] == "sleep", 20, "the process to have begun")
            found = gpu_process(pid, None)
            assert (found["is_ours"], found["job"]) == (True, marks.get("UGRO_JOB"))
            assert not gpu_process(os.getpid(), None)["is_ours"]
        finally:
            os.kill(pid, signal.SIGKILL)


def in_proc(proc: Path, pid: int, comm: str, cgroup: str, environ: bytes = b"") -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{comm}\n")
    (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / str(pid) / "environ").write_bytes(environ)


@pytest.mark.parametrize(
    "cgroup", ["/system.slice/docker-3f9c.scope", "/docker/3f9c", "/user.slice/user-1000.slice/libpod-3f9c.scope/ctr"]
)
def test_a_container_is_somebody_elses_unless_a_job_runs_docker(tmp_path: Path, cgroup: str) -> None:
    in_proc(tmp_path, 1, "systemd", "/init.scope")
    in_proc(tmp_path, 700, "python", cgroup)
    in_proc(tmp_path, 800, "docker", "/user.slice", b"HOME=/home/ann\0")
    users = GpuUsers(lambda: gpu_answer((700, "python", False)), str(tmp_path))
    assert [users.look(), users.look()] == [None, Sign(0.0, "python (pid 700) uses GPU 0")]
    in_proc(tmp_path, 900, "docker", "/user.slice", b"HOME=/home/ann\0UGRO_RUN=agent/7.1\0")
    assert [users.look(), users.look()] == [None, None]
    assert users.blind() == ["a container on GPU 0 is taken for a job's"]


def test_what_cannot_be_said_of_gpus_is_not_claimed(tmp_path: Path) -> None:
    elsewhere = gpu_answer((4194998, "unknown", False))
    (tmp_path / "1").mkdir()
    inside = GpuUsers(lambda: elsewhere, str(tmp_path))
    assert [inside.look(), inside.look()] == [None, None]
    assert inside.blind() == ["a process on GPU 0 is in another container"]
    (tmp_path / "1").rmdir()
    assert [inside.look() is None, inside.look() is None] == [True, False], "hidden processes are somebody else's"
    none: Answer = {"gpus": [], "source": None, "driver": None, "error": "nvml: the driver is not loaded"}
    broken = GpuUsers(lambda: none)
    assert broken.look() is None
    assert not broken.can_look()
    assert broken.blind() == ["GPUs cannot be read: nvml: the driver is not loaded"]


# --- what is sent ---------------------------------------------------------------------------------------------------


class Pretend:
    name = "pretend"

    def __init__(self) -> None:
        self.sign: Sign | None = None

    def look(self) -> Sign | None:
        return self.sign

    def blind(self) -> list[str]:
        return []

    def can_look(self) -> bool:
        return True


def test_the_newest_sign_is_sent_at_once_then_now_and_then_and_outlives_the_node_program(tmp_path: Path) -> None:
    source, path = Pretend(), str(tmp_path / "record.json")
    watch = Watch([source], Record(path), pulse_s=3600)
    assert watch.look() == {"idle_s": None, "sign": "", "sources": ["pretend"], "blind": []}
    assert watch.look() is None
    source.sign = Sign(5.0, "ann types on pts/1")
    assert watch.look() is None, "it was sent a moment ago"
    watch = Watch([source], Record(path), pulse_s=0.0)
    first = watch.look()
    assert first is not None
    assert 5.0 <= first["idle_s"] < 60
    source.sign = Sign(900.0, "bob types on pts/2")
    assert watch.look() is None, "that was before"
    source.sign = Sign(0.0, "bob types on pts/2")
    second, third = watch.look(), watch.look()
    assert second is not None
    assert third is not None, "while somebody goes on, that is said"
    assert second["sign"] == "bob types on pts/2"
    again = Watch([Pretend()], Record(path), pulse_s=0.0).look()
    assert again is not None
    assert again["sign"] == "bob types on pts/2"
    assert again["idle_s"] < 60


@pytest.mark.parametrize(
    "change",
    [{"boot_id": "another"}, {"clock_s": 10**12}, {"clock_s": None}, None],
    ids=["boot", "future", "no", "torn"],
)
def test_a_record_of_another_boot_or_a_damaged_one_does_not_count(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "record.json"
    record = Record(str(path))
    record.note(Sign(1.0, "ann types on pts/1"))
    record.save()
    assert Record(str(path)).last is not None
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **change}) if change is not None else "{")
    assert Record(str(path)).last is None


def test_a_sign_is_as_old_as_it_was_when_it_was_seen(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "record.json"))
    record.note(Sign(100.0, "ann"))
    assert record.last is not None
    assert record.last[0] <= time.clock_gettime(time.CLOCK_BOOTTIME) - 100
