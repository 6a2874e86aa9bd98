"""Nodes with accounts of several people: each sshd has a list of accounts of its own, with homes of its own.

The list stands in a mount namespace, so the machine's own accounts are neither used nor changed. Needs root;
``available`` says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.rig.sshd import SYSTEM_PATH, Farm, NodeOptions, SshdNode

FIRST_UID = 41_001
_PLACED = """
mount --bind "$1" /etc/passwd && mount --bind "$2" /etc/group && mount --bind "$3" /etc/shadow || exit 1
shift 3
exec "$@"
"""


def available() -> str | None:
    """Why such nodes cannot be had here; None when they can."""
    if os.geteuid() != 0:
        return "accounts of other people need root"
    return None if shutil.which("unshare", path=SYSTEM_PATH) else "not installed: unshare"


class AccountsNode(SshdNode):
    def __init__(self, name: str, number: int, directory: Path, options: NodeOptions) -> None:
        super().__init__(name, number, directory, options)
        self.accounts: tuple[str, ...] = ()

    @property
    def homes(self) -> list[Path]:
        return [self.home, *(self.home_of(account) for account in self.accounts)]

    def home_of(self, account: str) -> Path:
        return self.directory / "homes" / account

    def uid_of(self, account: str) -> int:
        return FIRST_UID + self.accounts.index(account)

    def groups(self) -> list[str]:
        people = [f"{account}:x:{self.uid_of(account)}:" for account in self.accounts]
        return ["root:x:0:", "nogroup:x:65534:", *people]

    def placed(self, account: str, *argv: str) -> list[str]:
        """A command as one of the accounts, on a machine that has them."""
        become = [] if account == "root" else ["setpriv", "--reuid", account, "--regid", account, "--init-groups", "--"]
        return [*self._launch_prefix(), *become, *argv]

    def give(self, *accounts: str) -> None:
        """Those who can log in besides root. Known to sshd at its next start."""
        self.accounts = accounts
        for number, account in enumerate(accounts):
            home = self.home_of(account)
            home.mkdir(mode=0o755, parents=True, exist_ok=True)
            os.chown(home, FIRST_UID + number, FIRST_UID + number)
        self._write_accounts()

    def session_lines(self) -> list[str]:
        return [f'SetEnv "PATH={self.options.path}"']

    def _write_files(self) -> None:
        super()._write_files()
        self._write_accounts()

    def _write_accounts(self) -> None:
        people = [(account, FIRST_UID + number) for number, account in enumerate(self.accounts)]
        system = ["sshd:x:105:65534::/run/sshd:/usr/sbin/nologin", "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin"]
        rows = [f"{name}:x:{uid}:{uid}::{self.home_of(name)}:/bin/bash" for name, uid in people]
        lists = {
            "passwd": [f"root:x:0:0:root:{self.home}:/bin/bash", *system, *rows],
            "group": self.groups(),
            "shadow": [f"{name}:*:19000:0:99999:7:::" for name in ("root", "sshd", "nobody", *self.accounts)],
        }
        for name, lines in lists.items():
            (self.directory / name).write_text("\n".join(lines) + "\n")  # in place: a bind mount holds the file

    def _launch_prefix(self) -> Sequence[str]:
        files = [str(self.directory / name) for name in ("passwd", "group", "shadow")]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PLACED, "sh", *files]


class AccountsFarm(Farm[AccountsNode]):
    """Everybody on a node can reach the farm's folder, and the client's key opens every account."""

    node_type = AccountsNode

    def __init__(self, directory: Path, accounts: Sequence[Sequence[str]]) -> None:
        """``accounts``: of each node."""
        super().__init__(directory, len(accounts))
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        for node, names in zip(self.nodes, accounts, strict=True):
            node.directory.mkdir(parents=True, exist_ok=True)
            node.give(*names)
