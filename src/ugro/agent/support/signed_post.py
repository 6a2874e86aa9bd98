"""Posts JSON that its receiver can check: signed with a secret that both know, and with the time of this try.

``UGRO-Signature: sha256=HEX`` is HMAC-SHA256 of the timestamp, a dot and the body. See docs/hooks.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os

import ugro
from ugro.core.support import clock
from ugro.telemetry.channels import SendFailure, post, secret

_LEAST_SECRET = 16


def signature(key: bytes, timestamp: str, body: bytes) -> str:
    return "sha256=" + hmac.new(key, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def key_of(what: str, file: str | None, variable: str | None) -> bytes:
    """Read when it is needed, and never logged. Raises SendFailure."""
    text = secret(what, file) if file is not None else os.environ.get(variable or "", "").strip()
    if len(text) < _LEAST_SECRET:
        place = file if file is not None else f"the variable {variable} of the agent"
        problem = f"{what}: {place} holds no secret of at least {_LEAST_SECRET} characters"
        raise SendFailure(problem, may_pass=False, hint="make one: openssl rand -hex 32")
    return os.fsencode(text)  # a variable may hold any bytes


async def send(what: str, address: str, body: bytes, key: bytes, timeout_s: float, **names: str) -> None:
    """``names``: headers beside ``UGRO-``. Raises SendFailure."""
    timestamp = str(int(clock.now().wall_s))
    headers = {
        "User-Agent": f"ugro/{ugro.__version__}",
        "Content-Type": "application/json",
        **{f"UGRO-{name.title()}": value for name, value in names.items()},
        "UGRO-Timestamp": timestamp,
        "UGRO-Signature": signature(key, timestamp, body),
    }
    await asyncio.to_thread(post, what, address, body, headers, timeout_s)
