"""What decides which environments this node can have: its platform, its interpreters, and what it reaches."""

from __future__ import annotations

import os
import re
import threading
from typing import Any, Dict, List, Optional, Tuple

from ugro.remote.python_env import interpreters

_REACH_S = 5.0
_MOST_ADDRESSES = 20
_MUSL = "/lib/ld-musl-%s.so.1"


def about(pythons: Optional[str], addresses: List[str]) -> Dict[str, Any]:
    """``pythons``: the folder of those that UGRO has installed; None: interpreters are not asked for."""
    libc, version = _libc()
    return {
        "arch": os.uname().machine,
        "libc": libc,
        "libc_version": version,
        "pythons": [] if pythons is None else [list(one) for one in interpreters.all_of(pythons)],
        "reaches": _reaches(addresses[:_MOST_ADDRESSES]),
    }


def _libc() -> Tuple[str, List[int]]:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        text = ""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    if found:
        return "glibc", [int(found[1]), int(found[2])]
    try:
        said = interpreters.ask([_MUSL % os.uname().machine], _REACH_S).stderr.decode("utf-8", "replace")
    except OSError:
        return "unknown", [0, 0]
    found = re.search(r"Version (\d+)\.(\d+)", said)
    return "musl", [int(found[1]), int(found[2])] if found else [1, 0]


def _reaches(addresses: List[str]) -> List[bool]:
    """At once: one that drops packets must not hold up the others."""
    answers = [False] * len(addresses)

    def look(number: int) -> None:
        answers[number] = _is_reached(addresses[number])

    threads = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _REACH_S)
    return list(answers)


def _is_reached(address: str) -> bool:
    """Any answer of a web server will do; a folder has to be there."""
    import http.client
    import urllib.error
    import urllib.request

    if re.match(r"https?://", address) is None:
        return os.path.exists(re.sub(r"^file://", "", address))
    bare = re.sub(r"//[^/@]*@", "//", address)  # without a login: this asks for nothing that needs one
    try:
        urllib.request.urlopen(urllib.request.Request(bare, method="HEAD"), timeout=_REACH_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True
