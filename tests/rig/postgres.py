"""A PostgreSQL server of a test's own: Debian's program, in a folder of its own, reached by a unix socket."""

from __future__ import annotations

import atexit
import grp
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from tests.rig.waiting import wait_until
from ugro.kernel.store.address import PostgresAddress

_USER = "postgres"  # PostgreSQL refuses to run as root
_PATIENCE_S = 60
_QUICK = ("fsync=off", "full_page_writes=off", "shared_buffers=16MB", "max_connections=40", "log_statement=none")


def missing() -> str | None:
    """Why no server can be started here."""
    if _programs() is None:
        return "the Debian package postgresql is not installed"
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return f"there is no user {_USER}" if os.geteuid() == 0 else None
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"psycopg does not work: {error}"
    return None


def needed() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)


class PostgresServer:
    def __init__(self, settings: Sequence[str] = _QUICK) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket lives in it
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            os.chown(self.folder, pwd.getpwnam(_USER).pw_uid, grp.getgrnam(_USER).gr_gid)
        self._run("initdb", "-D", f"{self.folder}/data", "-A", "trust", "-U", "ugro", "-E", "UTF8", "--no-sync")
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        options = [f"-c{setting}" for setting in (*self._settings, "listen_addresses=", "max_wal_size=256MB")]
        with (self.folder / "log").open("ab") as log:
            argv = _argv("postgres", "-D", f"{self.folder}/data", "-k", str(self.folder), *options)
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        wait_until(self._answers, _PATIENCE_S, "PostgreSQL to answer")

    def kill(self) -> None:
        """As a power cut would: nothing is written any more, and all sessions are gone."""
        assert self._process is not None
        for child in _children(self._process.pid):
            with_pid(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        wait_until(lambda: not _children_with(self.folder), _PATIENCE_S, "PostgreSQL's processes to be gone")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # at once, without a checkpoint
            self._process.wait(_PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str, user: str = "ugro") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def sql(self, *statements: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """The rows of the last statement, if it has any."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements[:-1]:
                connection.execute(statement.encode())
            cursor = connection.execute(statements[-1].encode())
            return cursor.fetchall() if cursor.description else []

    def require_password(self, role: str) -> None:
        file = self.folder / "data" / "pg_hba.conf"
        file.write_text(f"local all {role} scram-sha-256\n{file.read_text()}")
        self.sql("SELECT pg_reload_conf()")

    def database_of(self, path: Path) -> str:
        """For what would be this file; it is made when it is first asked for."""
        name = f"t{hashlib.sha256(str(path).encode()).hexdigest()[:20]}"
        if not self.sql(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
            self.sql(f"CREATE DATABASE {name}")
        return name

    def address_of(self, path: Path) -> PostgresAddress:
        return PostgresAddress(self.url(self.database_of(path)))

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        socket = self.folder
        argv = _argv("pg_isready", "-q", "-h", str(socket), "-U", "ugro")
        return subprocess.run(argv, timeout=_PATIENCE_S, check=False, cwd="/").returncode == 0

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            _argv(program, *words), timeout=_PATIENCE_S, check=False, capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"


@lru_cache(maxsize=1)
def shared_server() -> PostgresServer:
    """One for all tests of this process."""
    server = PostgresServer()
    atexit.register(server.stop)
    return server


def with_pid(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _programs() -> Path | None:
    """The newest version that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    return found[-1].parent if found else None


def _argv(program: str, *words: str) -> list[str]:
    folder = _programs()
    assert folder is not None
    become = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"] if os.geteuid() == 0 else []
    return [*become, str(folder / program), *words]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _children_with(folder: Path) -> list[int]:
    """Processes whose working directory is this server's data: PostgreSQL's, and nobody else's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd") == f"{folder}/data":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
