"""The section ``hooks`` of the cluster file: what is called when something happens."""

from __future__ import annotations

from ugro.features.alerts.config import URL
from ugro.features.discovery.config import COMMAND, VARIABLE, OneMap
from ugro.features.hooks.model import HookName
from ugro.kernel.config.kinds import BadValueError, Choice, Duration, Kind, ListOf, Whole
from ugro.kernel.config.section import LABEL, LOCAL_PATH, Section, key, section
from ugro.kernel.jobs.model import FINAL_STATES

DAY_S = 86400.0


class _Call(Kind):
    expected = "an address that starts with https:// or http://, or a command as a list of words"

    def parse(self, value: object) -> str | tuple[str, ...]:
        if isinstance(value, list | tuple):
            if not value:
                raise self.refuse(value)
            return tuple(COMMAND.parse(value))
        if not isinstance(value, str) or "@" in value:  # a password in it would be shown
            raise self.refuse(value)
        try:
            return str(URL.parse(value))
        except BadValueError:
            raise self.refuse(value) from None

    def written(self, value: str | tuple[str, ...]) -> object:
        return value if isinstance(value, str) else list(value)


@section
class Hook(Section):
    """What all hooks have."""

    noun = "a hook"

    call: str | tuple[str, ...] = key(
        "",
        _Call(),
        "What is called: an address, with a signed POST, or a command on this machine, with the same JSON on stdin.",
        example="https://scaler.example.org/ugro",
    )
    secret_file: str | None = key(
        None, LOCAL_PATH, "A file with the secret that signs calls of an address.", example="~/.ugro/hook_secret"
    )
    secret_env: str | None = key(
        None, VARIABLE, "The environment variable, of the agent, that holds the secret.", example="HOOK_SECRET"
    )
    timeout: float = key(30.0, Duration(), "Longest wait for the answer, or for the command's end.")
    cool_down: float = key(
        600.0, Duration(may_be_zero=True), "Time between two calls at least. Ended jobs do not wait for each other."
    )
    most_per_hour: int = key(12, Whole(1, 10_000), "How often it is called in an hour at most.")

    def check(self) -> None:
        if not self.call:
            raise BadValueError("it calls nothing", hint="give call: an address, or a command as a list")
        if isinstance(self.call, str) and self.secret_file is None and self.secret_env is None:
            raise BadValueError("calls of an address are signed", hint="give secret_file or secret_env")
        if self.secret_file is not None and self.secret_env is not None:
            raise BadValueError("it has two secrets", hint="give secret_file or secret_env")


@section
class QueueHook(Hook):
    """Many jobs wait, and have done so for a while."""

    jobs: int = key(10, Whole(0, 1_000_000), "Call when more jobs than this wait.")
    for_: float = key(300.0, Duration(DAY_S, may_be_zero=True), "How long that must last.")


@section
class IdleHook(Hook):
    """Nodes have nothing to do, and have not had for a while."""

    nodes: int = key(1, Whole(1, 1000), "Call when at least so many nodes are idle.")
    label: str | None = key(None, LABEL, "Only nodes with this label.", example="cloud")
    for_: float = key(600.0, Duration(DAY_S, may_be_zero=True), "How long a node must have been idle.")


@section
class NodeLostHook(Hook):
    """A node cannot be reached. A node that sleeps is not lost."""

    label: str | None = key(None, LABEL, "Only nodes with this label.", example="cloud")
    for_: float = key(120.0, Duration(DAY_S, may_be_zero=True), "How long it must not have been reached.")
    cool_down: float = key(0.0, Duration(may_be_zero=True), "Time between two calls at least.")


@section
class JobEndedHook(Hook):
    """A job has ended. Each is delivered; what exceeds the budget waits."""

    states: tuple[str, ...] = key(
        tuple(sorted(FINAL_STATES)),
        ListOf("a list of states such as [failed]", Choice(sorted(FINAL_STATES))),
        "Only jobs that ended so.",
        example=["failed"],
    )
    cool_down: float = key(0.0, Duration(may_be_zero=True), "Time between two calls at least.")
    most_per_hour: int = key(600, Whole(1, 10_000), "How often it is called in an hour at most; more calls wait.")


@section
class HookSection(Section):
    """What is called when something happens to the queue, the nodes or the jobs. See docs/hooks.md."""

    queue_longer_than: QueueHook | None = key(
        None,
        OneMap(QueueHook, "a map of jobs, for and call"),
        "Many jobs wait, and have done so for a while.",
        example={"jobs": 10, "for": "5m", "call": ["./scale-up"]},
    )
    idle: IdleHook | None = key(
        None,
        OneMap(IdleHook, "a map of nodes, for and call"),
        "Nodes have nothing to do, and have not had for a while.",
        example={"nodes": 1, "for": "10m", "call": ["./scale-down"]},
    )
    node_lost: NodeLostHook | None = key(
        None,
        OneMap(NodeLostHook, "a map of for and call"),
        "A node cannot be reached.",
        example={"for": "2m", "call": ["./page-me"]},
    )
    job_ended: JobEndedHook | None = key(
        None,
        OneMap(JobEndedHook, "a map of states and call"),
        "A job has ended.",
        example={"states": ["failed"], "call": ["./note"]},
    )

    def named(self, name: HookName) -> Hook | None:
        found: Hook | None = getattr(self, name.value)
        return found
