"""Why an installer failed, from what it said: a stable word, a sentence, and its last lines. Pure."""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ugro.node.program import Refused

MOST_LINES = 40
_MOST_LINE = 500
_MOST_REASON = 300
# The first that fits; their order matters: a full disk, for example, also makes downloads fail.
_SIGNS: Tuple[Tuple[str, str, str], ...] = (
    ("no-space", "the disk is full", r"No space left on device|os error 28\b|Disk quota exceeded|os error 122\b"),
    (
        "hash",
        "a package does not have the expected hash",
        r"Hash mismatch for|DO NOT MATCH THE HASHES|In `?--require-hashes`? mode|[Hh]ashes are required",
    ),
    ("no-access", "the package index wants a login", r"\b40[13]\b.*(Unauthorized|Forbidden)|(401|403) Client Error"),
    (
        "server-failed",
        "the package index failed for the moment",
        r"HTTP status server error|\b(408|429)\b.*(Request Timeout|Too Many Requests)|\b5\d\d Server Error"
        r"|(408|429) Client Error|HTTP error (408|429|5\d\d)\b|too many \d+ error responses"
        r"|[Cc]onnection reset by peer|connection closed before message completed|end of file before message length"
        r"|error decoding response body|response body error|error reading a body"
        r"|Connection aborted|Connection broken|IncompleteRead|RemoteDisconnected|not enough bytes were received",
    ),
    (
        "no-network",
        "the package index cannot be reached",
        r"error sending request|dns error|tcp connect error|Failed to establish a new connection|Connection refused"
        r"|Network is unreachable|name resolution|NewConnectionError|Max retries exceeded|operation timed out"
        r"|Read timed out|Could not connect",
    ),
    (
        "python-missing",
        "no interpreter of that version can be had",
        r"No interpreter found|No download found for request|Python interpreter not found",
    ),
    (
        "not-found",
        "a package or version was not found",
        r"No solution found|was not found in the|there (is|are) no versions? of|No matching distribution found"
        r"|Could not find a version|has no wheels with a matching|no compatible wheels"
        r"|needs to be downloaded from a registry|Network connectivity is disabled",
    ),
)
_TRIES_AGAIN = re.compile(r"Retrying \(Retry\(")  # pip, which says later how that ended
_FRAME = re.compile(r"^[\s×╰─▶├│]*((error|ERROR|cause|Caused by): )?")
_LOGIN = re.compile(r"://[^/\s@]+@")


class Failed(Refused):
    """An environment cannot be made. ``tail``: the installer's last lines."""

    def __init__(self, kind: str, text: str, tail: Sequence[str] = ()) -> None:
        super().__init__(kind, text)
        self.tail = list(tail)


class Reason(NamedTuple):
    kind: str
    text: str


def explain(lines: Sequence[str], how: str) -> Reason:
    """``how``: the installer ended, such as "uv ended with code 2"."""
    lines = [line for line in lines if not _TRIES_AGAIN.search(line)]
    for kind, sentence, pattern in _SIGNS:
        found = [number for number, line in enumerate(lines) if re.search(pattern, line)]
        if found:  # the last is the most specific
            return Reason(kind, "%s: %s" % (sentence, _joined(lines[found[-1] :])))
    said = [line for line in lines if _bare(line)]
    return Reason("crashed", "%s: %s" % (how, _joined(said[-1:])) if said else how)


def _joined(lines: Sequence[str]) -> str:
    """The line and what continues it, as one."""
    words: List[str] = []
    for line in lines[:6]:
        if not _bare(line) or (words and re.match(r"\s*(hint|help):", line)):
            break
        words.append(_bare(line))
    return " ".join(words)[:_MOST_REASON]


def _bare(line: str) -> str:
    return _FRAME.sub("", line).strip()


class Mask:
    """Takes passwords out of what an installer says: of every address, and of those that it was given."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._secrets = sorted({secret for one in addresses for secret in _secrets(one)}, key=len, reverse=True)

    def __call__(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, "****")
        line = _LOGIN.sub("://****@", line)
        return "".join(c if c.isprintable() else " " for c in line).rstrip()[:_MOST_LINE]


def _secrets(address: str) -> List[str]:
    """A login (as a whole, its password, both as written and decoded) and a query, which may hold a token."""
    from urllib.parse import unquote, urlsplit

    try:
        parts = urlsplit(address)
        login = parts.netloc.rpartition("@")[0]
    except ValueError:
        return [address]
    password = login.partition(":")[2] or login
    return [text for one in (login, password, parts.query) for text in (one, unquote(one)) if len(text) > 2]


# --- indexes ----------------------------------------------------------------------------------------------------------
# The variables in which uv and pip find package indexes and the network, on nodes and on the agent's machine alike.
#
# Variables, because addresses may hold passwords: others can read a process's arguments, but not its environment.


# Of an account's own variables: how to reach the network, and whom to trust there.
NETWORK = (
    "PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_PYTHON_INSTALL_MIRROR", "UV_INSECURE_HOST",
)  # fmt: skip


class _Names(NamedTuple):
    main: str
    extra: str
    links: str
    between_links: str


_NAMES = {
    "uv": _Names("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", ","),
    "pip": _Names("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", " "),
}


def index_variables(
    tool: str, index_url: Optional[str], extra_index_urls: Sequence[str], find_links: Sequence[str]
) -> Dict[str, str]:
    """``tool``: uv or pip. What is not given is not set: the tool has a default."""
    names = _NAMES[tool]
    found = {
        names.main: index_url or "",
        names.extra: " ".join(extra_index_urls),
        names.links: names.between_links.join(find_links),
    }
    return {name: value for name, value in found.items() if value}
