"""A node's SSH host key, as shown to the person who has to accept it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostKey:
    node: str
    address: str  # as known_hosts names it
    fingerprints: tuple[str, ...]  # one per key: "SHA256:… (ED25519)"
    known_fingerprints: tuple[str, ...]  # what known_hosts had before
    is_trusted: bool
    known_hosts: str  # the file it is, or will be, written to

    @property
    def is_changed(self) -> bool:
        return bool(self.known_fingerprints) and not self.is_trusted
