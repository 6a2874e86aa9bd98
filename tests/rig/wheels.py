"""Wheels that a test writes itself, and an index that serves them: tiny packages with the hashes of real ones."""

from __future__ import annotations

import base64
import hashlib
import io
import socket
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_DATE = (2020, 1, 1, 0, 0, 0)  # the same bytes each time


@dataclass(frozen=True)
class Wheel:
    path: Path
    name: str
    version: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def requirement(self) -> str:
        """Pinned, with its hash, as ``uv pip compile --generate-hashes`` writes it."""
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    files: Mapping[str, bytes] | None = None,
    requires: Iterable[str] = (),
    commands: Mapping[str, str] | None = None,
) -> Wheel:
    """A package with a module that has its version, more ``files``, and ``commands`` (name: module:function)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    module = f'__version__ = "{version}"\n\n\ndef main() -> None:\n    print("{name} {version}")\n'
    contents: dict[str, bytes] = {
        f"{stem}/__init__.py": module.encode(),
        **(files or {}),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
    }
    if commands:
        lines = [f"{command} = {target}\n" for command, target in commands.items()]
        contents[f"{info}/entry_points.txt"] = "".join(["[console_scripts]\n", *lines]).encode()
    contents[f"{info}/RECORD"] = _record(contents, info)
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for inner, content in contents.items():
            entry = zipfile.ZipInfo(inner, _DATE)
            entry.external_attr = 0o644 << 16
            file.writestr(entry, content)
    return Wheel(path, name, version)


_BACKEND = """\
import pathlib

pathlib.Path({leaves!r}).write_text("built")


def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "{name}-{version}.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    info.joinpath("WHEEL").write_text("Wheel-Version: 1.0\\nTag: py3-none-any\\n")
    return info.name
"""


def source(folder: Path, name: str, leaves: Path, *, version: str = "1.0", metadata: str = "2.1") -> Wheel:
    """A package without a wheel, for an index. To ask it what it needs is to run its code, which writes ``leaves``.

    ``metadata``: from version 2.2 on, what it says of itself can be believed without running anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "PKG-INFO": f"Metadata-Version: {metadata}\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND.format(leaves=str(leaves), name=name, version=version),
    }
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for inner, text in contents.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{inner}")
            entry.size = len(text.encode())
            file.addfile(entry, io.BytesIO(text.encode()))
    return Wheel(path, name, version)


def _record(contents: Mapping[str, bytes], info: str) -> bytes:
    lines = []
    for inner, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{inner},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{info}/RECORD,,\n"]).encode()


@dataclass
class Index:
    """A package index on this machine, as PyPI is one."""

    wheels: list[Wheel]
    login: str | None = None  # NAME:PASSWORD, if it asks for one
    port: int = 0
    asked: list[str] = field(default_factory=list)  # paths, in order
    hold: threading.Event | None = None  # files are sent once it is set
    pages: dict[str, str] = field(default_factory=dict)  # by package: what the index says, if not where its wheels are
    fault: str = ""  # instead of a file: an HTTP status, "reset" or "cut"
    fault_for: str = ""  # only for programs that call themselves so

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        return f"http://{login}127.0.0.1:{self.port}/simple"

    @property
    def authorization(self) -> str | None:
        return f"Basic {base64.b64encode(self.login.encode()).decode()}" if self.login else None

    def files(self) -> list[str]:
        return [path for path in self.asked if path.startswith("/files/")]

    def content(self, path: str) -> tuple[str, bytes] | None:
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[0] == "files":
            return next(
                (("application/zip", one.path.read_bytes()) for one in self.wheels if one.path.name == parts[-1]), None
            )
        if parts[-1] in self.pages:
            return "text/html", self.pages[parts[-1]].encode()
        found = [one for one in self.wheels if one.name == parts[-1]]
        links = [f'<a href="/files/{one.path.name}#sha256={one.sha256}">{one.path.name}</a>' for one in found]
        return ("text/html", b"<!DOCTYPE html>\n" + "\n".join(links).encode()) if found else None


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        index = self.server.index
        if index.authorization and self.headers.get("Authorization") != index.authorization:
            self._send(401, "text/plain", b"login", has_body)
            return
        index.asked.append(self.path)
        found = index.content(self.path)
        if found and self.path.startswith("/files/") and index.hold is not None:
            index.hold.wait(60)
        if found and self.path.startswith("/files/") and index.fault_for in self.headers.get("User-Agent", ""):
            if index.fault.isdigit():
                self._send(int(index.fault), "text/plain", b"not now", has_body)
                return
            if index.fault:
                self._break_off(found[1], has_reset=index.fault == "reset")
                return
        code, (kind, body) = (200, found) if found else (404, ("text/plain", b"no such package"))
        self._send(code, kind, body, has_body)

    def _break_off(self, body: bytes, *, has_reset: bool) -> None:
        self.close_connection = True
        if has_reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])

    def _send(self, code: int, kind: str, body: bytes, has_body: bool) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="packages"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            with suppress(OSError):  # a test ended who asked
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, index: Index) -> None:
        self.index = index
        super().__init__(("127.0.0.1", 0), _Handler)


@contextmanager
def index(*wheels: Wheel, login: str | None = None, hold: threading.Event | None = None) -> Iterator[Index]:
    serving = Index(list(wheels), login, hold=hold)
    server = _Server(serving)
    serving.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield serving
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
