"""Connections to what listens on real nodes, through the agent and its links: every byte, both ways, and every end."""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.integration.conftest import Farms, RawProgram, Ugro, memory_bytes
from tests.integration.sharing import commands
from tests.rig.servers import Recorder, echo, flood, serving
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until
from ugro.client.client import Client
from ugro.client.tunnel import Dialer, NodeStream
from ugro.kernel.access.operations import ListAuditEntries
from ugro.kernel.jobs.model import JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.links.tunnels import MOST_OF_NODE
from ugro.kernel.support.errors import NotAllowed, NotFound, RemoteFailure, Unreachable, UsageError
from ugro.node import net as forward
from ugro.node import wire

TEN_MB = 10_000_000
# Binds a socket in its run directory, and another outside, to which a link in the run directory points.
LISTENING = """
import os, socket, sys, threading
here, outside = os.environ["UGRO_RUN_DIR"], sys.argv[1]
def serve(folder, name, word):
    os.chdir(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    def answer():
        while True:
            connection, _ = listener.accept()
            connection.sendall(word)
            connection.close()
    threading.Thread(target=answer).start()
serve(outside, "other", b"outside")
os.makedirs(os.path.join(here, "talk"))
os.symlink(os.path.join(outside, "other"), os.path.join(here, "link"))
os.symlink(outside, os.path.join(here, "folder"))
serve(os.path.join(here, "talk"), "rank0", b"inside")
print("listening", flush=True)
"""


@pytest.fixture(scope="module")
def farm() -> Iterator[SshdFarm]:
    with ExitStack() as stack:
        yield Farms(stack)(2)


@pytest.fixture(scope="module")
def ugro(farm: SshdFarm) -> Iterator[Ugro]:
    with commands(farm.cluster_yaml()) as ugro:
        yield ugro


@pytest.fixture
def client(ugro: Ugro) -> Iterator[Client]:
    with Client(home=ugro.home, cluster=ugro.cluster) as client:
        yield client


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    found = bytearray()
    while piece := connection.recv(1 << 20):
        found += piece
    return bytes(found)


def exchanged(port: int, content: bytes) -> bytes:
    """What comes back, when all was sent and our side has ended."""
    with closing(connect(port)) as connection:

        def send() -> None:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        found = read_all(connection)
        sender.join()
        return found


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_ten_megabytes_go_both_ways_over_two_connections_at_once_and_end_with_them(client: Client) -> None:
    contents = [random.Random(seed).randbytes(TEN_MB) for seed in (1, 2)]
    with serving(echo) as port, client.tunnel("n001", port) as local_port, ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda content: exchanged(local_port, content), contents))
    assert [hashlib.sha256(one).digest() for one in found] == [hashlib.sha256(one).digest() for one in contents]


def test_a_server_on_the_ipv6_loopback_is_reached_too(client: Client) -> None:
    with serving(echo, socket.AF_INET6) as port, client.tunnel("n002", port) as local_port:
        assert exchanged(local_port, b"hello") == b"hello"


def test_each_side_ends_on_its_own_and_the_other_goes_on(client: Client) -> None:
    has_ended = threading.Event()

    def greet_and_listen(connection: socket.socket) -> None:
        connection.sendall(b"bye")
        connection.shutdown(socket.SHUT_WR)
        if read_all(connection) == b"still here":
            has_ended.set()

    with serving(greet_and_listen) as port, Dialer(client, "n001", port)() as stream:
        assert stream.recv() == b"bye"
        assert stream.recv() == b""  # it sends no more, and still reads
        stream.sendall(b"still here")
        stream.end()
        stream.wait_closed()
        assert has_ended.wait(10)


def test_a_server_that_closes_early_is_heard_to_its_end_and_then_seen_to_be_gone(client: Client) -> None:
    def answer_and_close(connection: socket.socket) -> None:
        connection.recv(10)
        connection.sendall(b"enough")

    with ExitStack() as stack:
        port = stack.enter_context(serving(answer_and_close))
        connection = stack.enter_context(closing(connect(stack.enter_context(client.tunnel("n001", port)))))
        connection.sendall(b"0123456789")
        assert read_all(connection) == b"enough"

        def sends() -> None:
            for _ in range(1000):
                connection.sendall(b"more" * 10_000)

        with pytest.raises(ConnectionError):
            sends()


# --- what fails ----------------------------------------------------------------------------------------------------


def test_a_port_on_which_nothing_listens_is_one_clear_error(client: Client) -> None:
    with serving(echo) as port:
        pass
    with pytest.raises(RemoteFailure) as refused, client.tunnel("n001", port):
        pytest.fail("there is nothing to forward to")
    assert str(refused.value) == f"n001: nothing listens on port {port}"
    assert refused.value.hint == "see what listens there: ugro exec n001 -- ss -ltnx"
    assert refused.value.cause == "refused"


def test_what_cannot_be_meant_is_refused_before_anything_is_opened(client: Client) -> None:
    with pytest.raises(UsageError, match="port 70000 is not between 1 and 65535"):
        client.tunnel("n001", 70000)
    with pytest.raises(NotFound, match="no node 'n003'"), client.tunnel("n003", 80):
        pytest.fail("there is no such node")
    with serving(echo) as port, pytest.raises(UsageError, match=f"local port {port} cannot be used"):
        client.tunnel("n001", port, local_port=port).open()


def test_a_cut_link_resets_both_ends_and_the_next_connection_works(client: Client, farm: SshdFarm) -> None:
    recorder = Recorder()
    with serving(recorder) as port:
        tunnel = client.tunnel("n002", port)
        with tunnel as local_port, closing(connect(local_port)) as connection:
            connection.sendall(b"x" * 1_000_000)
            wait_until(lambda: recorder.received >= 1_000_000, 10, "the first bytes to arrive")
            farm["n002"].kill_sessions()
            with pytest.raises(ConnectionError):  # and not the end of the data
                connection.recv(1)
            wait_until(lambda: "cut off" in recorder.ends, 10, "the server to see it")
            wait_until(lambda: tunnel.problem is not None, 10, "the tunnel to know why")
            assert isinstance(tunnel.problem, Unreachable)
            recorder.received = 0
            wait_until(lambda: client.health(["n002"])[0].error is None, 20, "n002 to be reached again")
            assert exchanged(local_port, b"again") == b""
            assert recorder.received == 5


def test_a_connection_that_is_given_up_is_cut_off_at_the_node_too(client: Client) -> None:
    recorder = Recorder()
    with serving(recorder) as port:
        stream = Dialer(client, "n001", port)()
        stream.sendall(b"half of it")
        wait_until(lambda: recorder.received == 10, 10, "it to arrive")
        stream.close()
        wait_until(lambda: recorder.ends == ["cut off"], 10, "the server to see it")


@pytest.mark.proof
def test_a_client_that_leaves_while_nobody_takes_its_bytes_is_noticed(client: Client) -> None:
    is_gone = threading.Event()

    def read_when_it_is_over(connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLHUP)  # not for what can be read
        if poll.poll(30_000):
            is_gone.set()

    def fill(stream: NodeStream) -> None:
        with suppress(Unreachable):
            while True:
                stream.sendall(b"x" * 65536)

    with serving(read_when_it_is_over) as port:
        stream = Dialer(client, "n001", port)()
        filling = threading.Thread(target=fill, args=(stream,))
        filling.start()
        agent = client.agent().pid
        wait_until(lambda: blocks(filling), 20, "all windows to be full")
        assert memory_bytes(agent) < 500_000_000
        stream.close()
        filling.join(10)
        assert is_gone.wait(20)


def blocks(thread: threading.Thread) -> bool:
    """It has used no processor for a while."""
    before = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().split()[13:15]
    time.sleep(0.3)  # the pace of looking, not a guess at how long it takes
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().split()[13:15] == before


@pytest.mark.proof
def test_after_the_agent_was_killed_the_same_tunnel_works_again(client: Client) -> None:
    with serving(echo) as port, client.tunnel("n001", port) as local_port:
        with closing(connect(local_port)) as connection:
            connection.sendall(b"hello")
            assert connection.recv(5) == b"hello"
            os.kill(client.agent().pid, signal.SIGKILL)
            with pytest.raises(ConnectionError):
                connection.recv(1)
        assert exchanged(local_port, b"hello again") == b"hello again"


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_holds_up_nobody_but_itself(client: Client) -> None:
    agent = client.agent().pid
    before = memory_bytes(agent)
    with serving(flood) as port, ExitStack() as stack:
        streams = [stack.enter_context(Dialer(client, "n001", port)()) for _ in range(4)]
        for stream in streams:
            assert stream.recv(1) == b"x"
        # Each is full up to its window by now, or will be; calls over the same link are answered all the same.
        for _ in range(3):
            [report] = client.health(["n001"])
            assert report.error is None
            *_, ended = client.exec(["n001"], ["true"])
            assert ended.exit_code == 0  # type: ignore[union-attr]
        assert memory_bytes(agent) - before < 25_000_000
        assert len(streams[0].recv()) > 0


def test_connections_over_one_link_are_bounded_and_a_free_place_is_used_again(client: Client) -> None:
    with serving(echo) as port, ExitStack() as stack:
        dial = Dialer(client, "n001", port)
        streams = [stack.enter_context(dial()) for _ in range(MOST_OF_NODE)]
        with pytest.raises(NotAllowed, match=f"{MOST_OF_NODE} connections to n001 are open"):
            dial()
        streams[0].end()
        streams[0].wait_closed()
        with dial() as one_more:
            one_more.sendall(b"hello")
            assert one_more.recv() == b"hello"


def test_the_node_program_has_a_bound_of_its_own(tmp_path: Path) -> None:
    with serving(echo) as port, RawProgram(tmp_path) as program:
        for number in range(1, forward.MOST + 1):
            program.call(number, "net.connect", {"port": port})
            assert program.frame()[:2] == (wire.CREDIT, number)
        program.call(forward.MOST + 1, "net.connect", {"port": port})
        kind, number, payload = program.frame()
        assert (kind, number) == (wire.ERROR, forward.MOST + 1)
        assert f"{forward.MOST} connections are forwarded" in wire.parse(payload)["message"]


def test_the_node_program_takes_no_more_than_it_granted(tmp_path: Path) -> None:
    with serving(echo) as port, RawProgram(tmp_path) as program:
        program.call(1, "net.connect", {"port": port})
        assert program.frame() == (wire.CREDIT, 1, wire.AMOUNT.pack(wire.WINDOW))
        program.write(wire.frame(wire.INPUT, 1, b"x" * (wire.WINDOW + 1)))
        *_, (kind, number, payload) = program.frames()
        assert (kind, number) == (wire.ERROR, 0)
        assert "more than it has room for" in wire.parse(payload)["message"]


# --- sockets of jobs -----------------------------------------------------------------------------------------------


def test_a_socket_in_a_jobs_run_directory_is_reached_and_nothing_outside_it(client: Client, tmp_path: Path) -> None:
    wanted = {"command": ["python3", "-c", LISTENING, str(tmp_path)], "only": ["n002"], "cwd": "/"}
    job = client.jobs.submit(fields=wanted, env={}).id
    pieces = client.jobs.follow(job)
    wait_until(lambda: b"listening" in getattr(next(pieces), "content", b""), 30, "the job to listen")
    with Dialer(client, "n002", job=job, socket="talk/rank0")() as stream:
        assert stream.recv() == b"inside"
    for name in ("link", "folder/other", "../other", "/etc/passwd", "spec.json"):
        with pytest.raises(RemoteFailure):
            Dialer(client, "n002", job=job, socket=name)()
    with pytest.raises(RemoteFailure, match="nothing listens on talk/rank1 of run"):
        Dialer(client, "n002", job=job, socket="talk/rank1")()
    with pytest.raises(NotFound, match=f"job {job} does not run on n001"):
        Dialer(client, "n001", job=job, socket="talk/rank0")()
    client.ask(CancelJob(str(job)))
    assert client.jobs.wait(job, timeout_s=30).state is JobState.CANCELLED
    with pytest.raises(NotFound, match=f"job {job} does not run on n002"):
        Dialer(client, "n002", job=job, socket="talk/rank0")()


def test_a_tunnel_is_recorded_once_for_all_its_connections(client: Client) -> None:
    with serving(echo) as port, client.tunnel("n002", port) as local_port:
        for _ in range(3):
            assert exchanged(local_port, b"hello") == b"hello"
        entries = [one for one in client.ask(ListAuditEntries()).audit if one.subject == f"n002 port {port}"]
    assert [(one.action, one.outcome, one.via) for one in entries] == [("tunnel", "done", f"pid {os.getpid()}")]
