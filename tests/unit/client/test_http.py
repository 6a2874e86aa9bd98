"""Our reader of HTTP answers: exact about what it takes, and never in doubt about where an answer ends."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ugro.client.http import AgentGone, Connection, NoAgent, lines
from ugro.kernel.support.errors import NotFound, UgroError, Unreachable

Serve = Callable[..., Connection]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """``serve(answer, …)`` answers one request with each, in pieces when it is a list, and hangs up after the last."""
    path = tmp_path / "agent.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)
    connections: list[Connection] = []
    threads: list[threading.Thread] = []

    def start(*answers: bytes | list[bytes], per_connection: int = 99) -> Connection:
        thread = threading.Thread(target=answer_all, args=(listener, list(answers), per_connection), daemon=True)
        thread.start()
        threads.append(thread)
        connections.append(Connection(path))
        return connections[-1]

    yield start
    for connection in connections:
        connection.close()
    listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(5)
    listener.close()


def answer_all(listener: socket.socket, answers: list[bytes | list[bytes]], per_connection: int) -> None:
    while answers:
        try:
            peer, _ = listener.accept()
        except OSError:  # the test is over
            return
        with peer:
            for _ in range(min(per_connection, len(answers))):
                if not read_request(peer):
                    break
                answer = answers.pop(0)
                for piece in answer if isinstance(answer, list) else [answer]:
                    peer.sendall(piece)


def read_request(peer: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        part = peer.recv(65536)
        if not part:
            return b""
        request += part
    return request


def test_an_answer_of_known_length_is_read_and_the_connection_kept(serve: Serve) -> None:
    connection = serve(OK + b"Content-Length: 7\r\n\r\n[1,2,3]", OK + b"content-length: 1\r\n\r\n4")
    assert connection.ask("GET", "/", timeout_s=5) == [1, 2, 3]
    assert connection.is_usable
    assert connection.ask("GET", "/", timeout_s=5) == 4


def test_an_empty_answer_is_none(serve: Serve) -> None:
    connection = serve(b"HTTP/1.1 204 No Content\r\n\r\n", OK + b"content-length: 0\r\n\r\n")
    assert connection.ask("POST", "/", timeout_s=5) is None
    assert connection.ask("POST", "/", timeout_s=5) is None


def test_chunks_arrive_whole_whatever_the_pieces_they_travel_in(serve: Serve) -> None:
    content = bytes(range(256)) * 10
    answer = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (content[:7], content[7:]))
    answer += b"0\r\n\r\n"
    connection = serve([bytes([byte]) for byte in answer], OK + b"content-length: 2\r\n\r\n[]")
    assert b"".join(connection.start("GET", "/", timeout_s=5)) == content
    assert connection.ask("GET", "/", timeout_s=5) == []


def test_chunk_extensions_and_trailers_are_passed_over(serve: Serve) -> None:
    connection = serve(CHUNKED + b"2;colour=red\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n")
    assert connection.ask("GET", "/", timeout_s=5) == {}


@pytest.mark.parametrize(
    "rest",
    [
        b"5\r\nabc",
        b"5\r\nabcde\r\n",
        b"5\r\nabcdefg\r\n0\r\n\r\n",
        b"5\nabcde\n0\n\n",
        b"-1\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"1_0\r\nabc\r\n0\r\n\r\n",
        b" 3\r\nabc\r\n0\r\n\r\n",
        b"\r\n",
        b"three\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\n",
        b"",
    ],
)
def test_a_chunked_answer_that_is_not_whole_is_never_taken_for_one(serve: Serve, rest: bytes) -> None:
    connection = serve(CHUNKED + rest)
    with pytest.raises(AgentGone, match="in the middle of its answer"):
        b"".join(connection.start("GET", "/", timeout_s=5))
    assert not connection.is_usable


@pytest.mark.parametrize("head", [b"", b"HTTP/1.0 200 OK\r\n\r\n", b"220 smtp ready\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
def test_what_is_not_http_is_no_agent(serve: Serve, head: bytes) -> None:
    with pytest.raises(AgentGone, match="before it answered"):
        serve(head).ask("GET", "/", timeout_s=5)


def test_an_endless_header_is_refused(serve: Serve) -> None:
    with pytest.raises(AgentGone):
        serve(OK + b"x: y\r\n" * 101 + b"\r\n").ask("GET", "/", timeout_s=5)


def test_a_short_answer_is_an_agent_that_ended(serve: Serve) -> None:
    with pytest.raises(AgentGone, match="in the middle"):
        serve(OK + b"content-length: 10\r\n\r\nabc").ask("GET", "/", timeout_s=5)


def test_an_error_answer_is_raised_as_what_it_is(serve: Serve) -> None:
    wire = json.dumps({"error": NotFound("no node gpu9", hint="see: ugro node ls").to_wire()}).encode()
    connection = serve(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(wire), wire))
    with pytest.raises(NotFound, match="no node gpu9") as caught:
        connection.ask("GET", "/", timeout_s=5)
    assert caught.value.hint == "see: ugro node ls"


def test_an_error_answer_that_is_not_ours_says_so(serve: Serve) -> None:
    connection = serve(b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops")
    with pytest.raises(UgroError, match="HTTP 500"):
        connection.ask("GET", "/", timeout_s=5)


def test_silence_is_not_waited_for_longer_than_asked(serve: Serve) -> None:
    connection = serve([], b"")
    with pytest.raises(Unreachable, match="does not answer") as caught:
        connection.ask("GET", "/", timeout_s=0.1)
    assert not isinstance(caught.value, AgentGone)
    assert caught.value.cause == "hung"
    connection.close()


def test_a_connection_that_the_agent_closed_while_idle_is_opened_again(serve: Serve) -> None:
    one, two = OK + b"content-length: 1\r\n\r\n1", OK + b"content-length: 1\r\n\r\n2"
    connection = serve(one, two, per_connection=1)
    assert connection.ask("GET", "/", timeout_s=5) == 1
    assert connection.ask("GET", "/", timeout_s=5) == 2


def test_a_connection_that_the_agent_closed_just_as_we_wrote_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(2)
        thread = threading.Thread(target=answer_one_and_leave_the_next_unread, args=(listener,), daemon=True)
        thread.start()
        connection = Connection(path)
        assert connection.ask("GET", "/", timeout_s=5) == 1
        assert connection.ask("POST", "/jobs", {"name": "once"}, timeout_s=5) == 2
        connection.close()
        thread.join(5)


def answer_one_and_leave_the_next_unread(listener: socket.socket) -> None:
    for number, is_cut in ((1, True), (2, False)):
        peer, _ = listener.accept()
        with peer:
            read_request(peer)
            peer.sendall(OK + b"content-length: 1\r\n\r\n%d" % number)
            if is_cut:
                select.select([peer], [], [], 5)


@pytest.mark.parametrize("is_accepted", [False, True])
def test_an_agent_that_ends_before_it_reads_a_request_did_not_hear_it(tmp_path: Path, is_accepted: bool) -> None:
    path = tmp_path / "agent.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    thread = threading.Thread(target=end_without_reading, args=(listener, is_accepted), daemon=True)
    thread.start()
    connection = Connection(path)
    with pytest.raises(NoAgent, match="before it answered"):
        connection.ask("POST", "/jobs", {"name": "once"}, timeout_s=5)
    connection.close()
    thread.join(5)


def end_without_reading(listener: socket.socket, is_accepted: bool) -> None:
    with listener:
        select.select([listener], [], [], 5)
        if is_accepted:
            peer, _ = listener.accept()
            with peer:
                select.select([peer], [], [], 5)


def test_an_agent_that_ends_when_it_has_read_a_request_may_have_heard_it(serve: Serve) -> None:
    with pytest.raises(AgentGone) as caught:
        serve(b"").ask("POST", "/jobs", {"name": "once"}, timeout_s=5)
    assert not isinstance(caught.value, NoAgent)


def test_an_answer_that_was_not_read_to_its_end_does_not_spoil_the_next(serve: Serve) -> None:
    connection = serve(CHUNKED + b"3\r\nold\r\n", OK + b"content-length: 1\r\n\r\n2", per_connection=1)
    assert next(connection.start("GET", "/", timeout_s=5)) == b"old"
    assert connection.ask("GET", "/", timeout_s=5) == 2


def test_where_nobody_listens_there_is_no_agent(tmp_path: Path) -> None:
    for path in (tmp_path / "agent.sock", tmp_path / "missing" / "agent.sock"):
        with pytest.raises(AgentGone, match="no agent is running"):
            Connection(path).ask("GET", "/", timeout_s=5)


def test_lines_are_cut_at_line_ends_and_an_error_among_them_is_raised() -> None:
    wire = json.dumps({"error": NotFound("gone").to_wire()}).encode()
    got = lines(iter([b'{"a": 1}\n{"a"', b": 2}\n", wire + b"\n"]))
    assert [next(got), next(got)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(NotFound, match="gone"):
        next(got)
