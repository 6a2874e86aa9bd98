"""The variables in which uv and pip find package indexes and the network, on nodes and on the agent's machine alike.

Variables, because addresses may hold passwords: others can read a process's arguments, but not its environment.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence

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
