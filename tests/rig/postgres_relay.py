"""Between an agent and PostgreSQL: cuts a connection in the middle of a commit."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.rig.postgres import PostgresServer
from ugro.kernel.store.address import PostgresAddress

_SOCKET = ".s.PGSQL.5432"
_COMMIT = b"; COMMIT"

# "unseen": the server never gets the commit. "unanswered": it made it, and its answer is lost. "half open": as that,
# and the server does not notice that the client is gone.
Cut = Literal["unseen", "unanswered", "half open"]


class PostgresRelay:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.folder = Path(tempfile.mkdtemp(prefix="pr"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.folder / _SOCKET))
        self._listener.listen(8)
        self._open: list[socket.socket] = []
        self._cut: Cut | None = None
        self._left = 0  # commits until that one
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for one in self._open:
            one.close()
        (self.folder / _SOCKET).unlink()
        self.folder.rmdir()

    def address_of(self, path: Path) -> PostgresAddress:
        return PostgresAddress(f"postgresql://ugro@/{self._server.database_of(path)}?host={self.folder}")

    def cut(self, how: Cut, number: int = 1) -> None:
        """The next commit that changes something, or a later one."""
        self._cut, self._left = how, number

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """Nobody can connect to it meanwhile; connections that are open stay."""
        here = self.folder / _SOCKET
        away = here.rename(self.folder / "away")
        try:
            yield
        finally:
            away.rename(here)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                server.connect(str(self._server.folder / _SOCKET))
                self._open += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=_answer, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(65536):
                self._left -= _COMMIT in piece
                if self._cut is not None and self._left == 0 and _COMMIT in piece:
                    how, self._cut = self._cut, None
                    self._lose(client, server, piece, how)
                    return
                server.sendall(piece)
        _shut(server)

    def _lose(self, client: socket.socket, server: socket.socket, piece: bytes, how: Cut) -> None:
        self.cuts += 1
        if how == "unseen":
            _shut(server)
        else:
            _shut(client, socket.SHUT_WR)  # nothing more reaches it
            server.sendall(piece)
            if how == "unanswered":
                _shut(server, socket.SHUT_WR)
        _shut(client)


def _answer(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := server.recv(65536):
            with contextlib.suppress(OSError):
                client.sendall(piece)
    _shut(client)


def _shut(one: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(how)
