"""The relay between the door and Serve's proxy: what it makes of a request, and what it refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ugro.inference.ray_serve.relay import Relay, header_of, rewritten, target_of

HEAD = b"POST /v1/x?a=1 HTTP/1.1\r\nHost: h\r\nauthorization: Bearer s\r\nConnection: keep-alive\r\nX-Id: 7\r\n\r\n"


def test_a_request_goes_below_the_path_of_its_application_and_without_the_secret() -> None:
    assert target_of(HEAD) == b"/v1/x?a=1"
    made = rewritten(HEAD, b"/ugro-k-1")
    assert made == b"POST /ugro-k-1/v1/x?a=1 HTTP/1.1\r\nHost: h\r\nX-Id: 7\r\nConnection: close\r\n\r\n"


def test_the_headers_of_a_web_socket_stay() -> None:
    head = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    made = rewritten(head, b"/a")
    assert header_of(made, b"connection") == b"Upgrade"
    assert header_of(made, b"upgrade") == b"websocket"


async def _proxy(seen: list[bytes]) -> asyncio.Server:
    """Answers with what follows the headers, then closes."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        body = await reader.readexactly(int(header_of(head, b"content-length") or b"0"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(accept, "127.0.0.1", 0)


async def _ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read(-1)
    writer.close()
    return answer


def _run(what: Callable[[int, list[bytes]], Awaitable[None]], *, problem: str | None = None) -> None:
    async def both() -> None:
        seen: list[bytes] = []
        proxy = await _proxy(seen)
        relay = Relay("/app-1", proxy.sockets[0].getsockname()[1], "s3cret", lambda: problem)
        server = await relay.start("127.0.0.1", 0)
        async with proxy, server:
            await what(server.sockets[0].getsockname()[1], seen)

    asyncio.run(both())


def test_only_who_has_the_services_secret_reaches_the_application() -> None:
    async def look(port: int, seen: list[bytes]) -> None:
        for header in ("", "Authorization: Bearer wrong\r\n"):
            assert (await _ask(port, f"GET / HTTP/1.1\r\nHost: h\r\n{header}\r\n".encode())).startswith(b"HTTP/1.1 401")
        assert seen == []
        good = b"POST /x HTTP/1.1\r\nAuthorization: Bearer s3cret\r\nContent-Length: 5\r\n\r\nhello"
        assert (await _ask(port, good)).endswith(b"hello")
        assert target_of(seen[0]) == b"/app-1/x"
        assert header_of(seen[0], b"authorization") == b""

    _run(look)


@pytest.mark.parametrize(("problem", "status"), [(None, b"200"), ("no application", b"503")])
def test_it_says_itself_whether_it_is_ready(problem: str | None, status: bytes) -> None:
    async def look(port: int, seen: list[bytes]) -> None:
        assert (await _ask(port, b"GET /-/healthz HTTP/1.1\r\n\r\n")).split(b" ")[1] == status
        assert (await _ask(port, b"GET /-/alive HTTP/1.1\r\n\r\n")).split(b" ")[1] == b"200"
        assert seen == []

    _run(look, problem=problem)


def test_a_proxy_that_is_away_gets_no_answer_invented() -> None:
    async def look() -> None:
        with socket.socket() as deaf:  # has the port, so that nobody else gets it, and does not listen
            deaf.bind(("127.0.0.1", 0))
            relay = Relay("/app-1", deaf.getsockname()[1], "", lambda: None)
            async with await relay.start("127.0.0.1", 0) as server:
                assert await _ask(server.sockets[0].getsockname()[1], b"GET / HTTP/1.1\r\n\r\n") == b""

    asyncio.run(look())
