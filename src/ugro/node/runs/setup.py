"""`runs.setup`: a script that prepares this node for a job, run once for each content of it.

The agent names the content by a key. What was done is remembered by a file; of two who ask at once one runs the script
and the other waits for it. Its whole tree ends with it, as that of any command (``execute``).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from typing import Any, Callable, Dict, List, Optional

from ugro.node import durable, trees, worker
from ugro.node import machine as disk
from ugro.node.clock import moment
from ugro.node.files import contents
from ugro.node.process.execute import GRACE_S, MARK, Command, run_guarded
from ugro.node.program import Call, method
from ugro.node.runs.logs import last_lines
from ugro.node.runs.rundir import AgentDir, RunDir, run_of
from ugro.node.runs.runspec import environment, folder, search_path, with_path

TAIL_LINES = 50
_TAIL_BYTES = 16 * 1024
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_LOOK_S = 0.1
_SHELL = b'exec /bin/sh -eu "$1" >"$2" 2>&1'
# Not all of a run's variables: by the others its processes are found, and this is none.
_GIVEN = ("UGRO_JOB", "UGRO_ATTEMPT")


@method("runs.setup")
def setup(call: Call, /, *, job: str, attempt: int, key: str, script: str, **where: Any) -> None:
    """Runs a job's setup script once: in ``cwd``, with ``env`` and ``path``, in a copy of ``code``.

    ``key`` is of everything that it depends on.
    """
    run, key = run_of(call, job, attempt), str(key)
    if not _KEY.fullmatch(key) or not isinstance(script, str):
        raise ValueError("a key of letters and digits is needed, and a script")
    place = _Place(run.agent, key)
    cwd = folder(where.get("cwd"))
    env = with_path({**os.environb, **environment(where.get("env"))}, search_path(where.get("path")))
    env.update((name.encode(), os.fsencode(value)) for name, value in run.variables().items() if name in _GIVEN)
    code = None if where.get("code") is None else trees.parse_id(where["code"])
    _Setup(call, place, script, _check_out(run, place, code) if code else None).go_on_with(env, cwd)


def _check_out(run: RunDir, place: _Place, code: bytes) -> Callable[[], Dict[str, Any]]:
    def check_out() -> Dict[str, Any]:
        shutil.rmtree(place.folder, ignore_errors=True)  # what one that failed left
        contents.check_out(run, code, place.folder)
        return {}

    return check_out


class _Place:
    """Where things are; what is remembered of a key is there for all jobs of the agent."""

    def __init__(self, agent: AgentDir, key: str) -> None:
        self.path = os.path.join(agent.path, "setup")
        self.folder = os.path.join(self.path, key)
        self.script = self.folder + ".sh"
        self.log = self.folder + ".log"
        self.lock = self.folder + ".lock"
        self.done = self.folder + ".done"

    def is_done(self) -> bool:
        return durable.read_json(self.done) is not None


class _Setup:
    def __init__(
        self, call: Call, place: _Place, script: str, check_out: Optional[Callable[[], Dict[str, Any]]] = None
    ) -> None:
        self._call = call
        self._check_out = check_out
        self._place = place
        self._script = script
        self._lock: Optional[int] = None
        self._command: Optional[_Inner] = None
        call.on_cancel = self._cancel

    def go_on_with(self, env: Dict[bytes, bytes], cwd: Optional[bytes]) -> None:
        self._env = env
        self._cwd = cwd
        self._go_on()

    def _go_on(self) -> None:
        if self._call.is_done:
            return
        try:
            self._look()
        except OSError as error:
            self._close()
            self._call.fail(*disk.refusal(error, self._call.program.root))

    def _look(self) -> None:
        if self._place.is_done():
            self._finish({"is_new": False, "code": 0})
        elif self._has_lock():
            if self._place.is_done():  # by whom we waited for
                self._finish({"is_new": False, "code": 0})
            else:
                self._run()
        else:
            self._call.program.after(_LOOK_S, self._go_on)

    def _has_lock(self) -> bool:
        if self._lock is None:
            durable.make_folder(self._place.path)
            self._lock = os.open(self._place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return durable.lock_within(self._lock, fcntl.LOCK_EX, 0)

    def _run(self) -> None:
        durable.make_folder(self._place.folder)
        if self._check_out is None:
            self._start()
            return
        self._command = _Inner(self._call, self._conclude, self._fail)
        worker.do(self._command, self._check_out, lambda answer: self._start())

    def _start(self) -> None:
        for path, content in ((self._place.script, self._script), (self._place.log, "")):
            _write_private(path, content.encode("utf-8", "surrogateescape"))
        files = [os.fsencode(self._place.script), os.fsencode(self._place.log)]
        marker = os.fsencode("%s.%s" % (self._place.folder, os.urandom(8).hex()))
        argv = [b"/bin/sh", b"-c", _SHELL, b"sh", *files]
        env = {**self._env, MARK.encode(): marker}
        cwd = self._cwd or os.fsencode(self._place.folder)
        self._command = _Inner(self._call, self._conclude, self._fail)
        run_guarded(self._command, Command(argv, env, cwd, GRACE_S, keep=self._lock), marker)

    def _conclude(self, result: Dict[str, Any]) -> None:
        assert self._command is not None
        if self._command.is_cancelled:
            self._fail("cancelled", "it was cancelled; what it had begun was ended")
            return
        code = result["code"] if result["signal"] is None else 128 + result["signal"]
        if code == 0:
            self._remember()
        else:
            tail = last_lines(self._place.log, TAIL_LINES, _TAIL_BYTES) or self._command.last_lines()
            self._finish({"is_new": True, "code": code, "tail": tail})

    def _remember(self) -> None:
        try:
            durable.write_json(self._place.done, {"job": self._env[b"UGRO_JOB"].decode()}, is_lasting=False)
        except OSError as error:
            self._fail("os", "it is done, and that cannot be written down: %s" % error)
        else:
            self._finish({"is_new": True, "code": 0})

    def _finish(self, answer: Dict[str, Any]) -> None:
        self._close()
        self._call.finish({"now": moment(), **answer})

    def _fail(self, kind: str, text: str) -> None:
        self._close()
        self._call.fail(kind, text)

    def _cancel(self) -> None:
        if self._command is None:
            self._fail("cancelled", "it was cancelled while it waited for another")
        else:
            self._command.cancel()

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Inner(Call):
    """The call that the command believes to answer; what it says itself is only that it could not be started."""

    def __init__(
        self, outer: Call, conclude: Callable[[Dict[str, Any]], None], give_up: Callable[[str, str], None]
    ) -> None:
        super().__init__(outer.program, outer.number)
        self._conclude = conclude
        self._give_up = give_up
        self._said = b""
        self.is_cancelled = False

    def data(self, kind: int, payload: bytes) -> None:
        self._said = (self._said + payload)[-_TAIL_BYTES:]
        if self.on_credit:
            self.program.after(0.0, lambda: self._grant(len(payload)))

    def _grant(self, amount: int) -> None:
        if self.on_credit and not self.is_done:
            self.on_credit(amount)

    def last_lines(self) -> List[str]:
        return self._said.decode("utf-8", "replace").splitlines()[-TAIL_LINES:]

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.on_cancel:
            self.on_cancel()

    def finish(self, result: Dict[str, Any]) -> None:
        self.is_done = True
        self._conclude(result)

    def fail(self, kind: str, text: str) -> None:
        self.is_done = True
        self._give_up(kind, text)


def _write_private(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        durable.write_all(fd, content)
    finally:
        os.close(fd)
