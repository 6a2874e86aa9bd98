"""Each way a connection fails has its word and a remedy. The texts are OpenSSH's own."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.links import diagnosis
from ugro.kernel.links.model import NodeSpec

GPU1 = NodeSpec("gpu1", host="10.0.0.7", user="ann", port=2222)
CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key for [10.0.0.7]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
SAID_BY_SSH = [
    (CHANGED, "host-key-changed"),
    ("No ED25519 host key is known for gpu1 and …\nHost key verification failed.", "host-key-unknown"),
    ("ssh: Could not resolve hostname gpu1: Name or service not known", "name-not-found"),
    ("ssh: Could not resolve hostname gpu1: Temporary failure in name resolution", "name-not-found"),
    ("ann@gpu1: Permission denied (publickey).", "login-denied"),
    ("Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures", "login-denied"),
    ("ssh: connect to host 10.0.0.7 port 22: Connection refused", "refused"),
    ("ssh: connect to host 10.0.0.7 port 22: No route to host", "no-route"),
    ("ssh: connect to host 10.0.0.7 port 22: Network is unreachable", "no-route"),
    ("ssh: connect to host 10.0.0.7 port 22: Connection timed out", "timed-out"),
    ("Connection timed out during banner exchange\nConnection to 10.0.0.7 port 22 timed out", "timed-out"),
    ("Timeout, server 10.0.0.7 not responding.", "timed-out"),
    ("/home/ann/.ssh/config: line 3: Bad configuration option: usr", "ssh-config"),
    ("/home/ann/.ssh/config: terminating, 1 bad configuration options", "ssh-config"),
    ("kex_exchange_identification: Connection closed by remote host", "closed"),
    ("Connection closed by 10.0.0.7 port 22", "closed"),
    ("kex_exchange_identification: read: Connection reset by peer", "closed"),
    ("channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed", "jump-failed"),
    ("channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed", "jump-failed"),
]


@pytest.mark.parametrize(("stderr", "cause"), SAID_BY_SSH)
def test_what_ssh_says_has_its_word_and_a_hint(stderr: str, cause: str) -> None:
    error = diagnosis.from_ssh(GPU1, 255, stderr)
    assert error.cause == cause
    assert error.subject == "gpu1"
    assert error.hint
    assert "{" not in error.hint


def test_of_a_login_a_hint_names_the_node_and_the_account_that_was_dialled() -> None:
    login = NodeSpec("gpu1", host="10.0.0.7", user="ugro", account="lab-{user}").login("lab-ann")
    unknown = diagnosis.from_ssh(login, 255, "Host key verification failed.")
    assert unknown.hint == (
        "compare the fingerprint and accept it: ugro node trust gpu1   (or: ssh lab-ann@10.0.0.7 true)"
    )
    denied = diagnosis.from_ssh(login, 255, "lab-ann@gpu1: Permission denied (publickey).")
    assert "try: ssh lab-ann@10.0.0.7 " in str(denied.hint)
    missing = diagnosis.python_missing(login)
    assert "under gpu1 in cluster.yaml" in str(missing.hint)
    assert missing.subject == "lab-ann@gpu1"


def test_a_failure_of_a_jump_host_is_not_blamed_on_the_node() -> None:
    hung_up = "kex_exchange_identification: Connection closed by remote host"
    stderr = f"ann@jump: Permission denied (publickey).\n{hung_up}"
    error = diagnosis.from_ssh(GPU1, 255, stderr)
    assert error.cause == "login-denied"
    assert "jump host" in error.message
    assert error.hint == "try: ssh -p 2222 ann@10.0.0.7"
    slow = diagnosis.from_ssh(GPU1, 255, "kex_exchange_identification: read: Connection timed out")
    assert slow.cause == "timed-out"
    assert "jump host" not in slow.message


def test_a_hint_names_the_command_that_a_person_would_try() -> None:
    error = diagnosis.from_ssh(GPU1, 255, "ann@gpu1: Permission denied (publickey).")
    assert error.hint is not None
    assert "ssh -p 2222 ann@10.0.0.7" in error.hint
    assert "ugro node trust gpu1" in (diagnosis.from_ssh(GPU1, 255, "Host key verification failed.").hint or "")


def test_who_is_not_reached_by_ssh_is_not_told_to_try_it() -> None:
    for transport in ("local", ("docker", "exec", "-i", "gpu1")):
        spec = NodeSpec("gpu1", transport=transport)
        for error in (diagnosis.from_ssh(spec, 1, ""), diagnosis.connect_timed_out(spec, 5)):
            assert "ssh" not in (error.hint or "ssh")


def test_what_the_node_itself_says_is_not_taken_for_ssh() -> None:
    error = diagnosis.from_ssh(GPU1, 1, "licence server: Connection refused")
    assert error.cause == "unknown"
    assert error.message == "the connection ended (exit code 1): licence server: Connection refused"


def test_an_account_without_a_shell_is_quoted() -> None:
    error = diagnosis.from_ssh(GPU1, 1, "", "This account is currently not available.")
    assert error.message == "the connection ended (exit code 1): This account is currently not available."


def test_a_signal_is_named_as_one() -> None:
    assert "killed by signal 9" in diagnosis.from_ssh(GPU1, -9, "").message


@pytest.mark.parametrize(
    ("said", "cause", "words"),
    [
        ("no-python", "python-missing", "python3 not found"),
        ("old-python 3.6 /usr/bin/python3", "python-old", "3.6 (/usr/bin/python3)"),
        (f"os-error {errno.ENOSPC} /data/ugro", "disk-full", "/data/ugro"),
        (f"os-error {errno.EDQUOT} /data/ugro", "disk-full", "/data/ugro"),
        (f"os-error {errno.EACCES} /data/ugro", "home-not-writable", "/data/ugro"),
        (f"os-error {errno.EROFS} /data/ugro", "home-not-writable", "/data/ugro"),
        (f"os-error {errno.ENOTDIR} /data/ugro", "home-not-writable", "/data/ugro"),
        ("os-error what /data/ugro", "home-not-writable", "/data/ugro"),
        ("damaged", "protocol", "damaged"),
        ("", "protocol", "''"),
    ],
)
def test_what_the_first_stage_says_has_its_word(said: str, cause: str, words: str) -> None:
    error = diagnosis.from_stage(GPU1, said)
    assert error.cause == cause
    assert words in error.message
    assert error.hint


def unsafe(fault: str, **fields: object) -> str:
    return "unsafe " + json.dumps(
        {"path": "/data/my runs", "fault": fault, "owner": "alice", "is_own": False, "mode": "0777", **fields}
    )


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        (unsafe("owner"), "/data/my runs belongs to alice, who could replace", "set remote_root to a folder"),
        (unsafe("link"), "/data/my runs is a link", "remove it (rm '/data/my runs'), or set remote_root"),
        (unsafe("acl"), "has an access list (mode 0777)", "getfacl '/data/my runs'"),
        (unsafe("writable"), "others can write to /data/my runs (mode 0777)", "ask alice for: chmod go-w '/data"),
        (unsafe("writable", is_own=True), "others can write to", "on that node: chmod go-w '/data/my runs', or set"),
        (unsafe("writable", path="/a/.ugro/agents", is_own=True), "/a/.ugro/agents (mode", "chmod -R go-w /a/.ugro"),
        (unsafe("writable", path="/a/.ugro", is_own=True), "/a/.ugro (mode", "chmod -R go-w /a/.ugro, or"),
        (unsafe("writable", path="/{x}\x1b[1m"), "others can write to /{x}", "/{x}"),
    ],
)
def test_a_folder_that_others_can_change_is_named_with_its_remedy(said: str, message: str, hint: str) -> None:
    error = diagnosis.from_stage(GPU1, said)
    assert error.cause == "unsafe-folder"
    assert message in error.message
    assert error.hint
    assert hint in error.hint


@pytest.mark.parametrize("said", ["unsafe", "unsafe {", "unsafe []", 'unsafe {"path": 3}', "unsafe " + unsafe("x")])
def test_a_refusal_that_cannot_be_read_is_a_broken_protocol(said: str) -> None:
    assert diagnosis.from_stage(GPU1, said).cause == "protocol"


def test_a_python_that_was_named_is_the_one_complained_about() -> None:
    spec = NodeSpec("gpu1", python="/opt/py/bin/python3")
    assert "/opt/py/bin/python3" in diagnosis.from_ssh(spec, 127, "").message
    unusable = diagnosis.from_ssh(spec, 126, "sh: 1: exec: /opt/py/bin/python3: Permission denied")
    assert unusable.cause == "python-missing"
    assert "Permission denied" in unusable.message


@pytest.mark.parametrize(
    ("number", "program", "cause"),
    [
        (errno.ENOENT, "ssh", "ssh-missing"),
        (errno.ENOENT, "dockr", "transport-missing"),
        (errno.EACCES, "/opt/enter", "transport-missing"),
        (errno.EMFILE, "ssh", "out-of-resources"),
        (errno.EAGAIN, "ssh", "out-of-resources"),
    ],
)
def test_a_command_that_cannot_be_started_here_is_not_the_nodes_fault(number: int, program: str, cause: str) -> None:
    error = diagnosis.cannot_start(GPU1, program, OSError(number, os.strerror(number)))
    assert error.cause == cause
    assert program in error.message


def test_only_what_a_person_must_mend_is_lasting() -> None:
    passing = {"refused", "timed-out", "no-route", "closed", "hung", "link-lost", "unknown", "out-of-resources"}
    assert not passing & diagnosis.LASTING_CAUSES
    assert {"login-denied", "host-key-changed", "python-missing", "disk-full"} <= diagnosis.LASTING_CAUSES


@given(st.text(max_size=3000), st.text(max_size=500), st.none() | st.integers(-64, 255))
def test_whatever_a_node_says_becomes_one_short_line(stderr: str, stdout: str, exit_code: int | None) -> None:
    for error in (
        diagnosis.from_ssh(GPU1, exit_code, stderr, stdout),
        diagnosis.from_stage(GPU1, stdout),
        diagnosis.broke_protocol(GPU1, stderr),
        diagnosis.link_broke(GPU1, stderr),
    ):
        assert 0 < len(error.message) <= 400
        assert not re.search(r"[\r\n]", error.message)
        assert re.fullmatch(r"[a-z-]+", error.cause)
