"""Frames arrive whole, however the socket cuts them."""

from __future__ import annotations

import os
import socket

from hypothesis import given
from hypothesis import strategies as st

from ugro.features.batches.pipes import FrameReader, Outbox, head_of, split


@given(frames=st.lists(st.lists(st.binary(max_size=300), max_size=5), max_size=5), cuts=st.integers(1, 400))
def test_frames_arrive_whole_however_they_are_cut(frames: list[list[bytes]], cuts: int) -> None:
    sent = b"".join(head_of(parts) + b"".join(parts) for parts in frames)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        reader = FrameReader(theirs)
        found = []
        for start in range(0, len(sent), cuts):
            ours.sendall(sent[start : start + cuts])
            arrived, is_open = reader.available()
            assert is_open
            found += arrived
        ours.close()
        assert reader.available() == ([], False)
    assert [[bytes(part) for part in parts] for parts in found] == frames


def test_more_than_a_socket_holds_is_sent_in_turns() -> None:
    parts = [os.urandom(3 << 20), b"", b"end"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        outbox, reader = Outbox(ours), FrameReader(theirs)
        outbox.add(parts)
        found: list[list[memoryview]] = []
        while not found:
            outbox.flush()
            found, _ = reader.available()
        assert not outbox
    assert [bytes(part) for part in found[0]] == parts


def test_the_parts_of_a_frame_in_a_file_are_not_copied() -> None:
    whole = memoryview(head_of([b"ab", b"", b"c"]) + b"abc")
    parts = split(whole)
    assert [bytes(part) for part in parts] == [b"ab", b"", b"c"]
    assert all(part.obj is whole.obj for part in parts)
