"""The texts that both files have: names of nodes, hosts, users, jobs and channels, labels, paths and lines."""

from __future__ import annotations

import os
import pwd
import re

from ugro.config.kinds import Text

# OpenSSH refuses these too: such names reach a shell through ProxyCommand and Match exec.
_SHELL_CHARACTERS = frozenset("'`\"$;&<>|(){}")
# Linux passes no longer word to a program.
_LONGEST_WORD_BYTES = 128 * 1024 - 1


def is_node_name(text: str) -> bool:
    return len(text) <= 64 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None


def is_job_name(text: str) -> bool:
    """Not a number and not ``last``: where a job is named, those mean an id and the newest job."""
    return is_node_name(text) and not text.isdigit() and text != "last"


def is_channel_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.replace("-", "").replace("_", "").isalnum() and text[0] != "-"


def is_host(text: str) -> bool:
    return _is_ssh_word(text) and not set("@/\\,") & set(text)


def is_user(text: str) -> bool:
    return _is_ssh_word(text) and not set("/,") & set(text) and not text.endswith("\\")


def is_label(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable() and not set(" ,") & set(text) and text[0] not in "-@"


def is_line(text: str) -> bool:
    return 0 < len(text) <= 1024 and text.isprintable() and text == text.strip()


def is_program(text: str) -> bool:
    return is_line(text) and not text.startswith("-")


def is_snippet(text: str) -> bool:
    return bool(text.strip()) and is_word(text)


def is_word(text: str) -> bool:
    """Whether a program can be given it as an argument."""
    # Bytes of a command line that are not UTF-8 come as lone surrogates, and reach the program as the same bytes.
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) <= _LONGEST_WORD_BYTES


def is_local_path(text: str) -> bool:
    """With the home directory put in. Not a relative one: the agent's working directory is not its user's."""
    return is_line(text) and text.startswith("/")


def is_path_on_node(text: str) -> bool:
    return is_line(text) and text.startswith(("/", "~"))


def is_path_without_parent(text: str) -> bool:
    # A leading "-" would be an option to the program that is given the path.
    return is_line(text) and not text.startswith("-") and ".." not in text.split("/")


def is_path_inside(text: str) -> bool:
    return is_path_without_parent(text) and not text.startswith(("/", "~"))


def is_directory_on_node(text: str) -> bool:
    """A directory below something: UGRO must not have all of / or of a home directory as its own."""
    inside = re.fullmatch(r"(?:~[^/]*)?/(.*)", text)
    parts = [part for part in inside[1].split("/") if part not in ("", ".")] if inside else []
    return is_line(text) and bool(parts) and ".." not in parts


def _is_ssh_word(text: str) -> bool:
    # A leading "-" would be an option to ssh.
    is_one_word = 0 < len(text) <= 255 and text.isprintable() and " " not in text and text[0] != "-"
    return is_one_word and not _SHELL_CHARACTERS & set(text)


class UserName(Text):
    """As a shell would have the current user's: no shell is run for it."""

    _CURRENT = frozenset({"$(whoami)", "`whoami`", "$(id -un)", "$USER", "${USER}", "$LOGNAME", "${LOGNAME}"})

    def parse(self, value: object) -> str:
        return super().parse(_own_name() if isinstance(value, str) and value in self._CURRENT else value)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account without a name: ssh has no name for it either
        return str(os.geteuid())


NODE_NAME = Text("a node's name: letters, digits and . _ -, at most 64", is_node_name, metavar="NAME")
JOB_NAME = Text(
    "a job's name: letters, digits and . _ -, at most 64, not a number and not last", is_job_name, metavar="NAME"
)
CHANNEL_NAME = Text("a channel's name: letters, digits, - and _, at most 64", is_channel_name, metavar="CHANNEL")
HOST = Text("a host name or an address, without spaces, @ or a leading -", is_host)
USER = UserName("a user name, without spaces or a leading -", is_user)
LABEL = Text("a word of at most 64 characters, without spaces or commas", is_label, metavar="LABEL")
LINE = Text("a text on one line", is_line)
LOCAL_PATH = Text("a path that starts with / or ~", is_local_path, expands_home=True, metavar="PATH")
NODE_DIRECTORY = Text("a directory on the node such as ~/grid_workspace or /data/ugro", is_directory_on_node)
SNIPPET = Text("a text for a shell, of at most 128 KiB", is_snippet)
WORD = Text("words as texts that a program can be given", is_word)
