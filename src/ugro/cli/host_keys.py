"""SSH host keys: shown, and accepted after asking."""

from __future__ import annotations

from dataclasses import dataclass, field

from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.kernel.links.model import HostKey
from ugro.kernel.links.operations import GetHostKey, TrustHostKey
from ugro.kernel.support.errors import NotAllowed, UgroError, Unreachable, UsageError


def ask(output: Output, key: HostKey, *, yes: bool, replace: bool) -> None:
    """Raises an error unless the user accepts the key."""
    if key.is_changed and not replace:
        raise changed(key)
    if not yes and output.can_ask:
        if not output.confirm(_facts(key), "Accept it?"):
            raise UgroError("not accepted; nothing was written", subject=key.node)
        return
    for fact in _facts(key):
        output.note(fact)
    if not yes:
        raise UsageError("cannot ask here: stdin is not a terminal", hint="accept it without asking: --yes")


def changed(key: HostKey) -> NotAllowed:
    return NotAllowed(
        f"its host key has changed: it sends {', '.join(key.fingerprints)}, "
        f"but {key.known_hosts} has {', '.join(key.known_fingerprints)}",
        subject=key.node,
        hint=f"this may be an attack; if the machine was reinstalled: ugro node trust {key.node} --replace",
    )


def unaccepted(key: HostKey) -> NotAllowed:
    return NotAllowed(
        f"its host key is not accepted: {', '.join(key.fingerprints)}",
        subject=key.node,
        hint="compare the fingerprint on the machine itself, then accept it with --yes",
    )


def _facts(key: HostKey) -> list[str]:
    facts = [f"{key.node} ({key.address}) sends the host key", *(f"    {shown}" for shown in key.fingerprints)]
    if key.is_changed:
        facts.append(f"but {key.known_hosts} has {', '.join(key.known_fingerprints)}")
    return [*facts, "Compare it on the machine itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"]


@dataclass(slots=True)
class NewKeys:
    """Accepts keys of hosts that ssh does not know yet, after asking once for each; those of jump hosts first."""

    output: Output
    client: Client
    ssh_config: str | None
    accepts_all: bool  # without asking
    left: list[str] = field(default_factory=list)  # hosts that wait for a key that nobody was asked about
    _decided: dict[str, bool] = field(default_factory=dict)

    def accept(self, host: str) -> bool:
        if host not in self._decided:
            self._decided[host] = False  # so that a circle of jumps ends
            self._decided[host] = self._accept(host)
        return self._decided[host]

    def _accept(self, host: str) -> bool:
        try:
            key = self._key(host)
        except UgroError as error:
            if error.subject in self.left:
                self.left.append(host)
            else:
                self.output.warn(str(error), error.hint)
            return False
        if key.is_trusted:
            return True
        if key.is_changed:
            problem = changed(key)
            self.output.warn(str(problem), problem.hint)
            return False
        if not self._wants(key):
            return False
        asked = TrustHostKey(key.node, key.fingerprints, ssh_config=self.ssh_config)
        is_trusted = self.client.ask(asked).is_trusted
        if is_trusted and self.accepts_all:
            self.output.note(f"    accepted, and added to {key.known_hosts}")
        return is_trusted

    def _key(self, host: str) -> HostKey:
        try:
            return self.client.ask(GetHostKey(host, self.ssh_config))
        except Unreachable as error:
            is_jump = error.cause.startswith("host-key-") and error.subject not in (None, host)
            if not is_jump or not self.accept(str(error.subject)):
                raise
        return self.client.ask(GetHostKey(host, self.ssh_config))

    def _wants(self, key: HostKey) -> bool:
        if self.output.can_ask and not self.accepts_all:
            return self.output.confirm(_facts(key), "Accept it?")
        for fact in _facts(key)[:-1]:
            self.output.note(fact)
        if not self.accepts_all:
            self.left.append(key.node)
        return self.accepts_all
