"""Many connections over one pair of pipes: every byte, in order, whatever the others do; and a peer that breaks."""

from __future__ import annotations

import hashlib
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.waiting import wait_until
from ugro.features.remote_access.client import mux as mux_module
from ugro.features.remote_access.client.mux import About, LinkLost, Mux
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.node import wire

WAIT_S = 30


def echo(about: About) -> socket.socket:
    """What it gets comes back, in pieces of another size; it ends when its client does."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with ours, suppress(OSError):
            while piece := ours.recv(int(about.get("piece", 1000))):
                ours.sendall(piece)
            ours.shutdown(socket.SHUT_WR)

    threading.Thread(target=serve, daemon=True).start()
    return theirs


@dataclass
class Pair:
    """A client's end and a relay's end, joined by two pipes."""

    opener: Callable[[About], socket.socket] = echo
    fds: list[int] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Pair:
        down, up = os.pipe(), os.pipe()
        self.fds += [*down, *up]
        self.client = Mux(down[0], up[1])
        self.relay = Mux(up[0], down[1], opener=self.opener)
        for one in (self.client, self.relay):
            thread = threading.Thread(target=one.run, daemon=True)
            thread.start()
            self.threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop()
        self.relay.stop()
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for fd in self.fds:
            os.close(fd)

    def open(self, **about: object) -> socket.socket:
        found = self.client.open(about, WAIT_S)
        found.settimeout(WAIT_S)
        return found


def exchange(connection: socket.socket, content: bytes, piece: int) -> bytes:
    """Sends all and ends; what comes back meanwhile and afterwards."""

    def send() -> None:
        for at in range(0, len(content), piece):
            connection.sendall(content[at : at + piece])
        connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    got = bytearray()
    while part := connection.recv(65536):
        got += part
    thread.join(WAIT_S)
    return bytes(got)


Size = st.integers(0, 300_000)
Pieces = st.integers(1, 70_000)


@given(st.lists(st.tuples(Size, Pieces, Pieces), min_size=1, max_size=8), st.integers())
def test_connections_that_run_at_once_get_their_own_bytes_and_all_of_them(
    each: list[tuple[int, int, int]], seed: int
) -> None:
    random_bytes = random.Random(seed).randbytes
    results: dict[int, bool] = {}

    def use(number: int, content: bytes, piece: int, echoed: int) -> None:
        with pair.open(piece=echoed) as connection:
            results[number] = exchange(connection, content, piece) == content

    with Pair() as pair:
        threads = [
            threading.Thread(target=use, args=(number, random_bytes(size), size // 50 + piece, size // 50 + echoed))
            for number, (size, piece, echoed) in enumerate(each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert results == dict.fromkeys(range(len(each)), True)


def test_a_reader_that_stalls_stops_its_own_connection_and_no_other() -> None:
    with Pair() as pair, pair.open(piece=65536) as stalled, pair.open(piece=65536) as other:
        stalled.settimeout(0.5)
        sent = 0
        with suppress(TimeoutError):  # nothing of what comes back is read
            while sent < 16 * wire.WINDOW:
                sent += stalled.send(bytes(65536))
        content = os.urandom(5 * wire.WINDOW)
        assert exchange(other, content, 65536) == content
        # What is under way for the stalled one is bounded by its windows and buffers, and none of it is lost.
        assert sent < 16 * wire.WINDOW
        stalled.settimeout(WAIT_S)
        stalled.shutdown(socket.SHUT_WR)
        got = 0
        while part := stalled.recv(65536):
            got += len(part)
        assert got == sent


def test_one_side_may_end_while_the_other_still_sends() -> None:
    served: list[bytes] = []
    is_ended = threading.Event()

    def late(about: About) -> socket.socket:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with ours:
                while piece := ours.recv(1000):
                    served.append(piece)
                is_ended.wait(WAIT_S)
                ours.sendall(b"after your end")

        threading.Thread(target=serve, daemon=True).start()
        return theirs

    with Pair(late) as pair, pair.open() as connection:
        connection.sendall(b"all of mine")
        connection.shutdown(socket.SHUT_WR)
        is_ended.set()
        assert connection.recv(100) == b"after your end"
        assert connection.recv(100) == b""
        assert b"".join(served) == b"all of mine"


def test_a_connection_that_cannot_be_opened_says_why_and_others_go_on() -> None:
    def opener(about: About) -> socket.socket:
        if about.get("to") != "agent":
            raise NotFound("there is no such place", hint="name another")
        return echo(about)

    with Pair(opener) as pair:
        with pytest.raises(NotFound, match="no such place") as error:
            pair.open(to="elsewhere")
        assert error.value.hint == "name another"
        with pair.open(to="agent") as connection:
            assert exchange(connection, b"x" * 100_000, 7000) == b"x" * 100_000


def test_a_socket_of_ours_is_carried_and_closed_at_its_end() -> None:
    with Pair() as pair:
        here, there = socket.socketpair()
        pair.client.carry(there, {})
        with here:
            here.settimeout(WAIT_S)
            assert exchange(here, b"hello" * 1000, 100) == b"hello" * 1000


def test_who_leaves_in_the_middle_is_noticed_at_the_other_end() -> None:
    ends: list[socket.socket] = []

    def opener(about: About) -> socket.socket:
        ours, theirs = socket.socketpair()
        ends.append(ours)
        return theirs

    with Pair(opener) as pair:
        connection = pair.open()
        ends[0].settimeout(WAIT_S)
        connection.sendall(b"half")
        connection.close()
        assert ends[0].recv(100) == b"half"
        assert ends[0].recv(100) == b""
        ends[0].close()
        with pair.open() as again:
            ends[1].close()
            again.settimeout(WAIT_S)
            assert again.recv(100) == b""


def test_there_is_a_limit_on_connections_at_once() -> None:
    with ExitStack() as stack:
        pair = stack.enter_context(Pair())
        for _ in range(mux_module.MOST_CONNECTIONS):
            stack.enter_context(pair.open())
        with pytest.raises(UgroError, match="the most at once"):
            pair.open()


def test_when_the_pipe_closes_all_connections_end_and_no_new_one_opens() -> None:
    with Pair() as pair:
        connection = pair.open()
        pair.relay.stop()
        pair.threads[1].join(WAIT_S)
        os.close(pair.fds.pop(1))  # where the relay wrote
        assert connection.recv(100) == b""
        connection.close()
        wait_until(lambda: pair.client.is_over, WAIT_S, "the client's end")
        with pytest.raises(LinkLost, match="closed the link"):
            pair.open()


# --- a peer that does not keep to the protocol ------------------------------------------------------------------


@pytest.fixture
def raw() -> Iterator[tuple[Mux, int, int]]:
    """A relay's end, and the descriptors to write to it and to read what it says."""
    to_relay, from_relay = os.pipe(), os.pipe()
    relay = Mux(to_relay[0], from_relay[1], opener=echo)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    yield relay, to_relay[1], from_relay[0]
    relay.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for fd in (*to_relay, *from_relay):
        os.close(fd)


OPEN = wire.message(wire.CALL, 1, {})
NONSENSE = {
    "no frames": b"GET / HTTP/1.1\r\n\r\n",
    "a frame that is too long": wire.HEADER.pack(wire.MAX_PAYLOAD + 1, wire.INPUT, 1),
    "an unknown connection": wire.frame(wire.INPUT, 7, b"x"),
    "connection 0": wire.frame(wire.INPUT, 0, b"x"),
    "no JSON": wire.frame(wire.CALL, 1, b"{"),
    "a long request": wire.message(wire.CALL, 1, {"to": "x" * 5000}),
    "a number twice": OPEN + OPEN,
    "bytes in the wrong direction": OPEN + wire.frame(wire.OUT, 1, b"x"),
    "more than was granted": OPEN + wire.frame(wire.INPUT, 1, bytes(wire.WINDOW + 1)),
    "more after the end": OPEN + wire.frame(wire.INPUT, 1) + wire.frame(wire.INPUT, 1, b"x"),
    "credit without an amount": OPEN + wire.frame(wire.CREDIT, 1, b"x"),
    "endless credit": OPEN + wire.frame(wire.CREDIT, 1, wire.AMOUNT.pack(1)),
    "an error about an open one": OPEN + wire.message(wire.ERROR, 1, {}),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_the_link_with_a_reason(raw: tuple[Mux, int, int], said: bytes) -> None:
    relay, write, _ = raw
    feed(relay, write, said)
    wait_until(lambda: relay.is_over, WAIT_S, "the relay's end")
    assert relay.problem is not None
    assert "protocol" in relay.problem


def feed(relay: Mux, fd: int, content: bytes) -> None:
    """As far as the relay takes it, and as long as it lives."""
    os.set_blocking(fd, False)
    while content and not relay.is_over:
        if select.select([], [fd], [], 0.05)[1]:
            with suppress(BlockingIOError):
                content = content[os.write(fd, content) :]


@given(st.binary(max_size=2000))
def test_random_bytes_never_raise_out_of_the_loop(said: bytes) -> None:
    to_relay, from_relay = os.pipe(), os.pipe()
    try:
        os.write(to_relay[1], said)
        os.close(to_relay[1])
        relay = Mux(to_relay[0], from_relay[1], opener=echo)
        relay.run()
        assert relay.problem is not None
    finally:
        for fd in (to_relay[0], *from_relay):
            os.close(fd)


def test_a_peer_that_asks_and_never_reads_is_given_up(raw: tuple[Mux, int, int]) -> None:
    relay, write, _ = raw
    feed(relay, write, wire.frame(wire.PING, 0) * 400_000)
    assert relay.is_over
    assert relay.problem is not None
    assert "reads nothing" in relay.problem


def test_a_peer_that_falls_silent_is_given_up() -> None:
    to_relay, from_relay = os.pipe(), os.pipe()
    try:
        os.write(to_relay[1], wire.frame(wire.PING, 0))
        relay = Mux(to_relay[0], from_relay[1], opener=echo, silence_s=0.1)
        relay.run()
        assert os.read(from_relay[0], 100) == wire.frame(wire.PONG, 0)
        assert relay.problem is not None
        assert "nothing was heard" in relay.problem
    finally:
        for fd in (*to_relay, *from_relay):
            os.close(fd)


def test_many_megabytes_pass_unchanged_while_others_talk() -> None:
    content = random.Random(1).randbytes(4_000_000)
    with Pair() as pair, pair.open(piece=65536) as large, pair.open() as small:
        small.settimeout(WAIT_S)
        result: list[bytes] = []
        thread = threading.Thread(target=lambda: result.append(exchange(large, content, 65536)))
        thread.start()
        for number in range(50):
            small.sendall(b"%d" % number)
            assert small.recv(100) == b"%d" % number
        thread.join(2 * WAIT_S)
    assert [hashlib.sha256(one).digest() for one in result] == [hashlib.sha256(content).digest()]


def test_an_opener_that_refuses_is_told_in_its_own_words() -> None:
    def opener(about: About) -> socket.socket:
        raise NotAllowed("no")

    with Pair(opener) as pair, pytest.raises(NotAllowed, match="no"):
        pair.open()
