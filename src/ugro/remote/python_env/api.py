"""`env.*`: the Python environments of this node. All agents that use this folder share them, as they do contents."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Dict, List

from ugro.remote import wire, worker
from ugro.remote.process.execute import run_guarded
from ugro.remote.program import Call
from ugro.remote.python_env import existing, host, tidy
from ugro.remote.python_env.making import Making
from ugro.remote.python_env.place import Place, checked_name
from ugro.remote.python_env.recipe import Recipe
from ugro.remote.state.access import agent_of

_MOST_NAMES = 1000
_MOST_CHECK_S = 600.0


def ready(call: Call, params: Dict[str, Any]) -> None:
    place = _place(call, params)
    name = checked_name(params["name"])
    place.note_use(name)
    call.finish({"made": place.made(name)})


def make(call: Call, params: Dict[str, Any]) -> None:
    place, recipe = _place(call, params), Recipe(dict(params["recipe"]))
    made = place.made(recipe.name)
    if made is not None:
        place.note_use(recipe.name)
        call.data(wire.OUT, json.dumps({"made": made}).encode() + b"\n")
        call.finish({})
        return
    marker = os.fsencode("%s.%s" % (place.environment(recipe.name), os.urandom(8).hex()))
    lock = place.open_lock(recipe.name)
    try:
        run_guarded(call, Making(place, recipe, lock, marker), marker)
    finally:
        os.close(lock)  # the guard has it from now on


def check(call: Call, params: Dict[str, Any]) -> None:
    _place(call, params)
    path, timeout_s = str(params["path"]), min(_MOST_CHECK_S, float(params["limit_s"]))
    worker.do(call, lambda: {"made": existing.check(path, timeout_s)})


def about(call: Call, params: Dict[str, Any]) -> None:
    place, addresses = _place(call, params), [str(one) for one in params.get("urls") or ()]
    pythons = place.pythons if params.get("with_pythons", True) else None
    worker.do(call, lambda: host.about(pythons, addresses))


def list_all(call: Call, params: Dict[str, Any]) -> None:
    place = _place(call, params)
    worker.do(call, lambda: {"environments": tidy.listed(place)})


def remove(call: Call, params: Dict[str, Any]) -> None:
    place, names = _place(call, params), _names(params["names"])
    worker.do(call, lambda: tidy.remove(place, names))


def gc(call: Call, params: Dict[str, Any]) -> None:
    place, limit_bytes = _place(call, params), int(params["limit_bytes"])
    unused_s = None if params.get("unused_s") is None else float(params["unused_s"])
    worker.do(call, lambda: tidy.tidy(place, limit_bytes, unused_s))


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "ready": ready,
    "make": make,
    "check": check,
    "about": about,
    "list": list_all,
    "remove": remove,
    "gc": gc,
}


def _place(call: Call, params: Dict[str, Any]) -> Place:
    agent_of(call, params)  # one that was replaced is refused
    return Place(call.program.root)


def _names(names: Any) -> List[str]:
    if not isinstance(names, list) or len(names) > _MOST_NAMES:
        raise ValueError("names must be a list")
    return [checked_name(name) for name in names]
