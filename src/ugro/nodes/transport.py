"""A transport is a command that gives stdin and stdout on a node: ssh, none (this machine), or the user's own."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ugro.core.node import NodeSpec
from ugro.nodes.bootstrap import LOCAL_COMMAND, SHELL_COMMAND

# Keys, names, jumps and ports come from the user's own ssh configuration. These options make the link one connection
# of its own that never prompts, forwards nothing, and ends by itself if the peer is dead and no agent is left. An agent
# notices earlier, by its keepalives, and reports a better reason.
_LINK_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "2",
    "ServerAliveInterval": "5",
}
# Anybody who writes to a registry chooses the address of a node that is found there. So its host key must be one of
# those that the user has accepted, whatever his configuration says about hosts that are not known.
_KNOWN_KEYS_ONLY = {
    "StrictHostKeyChecking": "yes",
    "NoHostAuthenticationForLocalhost": "no",
    "VerifyHostKeyDNS": "no",
}
# A jump is another ssh, which the options above do not reach: it must not prompt either, not even in a window.
LINK_ENVIRONMENT = {"SSH_ASKPASS_REQUIRE": "never"}


@dataclass(frozen=True, slots=True)
class SshOptions:
    connect_timeout_s: float = 5.0
    key_file: str | None = None
    config_file: str | None = None


def link_command(spec: NodeSpec, options: SshOptions) -> list[str]:
    if spec.transport == "ssh":
        return [*ssh_command(spec, options), SHELL_COMMAND]
    if spec.transport == "local":
        return list(LOCAL_COMMAND)
    return [*spec.transport, *LOCAL_COMMAND]


def ssh_command(spec: NodeSpec, options: SshOptions, **extra: str) -> list[str]:
    """``ssh`` up to and including the destination; ``extra`` are further ``-o`` options, which take precedence."""
    words = ["ssh"]
    if options.config_file:
        words += ["-F", os.path.expanduser(options.config_file)]
    strict = _KNOWN_KEYS_ONLY if spec.found_by else {}
    settings = {**_LINK_OPTIONS, **strict, "ConnectTimeout": str(max(1, round(options.connect_timeout_s))), **extra}
    for key, value in settings.items():
        words += ["-o", f"{key}={value}"]
    if options.key_file:
        words += ["-i", os.path.expanduser(options.key_file)]
    if spec.port:
        words += ["-p", str(spec.port)]
    if spec.user:
        words += ["-l", spec.user]
    return [*words, "--", spec.ssh_host]
