"""Sends one message through one channel, once. Blocks for a few seconds at most; async callers use a thread.

An error names the channel and the cause, and never an address, a token or a password: those are secrets.
"""

from __future__ import annotations

import http.client
import logging
import smtplib
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import ugro
from ugro.config.channels import LOG, Channel
from ugro.core.errors import UgroError
from ugro.telemetry.message import Message, as_mail, as_ntfy, as_slack, as_webhook

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
