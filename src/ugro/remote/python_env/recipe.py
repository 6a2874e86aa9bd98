"""How an environment is to be made, as the agent says it. Parsed and checked here only."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional

from ugro.remote import trees
from ugro.remote.python_env.failures import Mask
from ugro.remote.python_env.place import checked_name

_MINOR = re.compile(r"3\.[0-9]{1,2}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_HASH = re.compile(r"--hash[= ]sha256:[0-9a-f]{64}")
_CONTINUED = re.compile(r"\\[ \t]*\n")
_MOST_TEXT = 1 << 20
_MOST_ADDRESS = 4096


class Blob(NamedTuple):
    name: str
    sha256: str
    size: int


class Recipe:
    def __init__(self, fields: Dict[str, Any]) -> None:
        self.name = checked_name(fields["name"])
        self.python = _expected(_MINOR, dict(fields["platform"])["python"], "a version such as 3.11")
        self.requirements = _requirements(fields["requirements"])
        self.count = len(_lines(self.requirements))
        self.tree = trees.parse_id(fields["tree"])
        self.installer = _blob(fields["installer"])
        self.wheels: List[Blob] = [_blob(one) for one in fields.get("wheels") or ()]
        index_url = fields.get("index_url")
        self.index_url: Optional[str] = None if index_url is None else _address(index_url)
        self.extra_index_urls = [_address(one) for one in fields.get("extra_index_url") or ()]
        self.find_links = [_address(one, r",") for one in fields.get("find_links") or ()]
        self.label = str(fields.get("label") or "")[:100]
        self.mask = Mask([one for one in (self.index_url, *self.extra_index_urls, *self.find_links) if one])

    @property
    def is_offline(self) -> bool:
        return bool(self.wheels)


def _requirements(text: Any) -> str:
    """Pinned lines with hashes; nothing that would make an installer read other files or ask other indexes."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT or "\0" in text:
        raise ValueError("requirements must be a text")
    for line in _lines(text):
        if line.startswith("-") or not _HASH.search(line):
            raise ValueError("a requirement without a hash: %.80r" % line)
    return text


def _lines(text: str) -> List[str]:
    lines = (line.strip() for line in _CONTINUED.sub(" ", text).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def required_names(text: str) -> List[str]:
    """The packages that every environment made of this has: those without a condition."""
    lines = (line.partition(" --hash")[0] for line in _lines(text))
    found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines if ";" not in line)
    return [normal(match[0]) for match in found if match]


def normal(name: str) -> str:
    """Of a package, as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _blob(fields: Any) -> Blob:
    name = _expected(_FILE, fields["name"], "the name of a file")
    size = fields["size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError("size must be a whole number")
    return Blob(name, trees.parse_id(fields["content"]).hex(), size)


def _address(text: Any, not_in: str = r"\s") -> str:
    """``not_in``: what stands between two of them in an installer's variable."""
    is_text = isinstance(text, str) and 0 < len(text) <= _MOST_ADDRESS and text.isprintable()
    if not is_text or text.startswith("-") or re.search(not_in, text):
        raise ValueError("no address of an index")  # not shown: it may hold a password
    return str(text)


def _expected(pattern: Any, value: Any, what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError("%.80r is not %s" % (value, what))
    return value
