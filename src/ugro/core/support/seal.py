"""A text with a code that only the holder of a key can make. It proves who wrote the text; it does not hide it."""

from __future__ import annotations

import hmac

KEY_BYTES = 32
_MAC_DIGITS = 64


def sealed(key: bytes, text: str) -> str:
    return f"{_mac(key, text)} {text}"


def unsealed(key: bytes, message: object) -> str | None:
    """The text; None if it was not sealed with this key, or is no such message at all."""
    if not key or not isinstance(message, str):
        return None
    mac, _, text = message.partition(" ")
    is_ours = len(mac) == _MAC_DIGITS and mac.isascii() and hmac.compare_digest(mac, _mac(key, text))
    return text if is_ours else None


def _mac(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode("utf-8", "surrogatepass"), "sha256").hex()
