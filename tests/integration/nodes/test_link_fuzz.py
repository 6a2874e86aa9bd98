"""A peer that says anything at all, on either side of a link: a clear error or an answer, never a hang or a crash."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.integration.conftest import (
    Farms,
    RawProgram,
    Ugro,
    in_loop,
    link_to,
    memory_bytes,
    open_link,
    run_command,
    until,
)
from tests.rig.waiting import descendants, name_of, wait_until
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.node import wire

# Stands in for a node: says the first file, and after each call the next one; then it ends, or waits to be ended.
# "NONCE" becomes the real one. Flooding is saying the last file without end; dribbling, a byte at a time.
FAKE = """
import os, re, sys, time
mode, files = sys.argv[1], [open(name, "rb").read() for name in sys.argv[2].split(":")]
heard = b""
def hear(sign):
    global heard
    while sign not in heard:
        part = os.read(0, 65536)
        if not part: os._exit(0)
        heard += part
def say(text):
    for i in range(0, len(text), 1 if mode == "dribble" else 1 << 20):
        part = text[i : i + (1 if mode == "dribble" else 1 << 20)]
        if mode == "dribble": time.sleep(0.002)
        while part: part = part[os.write(1, part):]
hear(b"exec(S)\\n")
nonce = re.search(rb"'nonce': '(\\w+)'", heard).group(1)
for i, text in enumerate(files):
    if i:
        hear(b'"method"'); heard = b""
    say(text.replace(b"NONCE", nonce))
while mode == "flood": say(files[-1])
while mode != "exit" and os.read(0, 65536): pass
"""
MACHINE = {
    "hostname": "fake", "os": "o", "kernel": "k", "arch": "a", "boot_id": "b", "user": "u", "root": "/r",
    "python": "3.9.0", "python_path": "/p", "cores": 1, "cpu_model": "c", "memory_total_bytes": 1,
}  # fmt: skip
READY = b"UGRO1 NONCE ready\n"
GREETING = READY + wire.message(wire.RESULT, 0, MACHINE)
FACTS = {
    "time_unix": 1.0, "uptime_s": 1.0, "load": [0, 0, 0], "cpu_use_ratio": None,
    "memory_total_bytes": 1, "memory_available_bytes": 1,
}  # fmt: skip


def transport(folder: Path, *said: bytes, mode: str = "stay") -> tuple[str, ...]:
    names = []
    for content in said:
        names.append(str(folder / f"{len(list(folder.iterdir()))}.said"))
        Path(names[-1]).write_bytes(content)
    return (sys.executable, "-I", "-S", "-c", FAKE, mode, ":".join(names))


def fake(folder: Path, *said: bytes, mode: str = "stay") -> NodeSpec:
    return NodeSpec("fake", transport=transport(folder, *said, mode=mode))


async def asked(spec: NodeSpec, timeout_s: float = 5) -> dict[str, Any] | UgroError:
    """What came of one call: its answer, or the error."""
    try:
        link = await open_link(spec, timeout_s=timeout_s)
    except UgroError as error:
        return error
    try:
        return await link.call("probe", {"gpu_timeout_s": 5}, timeout_s=timeout_s)
    except UgroError as error:
        return error
    finally:
        link.close()
        await link.wait_closed()


def ask(*said: bytes, mode: str = "exit", timeout_s: float = 5) -> dict[str, Any] | UgroError:
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        return asyncio.run(asyncio.wait_for(asked(fake(Path(folder), *said, mode=mode), timeout_s), 3 * timeout_s))


# --- towards the agent ---------------------------------------------------------------------------------------------


@given(st.binary(max_size=3000))
@example(b"UGRO1 NONCE ")
@example(b"UGRO1 NONCE what is this\n")
@example(b"UGRO1 NONCE want\nUGRO1 NONCE want\n")
@example(b"UGRO1 NONCE os-error \xff \n")
@example(b"UGRO1 NONCE old-python\n")
@example(READY)
def test_anything_instead_of_a_greeting_is_a_clear_error(noise: bytes) -> None:
    error = ask(noise)
    assert isinstance(error, Unreachable)
    assert error.cause != "timed-out"


@given(st.binary(max_size=200))
def test_noise_before_the_greeting_does_not_matter(noise: bytes) -> None:
    assert ask(noise + GREETING, wire.message(wire.RESULT, 1, {"n": 1})) == {"n": 1}


@given(st.binary(max_size=3000))
def test_anything_instead_of_frames_is_a_clear_error(noise: bytes) -> None:
    assert isinstance(ask(GREETING + noise), Unreachable)


FRAME = st.tuples(
    st.integers(0, 12),
    st.sampled_from([0, 1, 1, 1, 2, 2**32 - 1]),
    st.binary(max_size=60) | st.sampled_from([b"{}", b'{"message": 5}', b"[]", b'{"n": 1e999}', b"\0" * 8]),
    st.sampled_from([0, 0, 0, -1, 1, 2**31]),
)


@given(st.lists(FRAME, max_size=6))
def test_frames_that_make_no_sense_are_an_answer_or_a_clear_error(
    frames: list[tuple[int, int, bytes, int]],
) -> None:
    headers = [
        struct.pack(">IBI", max(0, len(payload) + lie), kind, number) + payload
        for kind, number, payload, lie in frames
    ]
    answer = ask(GREETING, b"".join(headers))
    assert isinstance(answer, dict | Unreachable | RemoteFailure)


NONSENSE: dict[str, tuple[bytes, ...]] = {
    "bad JSON": (GREETING, wire.frame(wire.RESULT, 1, b"{nope")),
    "no object": (GREETING, wire.frame(wire.RESULT, 1, b"[1]")),
    "no number": (GREETING, wire.frame(wire.RESULT, 1, b'{"x": NaN}')),
    "deep nesting": (GREETING, wire.frame(wire.RESULT, 1, b'{"a":' * 100_000)),
    "an unknown kind": (GREETING, wire.frame(77, 1, b"{}")),
    "a kind that only an agent sends": (GREETING, wire.frame(wire.CREDIT, 1, b"\0\0\0\1")),
    "a huge length": (GREETING, struct.pack(">IBI", 2**32 - 1, wire.RESULT, 1)),
    "output of a call that has none": (GREETING, wire.frame(wire.OUT, 1, b"x")),
    "its own protocol error": (GREETING, wire.message(wire.ERROR, 0, {"message": "no \x1b[31m\nway"})),
    "an answer to a call never made": (GREETING, wire.message(wire.RESULT, 2, {})),
    "a pong never asked for": (GREETING, wire.frame(wire.PONG, 2, b"x" * 8)),
    "a number too large": (GREETING, wire.frame(wire.RESULT, 1, b'{"x": 1e999}')),
    "a second greeting": (GREETING, wire.message(wire.RESULT, 0, MACHINE)),
    "a machine of wrong types": (READY + wire.message(wire.RESULT, 0, {**MACHINE, "cores": "many"}),),
    "a machine of nothing": (READY + wire.message(wire.RESULT, 0, {}),),
    "a machine that is output": (READY + wire.frame(wire.OUT, 0, b"{}"),),
    "an error instead of a machine": (READY + wire.message(wire.ERROR, 0, {"message": "x" * 10_000}),),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_is_called_that_and_ends_the_link(said: tuple[bytes, ...]) -> None:
    error = ask(*said, mode="stay")
    assert isinstance(error, Unreachable)
    assert error.cause == "protocol"
    assert len(error.message) <= 400
    assert "\n" not in error.message


def test_a_frame_that_breaks_off_is_a_broken_link() -> None:
    error = ask(GREETING, wire.message(wire.RESULT, 1, {"n": 1})[:-1])
    assert isinstance(error, Unreachable)
    assert error.cause == "link-lost"


def test_an_answer_that_never_comes_is_a_timeout_and_not_a_hang() -> None:
    assert isinstance(ask(GREETING, wire.frame(wire.RESULT, 1, b"{}")[:-1], mode="stay", timeout_s=1), TimedOut)


def test_an_error_of_the_node_is_passed_on_and_bounded() -> None:
    error = ask(GREETING, wire.message(wire.ERROR, 1, {"kind": "os", "message": "x" * 500_000}))
    assert isinstance(error, RemoteFailure)
    assert error.subject == "fake"
    assert len(error.message) <= 2000


def test_a_dribble_of_bytes_is_slow_and_right_and_without_end_is_a_timeout() -> None:
    assert ask(b"motd\n" + GREETING, wire.message(wire.RESULT, 1, {"n": 1}), mode="dribble", timeout_s=15) == {"n": 1}
    error = ask(b"still nothing " * 10_000, mode="dribble", timeout_s=1)
    assert isinstance(error, Unreachable)
    assert error.cause == "timed-out"


def peak_bytes(scenario: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        scenario()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


GARBAGE = b"\xff" * (1 << 20)


@pytest.mark.parametrize("said", [(GARBAGE,), (GREETING + GARBAGE,), (GREETING, GARBAGE)])
def test_garbage_without_end_takes_little_memory(said: tuple[bytes, ...]) -> None:
    answers: list[dict[str, Any] | UgroError] = []
    peak = peak_bytes(lambda: answers.append(ask(*said, mode="flood", timeout_s=10)))
    assert isinstance(answers[0], Unreachable)
    assert answers[0].cause == "protocol"
    assert peak < 8 << 20


@in_loop
async def test_a_hundred_megabytes_of_a_call_that_is_over_take_little_memory(tmp_path: Path) -> None:
    done, late = wire.message(wire.RESULT, 1, {}), wire.frame(wire.OUT, 1, b"x" * (1 << 20))
    link = await open_link(fake(tmp_path, GREETING, done + late * 100, wire.message(wire.RESULT, 2, {"n": 2})))
    tracemalloc.start()
    assert await link.call("echo", {}, timeout_s=10) == {}
    assert await link.call("echo", {}, timeout_s=20) == {"n": 2}
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    link.close()
    await link.wait_closed()


@pytest.mark.parametrize("piece", [65_536, 1, 0])
@in_loop
async def test_more_output_than_was_granted_ends_the_link(tmp_path: Path, piece: int) -> None:
    said = wire.frame(wire.OUT, 1, b"x" * piece) * (9 if piece > 1 else 600_000)
    link = await open_link(fake(tmp_path, GREETING, said))
    stream = link.stream("exec", {"argv": ["true"], "marker": "m"})
    with pytest.raises(Unreachable) as caught:
        await asyncio.wait_for(stream.result(), 20)
    assert caught.value.cause == "protocol"
    await link.wait_closed()


@pytest.mark.proof
def test_hostile_nodes_beside_good_ones_harm_nobody(farm_of: Farms, ugro: Ugro, tmp_path: Path) -> None:
    def probe(**facts: Any) -> tuple[bytes, bytes]:
        return GREETING, wire.message(wire.RESULT, 1, {**FACTS, **facts})

    answers: dict[str, tuple[bytes, ...]] = {
        "floods": (b"x" * (1 << 20),),
        "floods-frames": (GREETING + wire.frame(wire.OUT, 9, b"x" * (1 << 19)),),
        "lies-about-types": probe(load="high"),
        "has-no-facts": (GREETING, wire.message(wire.RESULT, 1, {})),
        "is-infinite": (GREETING, wire.frame(wire.RESULT, 1, json.dumps(FACTS).encode().replace(b"1.0", b"1e999"))),
        "colours": (GREETING, wire.message(wire.ERROR, 1, {"message": "\x1b[31mred\x07\ud800\n\nerror: fake"})),
        "nests": (GREETING, wire.frame(wire.RESULT, 1, b'{"a":' * 400 + b"1" + b"}" * 400)),
    }
    farm = farm_of(2)
    nodes = {
        name: {"transport": list(transport(tmp_path, *said, mode="flood" if "floods" in name else "stay"))}
        for name, said in answers.items()
    }
    file = farm.cluster_yaml()
    lines = "".join(f"  {name}: {json.dumps(node)}\n" for name, node in nodes.items())
    file.write_text(file.read_text() + lines)
    ugro.cluster = file
    agent = json.loads(ugro("agent", "start", "--json").stdout)["agent"]["pid"]
    answer = ugro("health", "--json")
    documents = {document["name"]: document for document in json.loads(answer.stdout)["nodes"]}
    assert {documents[name]["cause"] for name in ("n001", "n002")} == {None}
    assert {documents[name]["status"] for name in answers} == {"unreachable"}
    assert {documents[name]["cause"] for name in ("floods", "floods-frames", "is-infinite")} == {"protocol"}
    text = ugro("health")
    assert text.returncode == 5
    assert "Traceback" not in text.stderr + text.stdout
    assert "internal error" not in text.stderr
    assert "\x1b" not in text.stdout + text.stderr
    assert memory_bytes(agent) < 200 << 20


# --- towards the node program --------------------------------------------------------------------------------------


@pytest.mark.proof
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=3000))
def test_a_node_program_that_hears_noise_answers_or_ends(tmp_path: Path, noise: bytes) -> None:
    with RawProgram(tmp_path) as program:
        program.write(noise)
        program.process.stdin.close()  # type: ignore[union-attr]
        assert program.process.wait(10) == 0


BAD_CALLS: list[tuple[object, object]] = [
    ("none", {}),
    (None, None),
    ({"a": 1}, []),
    ("x" * 500_000, {}),
    ("echo", []),
    ("exec", {}),
    ("exec", {"argv": [], "marker": "m"}),
    ("exec", {"argv": "ls", "marker": "m"}),
    ("exec", {"argv": ["ls"], "marker": "m", "env": [1]}),
    ("exec", {"argv": ["a\0b"], "marker": "m"}),
    ("exec", {"argv": ["\ud800"], "marker": "m"}),
    ("exec", {"argv": ["true"], "marker": "m", "env": {"A=B": "c"}}),
    ("exec", {"argv": ["true"], "marker": "m", "env": {"A": "\0"}}),
    ("exec", {"argv": ["true"], "marker": "m", "cwd": "\0"}),
    ("exec", {"argv": ["true"], "marker": "m", "grace_s": "nan"}),
    ("exec", {"argv": ["true"], "marker": "m", "grace_s": 10**400}),
    ("exec", {"argv": ["true"], "marker": "m", "grace_s": -1}),
    ("check", {"what": "nothing"}),
]


def test_a_call_that_cannot_be_done_is_refused_and_the_next_one_is_answered(tmp_path: Path) -> None:
    with RawProgram(tmp_path) as program:
        for number, (method, params) in enumerate(BAD_CALLS, start=1):
            program.call(number, method, params)
            kind, answered, payload = program.frame()
            assert (kind, answered) == (wire.ERROR, number), (method, params)
            assert len(wire.parse(payload)["message"]) < 500
        program.call(99, "echo", {"still": "there"})
        assert wire.parse(program.frame()[2]) == {"still": "there"}
        assert not descendants([program.process.pid])


@pytest.mark.parametrize(
    "timeout_s", ["nan", *(pytest.param(wild, marks=pytest.mark.proof) for wild in ("inf", "-inf", 1e308, -5))]
)
def test_no_timeout_makes_the_node_program_spin_or_hang(tmp_path: Path, timeout_s: object) -> None:
    silence_s = 0.5
    with RawProgram(tmp_path, silence_s, env=(("UGRO_NVML_LIBRARY", "/nowhere.so"),)) as program:
        program.call(1, "probe", {"gpu_timeout_s": timeout_s})
        assert program.frame()[:2] == (wire.RESULT, 1)
        used_s = cpu_s(program.process.pid)
        deadline = time.monotonic() + 3 * silence_s  # so that its other timer has fired and this one is next
        while time.monotonic() < deadline:
            program.write(wire.frame(wire.PING, 1))
            assert program.frame()[0] == wire.PONG
            time.sleep(silence_s / 10)
        assert cpu_s(program.process.pid) - used_s < silence_s


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ENDLESS = {"argv": ["sh", "-c", "yes"], "marker": "m", "grace_s": 0}
BREAKING: dict[str, list[bytes]] = {
    "one id twice": [wire.message(wire.CALL, 1, {"method": "exec", "params": ENDLESS})] * 2,
    "credit for nothing": [
        wire.message(wire.CALL, 1, {"method": "exec", "params": ENDLESS}),
        *[wire.frame(wire.CREDIT, 1, b"\xff\xff\xff\xff")] * 2,
    ],
    "credit of a wrong size": [
        wire.message(wire.CALL, 1, {"method": "exec", "params": ENDLESS}),
        wire.frame(wire.CREDIT, 1, b"\xff"),
    ],
    "a huge frame": [struct.pack(">IBI", 2**32 - 1, wire.CALL, 1)],
    "an answer": [wire.message(wire.CALL, 1, {"method": "exec", "params": ENDLESS}), wire.frame(wire.RESULT, 1, b"{}")],
    "deep nesting": [wire.frame(wire.CALL, 1, b'{"a":' * 100_000)],
}


@pytest.mark.parametrize("said", BREAKING.values(), ids=list(BREAKING))
def test_an_agent_that_breaks_the_rules_is_told_so_and_all_it_ran_ends(tmp_path: Path, said: list[bytes]) -> None:
    with RawProgram(tmp_path) as program:
        program.write(b"".join(said))
        *_, (kind, number, payload) = program.frames()
        assert (kind, number, wire.parse(payload)["kind"]) == (wire.ERROR, 0, "protocol")
        assert program.process.wait(10) == 0


def test_an_agent_that_asks_and_does_not_read_is_left(tmp_path: Path) -> None:
    with RawProgram(tmp_path) as program:
        big = wire.message(wire.CALL, 1, {"method": "echo", "params": {"text": "x" * 900_000}})
        most = 0
        with suppress(BrokenPipeError):
            for _ in range(1000):
                program.write(big)
                most = max(most, program.memory_bytes)
        assert program.process.wait(10) == 0
        assert most < 250 << 20


# --- output that nobody reads --------------------------------------------------------------------------------------


@pytest.mark.proof
@in_loop
async def test_a_command_that_writes_without_end_is_held_back_while_nobody_reads(farm_of: Farms) -> None:
    node = (farm := farm_of(1)).nodes[0]
    async with link_to(farm, node) as link:
        await run_command(link, "true")  # what is loaded once is loaded
        program = next(pid for pid in node.sessions() if name_of(pid).startswith("python"))
        before = memory_bytes(program)
        tracemalloc.start()
        streams = [link.stream("exec", {**ENDLESS, "marker": f"m{n}"}) for n in range(4)]
        for _ in range(100):
            assert await link.call("echo", {}, timeout_s=5) == {}
            await asyncio.sleep(0.01)
        assert tracemalloc.get_traced_memory()[1] < 4 * wire.WINDOW + (4 << 20)
        tracemalloc.stop()
        assert memory_bytes(program) - before < 4 * wire.WINDOW + (8 << 20)
        read = 0
        async for _, payload in streams[0]:
            assert not payload.strip(b"y\n")
            read += len(payload)
            if read > 20 * wire.WINDOW:
                break
        assert read > 20 * wire.WINDOW
        for stream in streams:
            stream.cancel()
        await until(lambda: "yes" not in map(name_of, node.processes()), 10, "the commands to end")
        assert await link.call("echo", {}, timeout_s=5) == {}


@pytest.mark.proof
def test_a_client_that_does_not_read_costs_the_agent_little_and_other_clients_nothing(
    farm_of: Farms, ugro: Ugro
) -> None:
    farm = farm_of(2)
    ugro.cluster = farm.cluster_yaml()
    agent = json.loads(ugro("agent", "start", "--json").stdout)["agent"]["pid"]
    assert ugro("exec", "@all", "--", "true").returncode == 0
    before = memory_bytes(agent)
    running = ugro.start("exec", "n001", "--", "yes")
    try:
        wait_until(lambda: "yes" in map(name_of, farm.nodes[0].processes()), 20, "the command to run")
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert ugro("exec", "n001", "--", "echo", "here").stdout.endswith("here\n")
        assert memory_bytes(agent) - before < 40 << 20
    finally:
        running.kill()
        running.communicate()
    wait_until(lambda: "yes" not in map(name_of, farm.nodes[0].processes()), 20, "the command to end")
