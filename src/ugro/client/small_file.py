"""The text of a file that a request carries."""

from __future__ import annotations

from pathlib import Path

from ugro.core.errors import ConfigError

_LARGEST = 256 << 10  # as config/job/bounds.py has it


def text_of(file: Path, what: str) -> str:
    """``what``: as in "a sweep file". Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            hint = "a range stands for many values; data belongs into files of its own"
            raise ConfigError(f"{file}: larger than 256 KiB, which is too large for {what}", hint=hint)
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}", hint=f"name {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text in UTF-8", hint=f"name {what}") from None
