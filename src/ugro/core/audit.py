"""Who did what: one entry for each call that changes something."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditEntry:
    at: str  # RFC 3339
    user: str  # of this machine; empty if it is not known
    via: str  # the process, or the session and address of a browser
    action: str
    subject: str
    outcome: str  # "done", or why not
