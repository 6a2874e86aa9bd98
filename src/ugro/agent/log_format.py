"""The agent's log: one JSON object a line, rotated, with the ids of the node and the job a line is about."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from datetime import UTC, datetime
from pathlib import Path

from ugro.core.errors import Damaged

_IDS = ("node", "job", "attempt", "cause")
_MAX_BYTES = 5_000_000
_KEPT_FILES = 3


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in _IDS if record.__dict__.get(name) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _DamageOnce(logging.Filter):
    """Every part of the agent meets a damaged state again and again: each says so once, and the log stays readable."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if not any(isinstance(argument, Damaged) for argument in arguments):
            return True
        key = (record.name, record.msg)
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first


class _RotatingFile(logging.handlers.RotatingFileHandler):
    """A faster rotating handler: the library's own formats each line twice and checks the file's type."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            self.stream = self.stream or self._open()
            if os.fstat(self.stream.fileno()).st_size + len(line.encode()) > self.maxBytes:
                self.doRollover()
            self.stream.write(line)
            self.flush()
        except (OSError, ValueError, TypeError, LookupError):  # a full disk, or arguments that do not match the message
            self.handleError(record)


def configure(path: Path, level: str, *, max_bytes: int = _MAX_BYTES) -> None:
    handler = _RotatingFile(path, maxBytes=max_bytes, backupCount=_KEPT_FILES, encoding="utf-8")
    path.chmod(0o600)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(_DamageOnce())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line per request: changes are logged where they are made.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    logging.captureWarnings(True)
