"""Which master is used, the ssh that reaches it, its first words, and what its failures mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ugro
from ugro.features.remote_access.client.link import failure, relay_command, sharing
from ugro.features.remote_access.client.master import Master, chosen_master, forget, recall, remember
from ugro.features.remote_access.client.relay import agent_socket, banner, find_banner
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, Unreachable, UsageError
from ugro.kernel.support.state_dir import StateDir


def test_the_option_wins_over_the_variable_and_that_over_the_login(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    assert chosen_master({}, home) is None
    remember(home, Master("ann@a", "/opt/ugro"))
    assert chosen_master({}, home) == Master("ann@a", "/opt/ugro")
    assert chosen_master({"UGRO_MASTER": "b"}, home) == Master("b")
    assert chosen_master({"UGRO_MASTER": "b", "UGRO_MASTER_COMMAND": "~/u"}, home) == Master("b", "~/u")
    assert chosen_master({"UGRO_MASTER": "b"}, home, named="c", command="/u") == Master("c", "/u")
    assert chosen_master({"UGRO_MASTER": "b"}, home, named="local") is None
    assert chosen_master({"UGRO_MASTER": "local"}, home) is None
    assert chosen_master({"UGRO_MASTER": ""}, home) == Master("ann@a", "/opt/ugro")
    assert (tmp_path / "master.json").stat().st_mode & 0o777 == 0o600
    assert forget(home) == Master("ann@a", "/opt/ugro")
    assert (recall(home), forget(home)) == (None, None)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a\nb", "x" * 600])
def test_what_is_no_host_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no master"):
        chosen_master({}, StateDir(tmp_path), named=name)
    with pytest.raises(UsageError, match="is no path"):
        chosen_master({}, StateDir(tmp_path), named="ok", command=name)


def test_a_damaged_memory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "master.json").write_text("{")
    with pytest.raises(UgroError, match="cannot be read") as error:
        chosen_master({}, StateDir(tmp_path))
    assert "ugro logout" in (error.value.hint or "")
    assert chosen_master({}, StateDir(tmp_path), named="local") is None
    assert chosen_master({}, StateDir(tmp_path), named="b") == Master("b")
    assert forget(StateDir(tmp_path)) is None
    assert chosen_master({}, StateDir(tmp_path)) is None


def test_the_ssh_command_never_prompts_and_never_skips_the_check_of_host_keys(tmp_path: Path) -> None:
    words = relay_command(Master("ann@gpu:2222", "~/my bin/ugro"), StateDir(tmp_path), is_shared=False)
    assert words[words.index("-p") :] == ["-p", "2222", "--", "ann@gpu", words[-1]]
    assert words[-1] == "exec sh -c 'exec $HOME/'\"'\"'my bin/ugro'\"'\"' relay'"
    assert "BatchMode=yes" in words
    assert not any("StrictHostKeyChecking" in word or "KnownHosts" in word for word in words)


def test_the_shared_connection_has_a_private_path_or_there_is_none(tmp_path: Path) -> None:
    shared = sharing(StateDir(tmp_path / "h"))
    if shared["ControlMaster"] == "auto":
        assert (tmp_path / "h" / "ssh").stat().st_mode & 0o777 == 0o700
        (tmp_path / "h" / "ssh").chmod(0o755)
        assert sharing(StateDir(tmp_path / "h"))["ControlMaster"] == "no"
    assert sharing(StateDir(tmp_path / ("long" * 30)))["ControlMaster"] == "no"


SAID = {
    "Permission denied (publickey).": (255, NotAllowed, "login refused", "try: ssh -p 22 ann@gpu"),
    "Host key verification failed.": (255, NotAllowed, "its host key is not known", "accept it: ssh -p 22 ann@gpu"),
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": (
        255, NotAllowed, "its host key has changed", "which key to remove: ssh -p 22 ann@gpu"
    ),
    "Host key verification failed.\nkex_exchange_identification: Connection closed by remote host": (
        255, NotAllowed, r"on the way to it \(its jump host or proxy\): its host key is not known", "ssh -p 22 ann@gpu"
    ),
    "ssh: connect to host gpu port 22: No route to host": (255, Unreachable, "No route", "try: ssh"),
    "sh: 1: exec: ugro: not found": (127, NotFound, "not in the PATH", "--master-ugro PATH"),
    "Traceback": (1, Unreachable, "its relay ended with code 1: Traceback", "try: ssh"),
    "\x1b[31mred\x1b[0m": (255, Unreachable, r"\?\[31mred", "try: ssh"),
}


@pytest.mark.parametrize("said", SAID)
def test_a_failure_says_what_to_try(said: str) -> None:
    code, kind, text, hint = SAID[said]
    error = failure(Master("ann@gpu:22"), code, f"some banner\n{said}\n")
    with pytest.raises(kind, match=text):
        raise error
    assert error.hint is not None
    assert hint in error.hint


def test_what_a_shell_prints_before_the_relay_is_skipped() -> None:
    said = b"Welcome!\nprompt> " + banner("ann", "gpu") + b"\0frames"
    for cut in range(len(said) - 7):
        assert find_banner(said[:cut])[0] is None
    found, rest = find_banner(said)
    assert found is not None
    assert (found.user, found.host, found.version, rest) == ("ann", "gpu", ugro.__version__, b"\0frames")


def test_versions_that_do_not_fit_are_refused_with_both_named() -> None:
    about = {"protocol": 1, "version": "99.1.0", "user": "a", "host": "b"}
    with pytest.raises(NotAllowed, match=f"ugro 99.1.0 there does not fit ugro {ugro.__version__} here") as error:
        find_banner(b"UGRO-RELAY " + json.dumps(about).encode() + b"\n")
    assert error.value.hint is not None
    assert "pip install ugro==99.1.0" in error.value.hint
    with pytest.raises(NotAllowed):
        find_banner(b'UGRO-RELAY {"protocol": 2}\n')


def test_why_a_relay_cannot_serve_is_raised_here_in_its_words() -> None:
    with pytest.raises(NotFound, match="no such agent"):
        find_banner(banner("a", "b", NotFound("no such agent", hint="start it")))


def test_a_relay_uses_the_accounts_own_agent_unless_another_socket_is_named() -> None:
    own = Path("/home/a/.ugro/agent.sock")
    assert agent_socket(None, {}, own) == (own, True)
    assert agent_socket(None, {"UGRO_SOCKET": "/run/u.sock"}, own) == (Path("/run/u.sock"), False)
    assert agent_socket(Path("/x"), {"UGRO_SOCKET": "/run/u.sock"}, own) == (Path("/x"), False)
