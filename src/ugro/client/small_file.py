"""The text of a file that a request carries."""

from __future__ import annotations

from pathlib import Path

from ugro.core.errors import ConfigError

_LARGEST = 1 << 20


def text_of(file: Path, what: str) -> str:
    """``what``: as in "a sweep file". Raises ConfigError."""
    try:
        content = file.read_bytes()
        if len(content) > _LARGEST:
            raise ConfigError(f"{file}: too large for {what}")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}", hint=f"name {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text in UTF-8", hint=f"name {what}") from None
