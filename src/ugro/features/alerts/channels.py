"""Sends one message through one channel, once. Blocks for a few seconds at most; async callers use a thread.

An error names the channel and the cause, and never an address, a token or a password: those are secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import random
import smtplib
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path

import ugro
from ugro.features.alerts.config import LOG, Channel
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import delay_s

# --- message ----------------------------------------------------------------------------------------------------------
# A notification about an alert or an ended job, and its form in each kind of channel.


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


# --- channels ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_LONGEST_SECRET = 4096
_LONGEST_ANSWER = 16384
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_LEVELS = {"critical": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


class SendFailure(UgroError):
    """The message was not sent; ``may_pass`` says whether a retry can help."""

    def __init__(
        self, message: str, *, may_pass: bool = True, hint: str | None = None, status: int | None = None
    ) -> None:
        """``status``: what an HTTP server answered."""
        super().__init__(message, hint=hint)
        self.may_pass = may_pass
        self.status = status


def send(name: str, channel: Channel | None, message: Message) -> None:
    """``channel`` is None for the log."""
    if channel is None:
        _to_log(message)
    elif channel.type == "email":
        _by_mail(name, channel, message)
    else:
        _by_post(name, channel, message)


def _to_log(message: Message) -> None:
    ids = {"node": message.node, "job": message.job, "attempt": message.attempt}
    log.log(_LEVELS[message.severity], "%s", message.title, extra=ids)


def _by_post(name: str, channel: Channel, message: Message) -> None:
    headers = {"User-Agent": f"ugro/{ugro.__version__}", "Content-Type": "application/json"}
    body: bytes
    if channel.type == "ntfy":
        body, more = as_ntfy(message)
        headers |= {"Content-Type": "text/plain; charset=utf-8", **more}
    else:
        body = as_slack(message) if channel.type == "slack" else as_webhook(message)
    if channel.token_file is not None:
        headers["Authorization"] = f"Bearer {secret(f'channel {name}', channel.token_file)}"
    address = channel.url or secret(f"channel {name}", channel.url_file or "")
    if not address.startswith(("http://", "https://")):
        raise SendFailure(f"channel {name}: its url_file holds no http address", may_pass=False)
    post(f"channel {name}", address, body, headers)


def post(what: str, address: str, body: bytes, headers: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> bytes:
    """Checks certificates and follows no redirect. ``what``: who sends it, in words. Returns the answer's beginning."""
    try:
        request = urllib.request.Request(address, body, dict(headers), method="POST")
        with _opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read(_LONGEST_ANSWER))
    except urllib.error.HTTPError as error:
        error.close()
        # A server that refuses a message will refuse it again, except for these codes.
        may_pass = error.code in (408, 425, 429) or error.code >= 500
        raise SendFailure(f"{what}: answered {error.code}", may_pass=may_pass, status=error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise SendFailure(f"{what}: {_cause(error)}") from None
    except ValueError:
        raise SendFailure(f"{what}: its address is invalid", may_pass=False) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that a token never reaches another server."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _by_mail(name: str, channel: Channel, message: Message) -> None:
    mail = as_mail(message, channel.sender or channel.to[0], channel.to)
    port = channel.port or _PORTS[channel.tls]
    password = secret(f"channel {name}", channel.password_file) if channel.password_file else None
    try:
        with _connected(channel, port) as server:
            if channel.tls == "starttls":
                server.starttls(context=ssl.create_default_context())
            if channel.user and password is not None:
                server.login(channel.user, password)
            server.send_message(mail)
    except smtplib.SMTPResponseException as error:
        code = error.smtp_code
        raise SendFailure(f"channel {name}: the mail server answered {code}", may_pass=code < 500) from None
    except (OSError, smtplib.SMTPException) as error:
        raise SendFailure(f"channel {name}: {_cause(error)}") from None


def _connected(channel: Channel, port: int) -> smtplib.SMTP:
    host = channel.host or ""
    if channel.tls == "tls":
        return smtplib.SMTP_SSL(host, port, timeout=_TIMEOUT_S, context=ssl.create_default_context())
    return smtplib.SMTP(host, port, timeout=_TIMEOUT_S)


def secret(what: str, file: str) -> str:
    try:
        with Path(file).open("rb") as content:
            text = content.read(_LONGEST_SECRET).decode().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SendFailure(f"{what}: {file} cannot be read: {reason}", may_pass=False) from None
    if not text or not text.isprintable():
        raise SendFailure(f"{what}: {file} does not hold one line of text", may_pass=False)
    return text


def _cause(error: Exception) -> str:
    """The system's error text; an exception's own text may contain the address."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return "its certificate is not trusted"
    if isinstance(inner, TimeoutError):
        return "did not answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror.lower()
    return f"failed ({type(inner).__name__})"


def channel_of(channels: Mapping[str, Channel], name: str) -> Channel | None:
    """None for the log."""
    if name == LOG:
        return None
    if (found := channels.get(name)) is None:
        hint = "channels are defined in the cluster file"
        raise SendFailure(f"there is no channel {name}", may_pass=False, hint=hint)
    return found


# --- notify -----------------------------------------------------------------------------------------------------------
# Notifications: messages wait in one short queue per channel and are retried for a while. Nothing waits for them.
#
# A channel that is away delays no other. What does not fit into a queue, or could not be sent for long, is logged.


_MOST_WAITING = 200
_GOODBYE_S = 3.0


@dataclass(frozen=True, slots=True)
class Patience:
    tries: int = 8
    base_s: float = 1.0
    cap_s: float = 120.0


class Notifier:
    def __init__(self, channels: Callable[[], Mapping[str, Channel]], patience: Patience | None = None) -> None:
        """``channels`` is called for each attempt, so an edit of the configuration takes effect at once."""
        self._channels = channels
        self._patience = patience or Patience()
        self._queues: dict[str, asyncio.Queue[Message]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by channel and sent, failed or dropped

    def tell(self, names: Iterable[str], message: Message) -> None:
        for name in dict.fromkeys(names):
            queue = self._queues.setdefault(name, asyncio.Queue(_MOST_WAITING))
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                self._note(name, "dropped", f"channel {name}: too much waits for it; not sent: {message.title}")
            if name not in self._tasks or self._tasks[name].done():
                self._tasks[name] = asyncio.create_task(self._empty(name, queue), name=f"tell {name}")

    async def test(self, name: str, message: Message) -> None:
        """Sends once; raises on failure."""
        await asyncio.to_thread(send, name, channel_of(self._channels(), name), message)

    async def close(self) -> None:
        """Sends what can be sent at once, and drops the rest."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _empty(self, name: str, queue: asyncio.Queue[Message]) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                await self._send(name, queue.get_nowait())

    async def _send(self, name: str, message: Message) -> None:
        for attempt in range(1, self._patience.tries + 1):
            try:
                await self.test(name, message)
            except SendFailure as error:
                if not error.may_pass or attempt == self._patience.tries:
                    self._note(name, "failed", f"{error.message}; given up: {message.title}")
                    return
                await asyncio.sleep(
                    delay_s(attempt, random.random(), base_s=self._patience.base_s, cap_s=self._patience.cap_s)
                )
            else:
                self.outcomes[name, "sent"] += 1
                return

    def _note(self, name: str, outcome: str, text: str) -> None:
        self.outcomes[name, outcome] += 1
        log.error("%s", text)
