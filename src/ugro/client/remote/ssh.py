"""The ssh command that reaches a master's relay, and what its failures mean."""

from __future__ import annotations

import os
import shlex

from ugro.client.remote.master import COMMAND_VARIABLE, Master
from ugro.core.errors import NotAllowed, NotFound, UgroError, Unreachable
from ugro.core.support.state_dir import StateDir

KEPT_S = 600  # without a command, until the shared connection ends
_CONNECT_S = 10
_LONGEST_SOCKET = 80  # ssh appends a temporary suffix of 17 bytes, and 108 are the most
_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126
_DIGEST = 40  # characters of %C
# Said by ssh when the peer hangs up before the protocol starts. After another error it means a jump host's ssh.
HUNG_UP = "_exchange_identification"

# As for the link to a node: keys, names, jumps and ports come from the user's own configuration; nothing is asked,
# nothing forwarded, and host keys are checked as that configuration says.
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "5",
}
# A jump is another ssh, which the options above do not reach: it must not prompt either, not even in a window.
ENVIRONMENT = {"SSH_ASKPASS_REQUIRE": "never"}
# Pipx and ``pip install --user`` put ugro where the PATH of a shell without login often does not look.
_IN_PATH = 'PATH="$PATH:$HOME/.local/bin" exec ugro relay'


def relay_command(master: Master, home: StateDir, *, is_shared: bool) -> list[str]:
    """``is_shared``: over a connection that stays open for the next commands."""
    words = ["ssh"]
    if master.ssh_config:
        words += ["-F", os.path.expanduser(master.ssh_config)]
    for key, value in {**_OPTIONS, **(sharing(home) if is_shared else _ALONE)}.items():
        words += ["-o", f"{key}={value}"]
    return [*words, *master.destination, _there(master.command)]


_ALONE = {"ControlMaster": "no", "ControlPath": "none"}


def sharing(home: StateDir) -> dict[str, str]:
    """OpenSSH's own sharing, at a private path; none if that path would be too long."""
    folder = home.path / "ssh"
    if len(os.fsencode(folder)) + 1 + _DIGEST > _LONGEST_SOCKET or "%" in str(folder) or " " in str(folder):
        return _ALONE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_private = folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077
    except OSError:
        return _ALONE
    if not is_private:
        return _ALONE
    return {"ControlMaster": "auto", "ControlPath": f"{folder}/%C", "ControlPersist": str(KEPT_S)}


def is_shared(home: StateDir) -> bool:
    """Whether a connection was left open by an earlier command."""
    try:
        return any((home.path / "ssh").iterdir())
    except OSError:
        return False


def _there(command: str | None) -> str:
    """One word for the login shell there, whichever it is."""
    if command is None:
        return f"exec sh -c {shlex.quote(_IN_PATH)}"
    path = f"$HOME/{shlex.quote(command[2:])}" if command.startswith("~/") else shlex.quote(command)
    return f"exec sh -c {shlex.quote(f'exec {path} relay')}"


def failure(master: Master, code: int | None, said: str) -> UgroError:
    """Why ssh ended before the relay spoke. ``said``: on its standard error."""
    login = f"try: ssh {' '.join(word for word in master.destination if word != '--')}"
    last = _last_line(said)
    if code == _SSH_FAILED or code is None or code < 0:
        if (refusal := _refusal(said, login)) is not None:
            message, hint = refusal
            on_the_way = "on the way to it (its jump host or proxy): " if HUNG_UP in said else ""
            return NotAllowed(on_the_way + message, subject=str(master), hint=hint)
        return Unreachable(last or "ssh ended", subject=str(master), hint=login, cause="ssh")
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        what = master.command or "ugro"
        hint = (
            f"install it there, or name its path: ugro login {master} --master-ugro PATH, or {COMMAND_VARIABLE}=PATH; "
            f"find it: {login.removeprefix('try: ')} 'bash -lc \"command -v ugro\"'"
        )
        return NotFound(f"{what} is not in the PATH of a command there", subject=str(master), hint=hint)
    return Unreachable(
        f"its relay ended with code {code}{f': {last}' if last else ''}", subject=str(master), hint=login, cause="relay"
    )


def _refusal(said: str, login: str) -> tuple[str, str] | None:
    """What ssh or the other end did not accept, and what to try."""
    command = login.removeprefix("try: ")
    if "HOST IDENTIFICATION HAS CHANGED" in said:
        hint = f"someone may be in between; if the machine was reinstalled, this says which key to remove: {command}"
        return "its host key has changed", hint
    if "Host key verification failed" in said:
        return "its host key is not known", f"compare the fingerprint and accept it: {command}"
    if "Permission denied" in said or "Too many authentication failures" in said:
        return "login refused", login
    return None


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]
