"""Where the state is kept: ``store.yaml`` in the state directory. Without it, in the SQLite file ``state.db`` there.

Not in the cluster file: one agent serves several of those, one after the other, and keeps its jobs. The file is read
when the agent starts, and ``ugro store migrate`` writes it after everything was copied.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import yaml

from ugro.kernel.agent.model import StoreStatus
from ugro.kernel.store.backup import write_whole
from ugro.kernel.support.errors import ConfigError, NotAllowed, UgroError
from ugro.kernel.support.state_dir import StateDir

if TYPE_CHECKING:
    from ugro.kernel.store.postgres import Postgres


_SCHEMES = ("postgresql", "postgres")
_SECRETS = ("password", "sslpassword")
_EXAMPLE = "like postgresql://ugro@db.example/ugro"
_PASSWORDS = "a password comes from password_file in store.yaml, PGPASSFILE or PGPASSWORD"


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    url: str  # without a password
    password_file: Path | None = None

    def password(self) -> str | None:
        """None: PostgreSQL's client looks for one itself."""
        if self.password_file is None:
            return None
        try:
            with self.password_file.open("rb") as file:
                others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
                text = file.read(4096).decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8"
            hint = "it holds the password, and nothing else"
            raise UgroError(f"the password in {self.password_file} cannot be read: {why.lower()}", hint=hint) from error
        if others:
            hint = f"chmod 600 {self.password_file}"
            raise UgroError(f"others can read the password in {self.password_file}", hint=hint)
        return text.rstrip("\r\n")


def read_address(home: StateDir) -> PostgresAddress | None:
    """None: SQLite."""
    try:
        text = home.store.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{home.store} cannot be read: {error}") from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{home.store} is not YAML", hint=f"it has one line: url: URL, {_EXAMPLE}") from error
    if not isinstance(found, dict) or set(found) - {"url", "password_file"} or not isinstance(found.get("url"), str):
        raise ConfigError(f"{home.store}: url, and perhaps password_file, are its keys", hint=f"url: URL, {_EXAMPLE}")
    return make_address(found["url"], found.get("password_file"), str(home.store))


def write_address(home: StateDir, address: PostgresAddress | None) -> None:
    """None: SQLite."""
    if address is None:
        home.store.unlink(missing_ok=True)
        return
    fields = {"url": address.url}
    if address.password_file is not None:
        fields["password_file"] = str(address.password_file)
    write_whole(home.store, yaml.safe_dump(fields, sort_keys=False).encode())


def make_address(url: str, password_file: object = None, source: str = "the store's URL") -> PostgresAddress:
    """``source``: where it was written, for errors. They never show a URL, because it may have a password."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise ConfigError(f"{source}: this is not a URL", hint=_EXAMPLE) from error
    if parts.scheme not in _SCHEMES or not url.startswith(f"{parts.scheme}://") or not url.isprintable():
        raise ConfigError(f"{source}: this is not a URL of PostgreSQL", hint=_EXAMPLE)
    login = parts.netloc.rpartition("@")[0]
    if ":" in login or any(name in options for name in _SECRETS):
        raise ConfigError(f"{source} has a password, which logs and process lists would show", hint=_PASSWORDS)
    if password_file is not None and not isinstance(password_file, str):
        raise ConfigError(f"{source}: password_file is a path")
    path = Path(os.path.abspath(os.path.expanduser(password_file))) if password_file else None
    return PostgresAddress(url, path)


# --- finding the backend ----------------------------------------------------------------------------------------------
# PostgreSQL's client is loaded only where it is used.


def locate(home: StateDir, on_taken: Callable[[UgroError], None] = lambda error: None) -> Path | Postgres:
    """``on_taken``: called if the database turns out to be another agent's after a lost connection."""
    address = read_address(home)
    return home.database if address is None else postgres_at(address, on_taken)


def postgres_at(address: PostgresAddress, on_taken: Callable[[UgroError], None] = lambda error: None) -> Postgres:
    try:
        from ugro.kernel.store.postgres import Postgres
    except ImportError as error:
        what = "the client of PostgreSQL is not installed, or does not work"
        raise UgroError(f"{what}: {error}", hint="pip install 'ugro[postgres]'") from error
    return Postgres(address, on_taken=on_taken)


def look_at(address: PostgresAddress) -> StoreStatus:
    postgres_at(address)  # for its error
    from ugro.kernel.store.postgres import look

    return look(address)


def refuse_used(address: PostgresAddress) -> None:
    """Raises if it cannot be reached, or has a state."""
    address.password()  # for its error
    found = look_at(address)
    if found.problem is not None:
        raise UgroError(f"{address.url} cannot be used: {found.problem}", hint="try: psql with this URL")
    if found.schema:
        raise NotAllowed(f"{address.url} is not empty: it has a state of UGRO", hint="name a new database")
