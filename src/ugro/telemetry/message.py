"""A notification about an alert or an ended job, and its form in each kind of channel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage

_SIGNS = {"critical": "🔴", "warning": "🟠", "info": "🟢"}
_PRIORITIES = {"critical": "urgent", "warning": "high", "info": "default"}
_MOST_DETAIL = 4000


@dataclass(frozen=True, slots=True)
class Message:
    title: str  # one line
    severity: str  # info, warning or critical
    kind: str  # alert or job
    at: float  # unix seconds
    cluster: str
    detail: str = ""
    state: str = ""  # of an alert: started, worse, repeated, cleared, changed; of a job: where it stands
    node: str | None = None
    job: int | None = None
    attempt: int | None = None
    rule: str | None = None

    @property
    def subject(self) -> str:
        """The text on one line, whatever names it contains."""
        words = "".join(letter if letter.isprintable() else " " for letter in self.title)
        return f"[ugro {self.cluster}] {self.severity.upper()}: {words}"[:200]

    @property
    def text(self) -> str:
        return f"{self.subject}\n{self.detail[:_MOST_DETAIL]}".strip()


def as_webhook(message: Message) -> bytes:
    document = {
        "kind": message.kind,
        "state": message.state,
        "severity": message.severity,
        "title": message.title,
        "detail": message.detail[:_MOST_DETAIL],
        "time": datetime.fromtimestamp(message.at, UTC).isoformat(timespec="milliseconds"),
        "cluster": message.cluster,
        "node": message.node,
        "job": message.job,
        "attempt": message.attempt,
        "rule": message.rule,
    }
    return json.dumps(document).encode()


def as_slack(message: Message) -> bytes:
    # Slack interprets only these three characters.
    text = f"{_SIGNS[message.severity]} {message.text}"
    for letter, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(letter, name)
    return json.dumps({"text": text}).encode()


def as_ntfy(message: Message) -> tuple[bytes, Mapping[str, str]]:
    """A header must be one line of ASCII; the body has the full text."""
    title = message.subject.encode("ascii", "replace").decode()
    return message.text.encode(), {"Title": title, "Priority": _PRIORITIES[message.severity], "Tags": message.kind}


def as_mail(message: Message, sender: str, to: tuple[str, ...]) -> EmailMessage:
    mail = EmailMessage()
    mail["Subject"] = message.subject
    mail["From"] = sender
    mail["To"] = ", ".join(to)
    mail["Date"] = datetime.fromtimestamp(message.at, UTC)
    mail.set_content(message.text + "\n")
    return mail
