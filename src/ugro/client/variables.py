"""Environment variables of this process that the agent asks for, because a job names them without a value.

An agent of somebody else gets only those that the command names: ``remote/offer.py`` refuses all others before this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping


def asked_for(needs: Iterable[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """``env``: that of this process, if it is not given."""
    known = os.environ if env is None else env
    return {name: known[name] for name in needs if name in known}
