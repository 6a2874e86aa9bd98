"""A connection that cannot even be tried leaves no place taken and no descriptor open."""

from __future__ import annotations

import os
import socket

from ugro.node import net as forward
from ugro.node import wire
from ugro.node.program import Call, Program


def test_a_socket_whose_name_is_too_long_takes_no_place() -> None:
    reading, writing = os.pipe()
    folder = os.open("/", os.O_RDONLY)
    before = set(os.listdir("/proc/self/fd"))
    try:
        call = Call(Program(reading, writing, "/", 30.0, "key"), 1)
        target = forward.Target(socket.AF_UNIX, "x" * 200, "it", os.dup(folder))
        forward.Forward(call, [target])
        [(kind, _, payload)] = wire.Decoder().feed(os.read(reading, 1000))
        assert (kind, wire.parse(payload)) == (wire.ERROR, {"kind": "os", "message": "it: File name too long"})
        assert target.folder is None
        assert not forward._open
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1  # the selector of the program
    finally:
        for descriptor in (reading, writing, folder):
            os.close(descriptor)
