"""What every declared operation says of itself."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import Request, operation_name

# They change nothing, although they are no GET: what they look at is too large for an address.
ONLY_LOOKS = {"ExamineHosts", "OpenTunnel", "PlanJob", "ReadFolders", "ReadResultFiles", "ReloadClusterFile"}


@pytest.mark.parametrize("kind", requests(), ids=operation_name)
def test_an_operation_says_what_it_does_and_what_the_audit_log_calls_it(kind: type[Request[Any]]) -> None:
    about = inspect.getdoc(kind) or ""
    assert re.match(r"[A-Z][a-z]+s\b", about), f"a sentence that begins with a verb, not {about[:40]!r}"
    assert about.rstrip().endswith((".", ")"))
    operation = kind.operation
    changes = operation.method != "GET" and kind.__name__ not in ONLY_LOOKS
    assert (operation.audit is not None) == changes, "it changes something, or is in ONLY_LOOKS"
    fields = set(re.findall(r"\{(\w+)", f"{operation.path} {operation.audit or ''}"))
    assert fields <= {one for one in getattr(kind, "__dataclass_fields__", {})}


def test_what_only_looks_is_declared() -> None:
    assert {one.__name__ for one in requests()} >= ONLY_LOOKS
