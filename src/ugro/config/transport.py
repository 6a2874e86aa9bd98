"""How a node is reached: ssh, this machine, a container, a pod, or a command of the user's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ugro.config.kinds import BadValueError, Kind, Text, is_encodable

CONTAINERS = ("podman", "docker")
KUBERNETES = "kubernetes"
_NAMES = ("ssh", "local", *CONTAINERS, KUBERNETES)
_WORD = Text("a command's words as texts", lambda text: bool(text) and len(text) <= 4096 and is_encodable(text))

CONTAINER_NAME = Text(
    "the name or id of a container, such as gpu1",
    lambda text: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}", text) is not None,
)
KUBERNETES_NAME = Text(
    "a name of Kubernetes, such as trainer-0",
    lambda text: re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text) is not None,
)


class Transport(Kind):
    expected = f"{', '.join(_NAMES)}, or a command as a list of words"

    def parse(self, value: object) -> str | tuple[str, ...]:
        if isinstance(value, str) and value in _NAMES:
            return value
        if not isinstance(value, list | tuple) or not value:
            raise self.refuse(value, hint="a command is a list: transport: [docker, exec, -i, NAME]")
        words = tuple(_WORD.parse(word) for word in value)
        if words[0].startswith("-"):
            raise self.refuse(words[0], hint="a command begins with its program")
        return words


@dataclass(frozen=True, slots=True)
class Way:
    """The keys of a node that say how it is reached."""

    transport: str | tuple[str, ...]
    user: str | None
    container: str | None
    pod: str | None
    namespace: str | None

    def check(self) -> None:
        is_pod = self.transport == KUBERNETES
        if self.container and not is_pod and self.transport not in CONTAINERS:
            hint = "add transport: podman, docker or kubernetes"
            raise BadValueError("is for nodes that are containers", hint=hint, at=("container",))
        for word in ("pod", "namespace"):
            if getattr(self, word) and not is_pod:
                raise BadValueError("is for nodes that are pods", hint="add transport: kubernetes", at=(word,))
        if is_pod and self.user:
            hint = "kubectl runs commands as the user of the pod"
            raise BadValueError("a pod has no user to choose", hint=hint, at=("user",))

    def command_for(self, name: str) -> str | tuple[str, ...]:
        """``ssh``, ``local``, or the words before a command that make it one on the node."""
        if self.transport == KUBERNETES:
            where = ("--namespace", self.namespace) if self.namespace else ()
            which = ("--container", self.container) if self.container else ()
            return ("kubectl", "exec", "--stdin", "--quiet", *where, *which, self.pod or name, "--")
        if isinstance(self.transport, str) and self.transport in CONTAINERS:
            user = ("--user", self.user) if self.user else ()
            return (self.transport, "exec", "--interactive", *user, self.container or name)
        return self.transport
