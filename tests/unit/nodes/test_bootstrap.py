"""What is sent to a node before anything is heard, and how its answer is found among an rc file's noise."""

from __future__ import annotations

import ast
import hashlib
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro import node as remote
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.transport import (
    MAX_BANNER,
    SHELL_COMMAND,
    Greeting,
    SshOptions,
    first_lines,
    link_command,
    node_program,
)
from ugro.node import wire
from ugro.node.loader import Modules

NONCE = "0123456789abcdef"
NOISE = st.binary(max_size=400) | st.lists(
    st.sampled_from([b"UGRO1 ", b"UGRO1", b"\n", b"none", b"ready", b"want", b" ", NONCE[:8].encode(), b"motd"])
).map(b"".join)


def stage_arguments(spec: NodeSpec) -> tuple[bytes, dict[str, object]]:
    candidates, stage = first_lines(spec, NONCE, 30.0).splitlines()
    assigned = [part for part in ast.parse(stage).body if isinstance(part, ast.Assign)]
    values = {ast.unparse(part.targets[0]): part.value for part in assigned}
    return candidates, dict(ast.literal_eval(values["A"]))


def heard(stream: bytes, cuts: list[int]) -> tuple[list[str], bytes]:
    greeting = Greeting(NONCE)
    at = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    said = [text for begin, end in pairwise(at) for text in greeting.feed(stream[begin:end])]
    return said, greeting.rest


@given(NOISE.filter(lambda noise: NONCE.encode() not in noise and b"UGRO1 none" not in noise), st.lists(st.integers(0)))
def test_the_greeting_is_found_behind_any_banner_however_it_is_cut(noise: bytes, cuts: list[int]) -> None:
    said, rest = heard(noise + f"UGRO1 {NONCE} ready\n".encode(), cuts)
    assert said == ["ready"]
    assert rest == b""


def test_what_follows_the_greeting_is_kept_to_the_byte() -> None:
    greeting = Greeting(NONCE)
    feed = greeting.feed(b"motd\nUGRO1 " + NONCE.encode() + b" ready\n\x00\x01UGRO1 x\n")
    assert next(feed) == "ready"
    assert greeting.rest == b"\x00\x01UGRO1 x\n"


def test_a_greeting_of_another_conversation_is_passed_over() -> None:
    assert heard(b"UGRO1 ffff ready\nUGRO1 none no-python\n", [])[0] == ["no-python"]


@pytest.mark.parametrize("noise", [b"x", b"UGRO1 ", b"UGRO1 \n", b"\n", b"UGRO1 x" * 9 + b"\n"])
def test_noise_without_end_is_refused_soon_and_quickly(noise: bytes) -> None:
    greeting = Greeting(NONCE)
    began = time.process_time()
    with pytest.raises(wire.ProtocolError, match="64 KiB"):
        list(greeting.feed(noise * (256 * 1024 // len(noise))))
    assert time.process_time() - began < 2
    assert len(greeting.rest) <= MAX_BANNER + 256 * 1024


def test_the_last_line_of_a_banner_can_be_quoted() -> None:
    greeting = Greeting(NONCE)
    list(greeting.feed(b"welcome\nThis account is \xe9 closed.\n\n"))
    assert greeting.last_line == "This account is � closed."
    assert Greeting(NONCE).last_line == ""


@pytest.mark.parametrize("text", ["plain", "Jürgen's data", "🐍 \\ \" ' $HOME", "a\tb"])
def test_names_of_any_alphabet_arrive_as_they_are(text: str) -> None:
    spec = NodeSpec("gpu1", remote_root=f"/data/{text}", env=(("NAME", text),), python=f"/opt/{text}/python3")
    candidates, arguments = stage_arguments(spec)
    assert candidates.decode() == f"/opt/{text}/python3"
    assert arguments["root"] == f"/data/{text}"
    assert arguments["env"] == {"NAME": text}


def test_the_shell_command_is_the_same_for_every_node_and_holds_nothing_a_shell_would_expand() -> None:
    commands = {
        link_command(NodeSpec("gpu1", remote_root=root, python=python), SshOptions())[-1]
        for root, python in [("~/a", None), ("/b c", "/d e/python3"), ("~/$(f)", "g'h")]
    }
    assert commands == {SHELL_COMMAND}
    quoted = SHELL_COMMAND.split("'")
    assert len(quoted) == 3
    # Between single quotes, csh still acts on an exclamation mark and fish on a backslash.
    assert not set("!\\\n") & set(quoted[1])
    assert len(SHELL_COMMAND) < 1000


def test_the_host_is_never_taken_for_an_option() -> None:
    command = link_command(NodeSpec("gpu1", host="-oProxyCommand=x"), SshOptions())
    assert command[-3:] == ["--", "-oProxyCommand=x", SHELL_COMMAND]


def test_the_node_program_is_known_by_its_content() -> None:
    program = node_program()
    assert hashlib.sha256(program.content).hexdigest() == program.digest
    modules = Modules(program.content)
    for path in Path(remote.__file__).parent.rglob("*.py"):
        name = ".".join(["ugro.node", *path.relative_to(Path(remote.__file__).parent).with_suffix("").parts])
        assert modules.get_source(name.removesuffix(".__init__")) == path.read_text()
    node_program.cache_clear()
    assert node_program() == program
