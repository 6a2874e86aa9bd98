"""`folders.*`: the folders of jobs on this node: looked up, received, cleaned up."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterator

from ugro.remote import trees, worker
from ugro.remote.cas.contents import WINDOW
from ugro.remote.folders import hub_cache
from ugro.remote.folders import tidy as tidying
from ugro.remote.folders.place import Place
from ugro.remote.folders.receiving import Arrival
from ugro.remote.program import Call
from ugro.remote.state.access import agent_of

_PIECE = 1 << 20
Answer = Dict[str, Any]


def has(call: Call, params: Dict[str, Any]) -> None:
    place, tree = _place(call, params), trees.parse_id(params["root"])

    def work() -> Answer:
        if place.is_whole(tree):
            place.note_use(tree)
            return {"has": True}
        place.drop_changed(tree)
        return {"has": False}

    worker.do(call, work)


def receive(call: Call, params: Dict[str, Any]) -> None:
    """Trees and contents; answers with what is still lacking. The first stream of a folder has its trees alone."""
    place, tree = _place(call, params), trees.parse_id(params["root"])

    def work(out: int, took: Callable[[int], None]) -> Answer:
        def pieces() -> Iterator[bytes]:
            for piece in iter(lambda: os.read(out, _PIECE), b""):
                yield piece
                took(len(piece))

        if place.is_whole(tree):
            for _ in pieces():
                pass
            return {"bad": 0, "lacking": []}
        arrival = Arrival(place, tree)
        try:
            arrival.receive(pieces())
            lacking = arrival.finish()
        finally:
            arrival.close()
        return {"bad": arrival.bad, "lacking": [key.hex() for key in lacking]}

    worker.receive(call, work, WINDOW)


def tidy(call: Call, params: Dict[str, Any]) -> None:
    place, limit_bytes = _place(call, params), int(params["limit_bytes"])
    keep = [trees.parse_id(one) for one in params["keep"]]
    worker.do(call, lambda: tidying.tidy(place, limit_bytes, keep))


def cached(call: Call, params: Dict[str, Any]) -> None:
    """Which of some repositories of Hugging Face this account has in its cache: for each its folder, or none."""
    _place(call, params)
    env = {**os.environ, **{str(name): str(value) for name, value in params["env"].items()}}
    wanted = [(str(kind), str(repo)) for kind, repo in params["repos"]]
    worker.do(call, lambda: {"folders": [hub_cache.find(kind, repo, env) for kind, repo in wanted]})


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "has": has,
    "receive": receive,
    "tidy": tidy,
    "cached": cached,
}


def _place(call: Call, params: Dict[str, Any]) -> Place:
    agent_of(call, params)  # one that was replaced is refused
    return Place(call.program.root)
