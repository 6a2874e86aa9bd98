"""`env.make`: makes an environment in a process of its own, whose whole tree ends with the call.

A guard (``process.execute``) stands between the node program and this process. When the call is cancelled, or the node
program ends, it ends all of them within seconds and deletes what they were building; downloads stay in the cache, so
that the next time goes on where this one stopped. An environment gets its name as the last step, when it was checked
and is on the disk: whatever is killed, nobody ever finds a half one. The name's lock is held while anything lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

from ugro.features.environments.node import interpreters as existing
from ugro.features.environments.node import interpreters as host
from ugro.features.environments.node import place as usage
from ugro.features.environments.node import tidy
from ugro.features.environments.node.build import Build
from ugro.features.environments.node.failures import Failed
from ugro.features.environments.node.installers import Site
from ugro.features.environments.node.place import Place, Recipe, checked_name, delete
from ugro.node import durable, wire, worker
from ugro.node import home as trust
from ugro.node import machine as disk
from ugro.node.process.execute import GRACE_S, Command, run_guarded
from ugro.node.program import Call, Refused, method
from ugro.node.runs.rundir import agent_of, point

# Where tests kill or stop this process; together they are every step between two durable things.
POINTS = ("env.locked", "env.unpacked", "env.created", "env.installed", "env.recorded", "env.renamed")
_LOOK_S = 0.1
_SAY_S = 0.5
_ALIVE_S = 5.0  # an agent that hears nothing for long takes it for stuck


class Making(Command):
    def __init__(self, place: Place, recipe: Recipe, lock: int, marker: bytes) -> None:
        super().__init__([], {}, b"/", GRACE_S, keep=lock)
        self._place = place
        self._recipe = recipe
        self._lock = lock
        self._marker = os.fsdecode(marker)
        self._folder = place.new_folder(recipe.name)

    def become(self) -> NoReturn:
        """Says how far it is in lines of JSON, and in the last one how it ended."""
        try:
            say({"made": self._made()})
        except Failed as failed:
            say({"failed": {"kind": failed.kind, "message": str(failed), "tail": failed.tail}})
        except Refused as refusal:
            say({"failed": {"kind": refusal.kind, "message": str(refusal)}})
        except trust.Unsafe as unsafe:
            say({"failed": {"kind": "unsafe-folder", "message": "it is not safe to install there: %s" % unsafe}})
        except OSError as error:
            kind, text = disk.refusal(error, self._place.root)
            say({"failed": {"kind": kind, "message": text}})
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            say({"failed": {"kind": "crashed", "message": "%s: %.200s" % (type(error).__name__, error)}})
        os._exit(0)

    def clean_up(self) -> None:
        """By the guard, when nothing of it lives any more."""
        delete(self._folder)

    def _made(self) -> Dict[str, Any]:
        os.umask(0o077)
        trust.prepare(self._place.root)
        self._place.prepare()
        progress = _Progress(self._recipe.count)
        self._wait(progress)
        try:
            point("env.locked")
            return self._found() or self._build(progress)
        finally:
            delete(self._folder)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # before it is said: a run may start the moment after

    def _found(self) -> Optional[Dict[str, Any]]:
        """Made by whom we waited for."""
        self._place.note_use(self._recipe.name)
        return self._place.made(self._recipe.name)

    def _build(self, progress: _Progress) -> Dict[str, Any]:
        self._clear()
        os.mkdir(self._folder, 0o700)
        return Build(self._recipe, Site(self._place, self._folder), self._marker, progress).run()

    def _wait(self, progress: _Progress) -> None:
        """For who makes or removes the same one. Not for ever in the kernel: the agent hears that we wait."""
        while not durable.lock_within(self._lock, fcntl.LOCK_EX, 0):
            progress.say("waiting")
            time.sleep(_LOOK_S)

    def _clear(self) -> None:
        """What was left of it by others who were killed; or an environment that is not whole any more."""
        for path in self._place.half(self._recipe.name):
            if self._place.is_abandoned(path):
                delete(path)
        is_there = os.path.lexists(self._place.environment(self._recipe.name))
        if is_there and usage.counts(self._place).get(self._recipe.name):  # on another machine with this folder
            raise Failed("crashed", "its interpreter is missing here, and a run still uses it")
        aside = self._place.set_aside(self._recipe.name)
        if aside is not None:
            delete(aside)


def say(line: Dict[str, Any]) -> None:
    durable.write_all(1, json.dumps(line).encode("utf-8", "replace") + b"\n")


class _Progress:
    def __init__(self, total: int) -> None:
        self._total = total
        self._said: Optional[Tuple[Any, ...]] = None
        self._said_at = float("-inf")

    def say(self, phase: str, done: int = 0, written: int = 0, line: str = "") -> None:
        """Seldom, unless the phase changes: the agent shows it to people."""
        now = time.monotonic()
        said = (phase, done, written, line)
        is_new = self._said is None or self._said[0] != phase
        if is_new or now - self._said_at > (_SAY_S if said != self._said else _ALIVE_S):
            self._said, self._said_at = said, now
            say({"phase": phase, "done": min(done, self._total), "total": self._total, "bytes": written, "line": line})


# --- api --------------------------------------------------------------------------------------------------------------
# `env.*`: the Python environments of this node. All agents that use this folder share them, as they do contents.


_MOST_NAMES = 1000
_MOST_CHECK_S = 600.0


@method("env.ready")
def ready(call: Call, *, name: str) -> None:
    """Says whether an environment is there; marks it as used."""
    place, name = _place(call), checked_name(name)
    place.note_use(name)
    call.finish({"made": place.made(name)})


@method("env.make")
def make(call: Call, *, recipe: Dict[str, Any]) -> None:
    """Makes an environment; its progress streams beside the answer."""
    place, wanted = _place(call), Recipe(dict(recipe))
    made = place.made(wanted.name)
    if made is not None:
        place.note_use(wanted.name)
        call.data(wire.OUT, json.dumps({"made": made}).encode() + b"\n")
        call.finish({})
        return
    marker = os.fsencode("%s.%s" % (place.environment(wanted.name), os.urandom(8).hex()))
    lock = place.open_lock(wanted.name)
    try:
        run_guarded(call, Making(place, wanted, lock, marker), marker)
    finally:
        os.close(lock)  # the guard has it from now on


@method("env.check")
def check(call: Call, *, path: str, limit_s: float) -> None:
    """Looks at an environment that somebody else made."""
    _place(call)
    path, limit_s = str(path), min(_MOST_CHECK_S, float(limit_s))
    worker.do(call, lambda: {"made": existing.check(path, limit_s)})


@method("env.about")
def about(call: Call, *, urls: Sequence[str] = (), with_pythons: bool = True) -> None:
    """Names the platform, the interpreters, and which addresses are reached."""
    place, addresses = _place(call), [str(one) for one in urls or ()]
    pythons = place.pythons if with_pythons else None
    worker.do(call, lambda: host.about(pythons, addresses))


@method("env.list")
def list_all(call: Call) -> None:
    place = _place(call)
    worker.do(call, lambda: {"environments": tidy.listed(place)})


@method("env.remove")
def remove(call: Call, *, names: List[str]) -> None:
    """Deletes environments that no run uses."""
    place, wanted = _place(call), _names(names)
    worker.do(call, lambda: tidy.remove(place, wanted))


@method("env.gc", is_routine=True)
def gc(call: Call, *, limit_bytes: int, unused_s: Optional[float] = None) -> None:
    """Deletes the environments that were used least recently."""
    place, limit_bytes = _place(call), int(limit_bytes)
    age_s = None if unused_s is None else float(unused_s)
    worker.do(call, lambda: tidy.tidy(place, limit_bytes, age_s))


def _place(call: Call) -> Place:
    agent_of(call)  # one that was replaced is refused
    return Place(call.program.root)


def _names(names: Any) -> List[str]:
    if not isinstance(names, list) or len(names) > _MOST_NAMES:
        raise ValueError("names must be a list")
    return [checked_name(name) for name in names]
