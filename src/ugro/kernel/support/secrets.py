"""Which environment variables look like secrets, by their names and values, and how those are shown.

A name is read in words: ``DB_PASSWORD``, ``apiKey`` and ``github-pat`` have two each. A value may hold a secret under
any name: an address with a password in it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

# --- texts with a seal ------------------------------------------------------------------------------------------------
# Only the holder of a key can make the code of a text. It proves who wrote the text; it does not hide it.


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


# --- what looks like a secret -----------------------------------------------------------------------------------------


HIDDEN = "***"
# Anywhere in a name.
_CONTAINED = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
# At the end of a word, or as the whole of it: APIKEY, but not KEYBOARD; GITHUB_PAT, but not PATH.
_ENDING = re.compile(r"(?:token|secret|pass|pwd|key|auth|authorization|dsn)(?P<plural>s?)[0-9]*$")
_WHOLE = re.compile(r"pat(?P<plural>s?)[0-9]*")
_HARMLESS_WORDS = frozenset({"bypass", "compass", "donkey", "hotkey", "keypass", "monkey", "turkey", "underpass"})
# Folders, and paths of sockets and programs.
_HARMLESS = frozenset(
    {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "GIT_ASKPASS", "SUDO_ASKPASS"}
)
_COUNTS = frozenset({"budget", "count", "limit", "max", "min", "n", "num", "per", "total"})  # max_tokens is a number
_WORDS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+")
# scheme://user:password@host, also with an @ or / in the password; but not host:8080/path@version.
_URL_PASSWORD = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/@:\"'<>]*:)(?![0-9]{1,5}[/?#])((?:(?!://)[^\s\"'<>])+)@")
# A token in the place of a user name, as git takes it.
_URL_TOKEN = re.compile(r"(\bhttps?://)[^\s/@:\"'<>]{16,}@")
_TAKES_TEXT = re.compile(r"-[a-z]*c")  # as in bash -lc TEXT
# In a text for a shell: NAME=value, --name value and a header, to the end of the value and no further.
_VALUE = r"""(?:"[^"]*"|'[^']*'|\\.|[^\s;&|<>()"'\\])+"""
_ASSIGNMENT = re.compile(rf"(?<![\w.-])(?P<name>[\w.-]{{1,64}})(?P<by>=){_VALUE}")
_OPTION = re.compile(rf"(?<![\w.-])(?P<name>--?[A-Za-z][\w-]{{0,63}})(?P<by>\s+)(?!-){_VALUE}")
_HEADER = re.compile(r"(?<![\w-])(?P<name>[A-Za-z][\w-]{0,63})(?P<by>:[ \t]*)(?:Bearer |Basic |Token )?[^\s\"']+")


def looks_secret(name: str) -> bool:
    if name in _HARMLESS:
        return False
    if _CONTAINED.search(name):
        return True
    words = {word.lower() for word in _WORDS.findall(name)}
    return any(_is_secret(word, has_count=bool(words & _COUNTS)) for word in words - _HARMLESS_WORDS)


def is_secret(name: str, value: str) -> bool:
    return looks_secret(name) or without_passwords(value) != value


def without_passwords(text: str, hidden: str = HIDDEN) -> str:
    """The same text, with passwords in addresses hidden."""
    if "://" not in text or "@" not in text:
        return text
    return _URL_TOKEN.sub(rf"\1{hidden}@", _URL_PASSWORD.sub(rf"\1{hidden}@", text))


def without_userinfo(address: str) -> str:
    """The same address without a user's name and password."""
    before, at, place = address.rpartition("@")
    scheme, sign, login = before.partition("://")
    return f"{scheme}://{place}" if at and sign and len(login.split()) <= 1 else address


def shown(name: str, value: str) -> str:
    return HIDDEN if looks_secret(name) else without_passwords(value)


def masked(env: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: shown(name, value) for name, value in env}


def masked_command(argv: Iterable[str], hidden: str = HIDDEN) -> list[str]:
    """For a record: without the values of options that look secret, and of variables before a command.

    ``hidden`` stands in their place.
    """
    words: list[str] = []
    before = ""
    for word in argv:
        is_value = before.startswith("-") and "=" not in before and looks_secret(before)
        if is_value and not word.startswith("-"):
            words.append(hidden)
        else:
            name, equals, _ = word.partition("=")
            is_one = equals and " " not in name and looks_secret(name) and not _TAKES_TEXT.fullmatch(before)
            words.append(f"{name}={hidden}" if is_one else _masked_text(word, hidden))
        before = word
    return words


def _masked_text(text: str, hidden: str) -> str:
    """Of a shell's text, what follows a secret is shown: a record must not leave out what was done."""

    def mask(found: re.Match[str]) -> str:
        return f"{found['name']}{found['by']}{hidden}" if looks_secret(found["name"]) else found[0]

    for pattern in (_HEADER, _ASSIGNMENT, _OPTION):
        text = pattern.sub(mask, text)
    return without_passwords(text, hidden)


def _is_secret(word: str, *, has_count: bool) -> bool:
    found = _ENDING.search(word) or _WHOLE.fullmatch(word)
    return found is not None and not (has_count and found["plural"])
