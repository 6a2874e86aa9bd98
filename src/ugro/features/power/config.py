"""The keys under ``owner`` and ``power``: of the cluster file, of its labels, and of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ugro.features.alerts.config import URL
from ugro.features.discovery.config import COMMAND
from ugro.features.power.model import SSH, SYSTEMD_SUSPEND, WEBHOOK, WOL, Means, OwnerRule, PowerRule, Then, When
from ugro.kernel.config.kinds import BadValueError, Choice, Duration, Kind, ListOf, MapOf, Number, Text, Whole
from ugro.kernel.config.section import LABEL, LOCAL_PATH, NODE_NAME, Nested, Section, key, section

# --- owner ------------------------------------------------------------------------------------------------------------
# The keys under ``owner``: of the cluster file, and of a node.


@section
class OwnerSection(Section):
    """What jobs do while somebody uses a machine. Off by default. A node's own keys come before the common ones."""

    when: When = key(
        When.NEVER,
        Choice(When),
        "How UGRO notices its owner. `active`: somebody types or uses the display; `gpu_busy`: a process that is not a "
        "job of UGRO uses one of its GPUs; `never`: not at all.",
        example="active",
    )
    then: Then = key(
        Then.PAUSE,
        Choice(Then),
        "What happens then, besides that no new jobs start there. `pause`: running jobs are stopped with their "
        "checkpoints and queued again; `shrink`: trainings on several nodes leave the node a small part of each "
        "batch, and other jobs without GPUs get a small part of its cores; `drain`: running jobs continue.",
        example="drain",
    )
    quiet: float = key(600.0, Duration(), "After this time without a sign of the owner, the node takes jobs again.")

    def rule(self, common: OwnerSection) -> OwnerRule | None:
        """None: its owner is not looked for."""
        when, then, quiet_s = (
            getattr(self if name in self.given_keys else common, name) for name in ("when", "then", "quiet")
        )
        return None if when is When.NEVER else OwnerRule(when, then, quiet_s)


# --- power ------------------------------------------------------------------------------------------------------------


_MOST_LABELS = 100
_MAC = r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}"


class _Means(Kind):
    def __init__(self, *words: str) -> None:
        self.words = words
        self.expected = f"{' or '.join(words)}, or a command as a list of words"
        self.metavar = "|".join(words)

    def parse(self, value: object) -> Means:
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, list | tuple) or not value:
            raise self.refuse(value, hint="a command is a list: [ipmitool, -H, '{host}-bmc', power, on]")
        return tuple(COMMAND.parse(value))

    def from_text(self, text: str) -> object:
        return text if text in self.words else COMMAND.from_text(text)

    def written(self, value: Means) -> object:
        return value if isinstance(value, str) else list(value)


@section
class PowerKeys(Section):
    """When a node is put to sleep, and how it is woken."""

    noun = "power"

    suspend_after: float | None = key(
        None,
        Duration(),
        "Suspend a node after nothing was done on it for this time; null suspends none.",
        example="30m",
    )
    suspend: Means = key(
        SSH,
        _Means(SSH, WEBHOOK),
        "How a node is suspended: by `on_node` over its link (ssh), by a signed POST to `webhook`, or by a command on "
        "this machine, in which `{node}`, `{host}` and `{mac}` are replaced.",
        example=["ipmitool", "-H", "{host}-bmc", "power", "soft"],
    )
    resume: Means = key(
        WOL,
        _Means(WOL, WEBHOOK),
        "How it is woken: by a Wake-on-LAN packet (wol), by `webhook`, or by a command on this machine.",
        example=["ipmitool", "-H", "{host}-bmc", "power", "on"],
    )
    on_node: tuple[str, ...] = key(
        SYSTEMD_SUSPEND,
        COMMAND,
        "The command on the node that suspends it.",
        example=["sudo", "-n", "systemctl", "suspend"],
    )
    mac: str | None = key(
        None,
        Text("a MAC address such as 00:11:22:aa:bb:cc", lambda text: re.fullmatch(_MAC, text) is not None),
        "The address for Wake-on-LAN; null learns it while the node is awake.",
        example="00:11:22:aa:bb:cc",
    )
    webhook: str | None = key(
        None, URL, "The address for `webhook`.", example="https://power.example.org/nodes"
    )
    secret_file: str | None = key(
        None, LOCAL_PATH, "A file with the secret that signs the calls of `webhook`.", example="~/.ugro/hook_secret"
    )
    suspend_timeout: float = key(60.0, Duration(), "A node that still answers after this time stays awake.")
    resume_timeout: float = key(
        300.0, Duration(), "A node that cannot be reached this long after it was woken has failed to wake."
    )
    cool_down: float = key(
        600.0, Duration(may_be_zero=True), "How long a node stays awake at least before it is suspended again."
    )
    most_per_hour: int = key(
        6, Whole(2, 1000), "How often a node is suspended or woken in an hour, both together, at most."
    )
    idle_load: float = key(
        0.2, Number(), "A node whose load for each core is higher is not idle: something else works there."
    )


class _Labels(MapOf):
    def written(self, value: Mapping[str, PowerKeys]) -> object:
        return {label: keys.written() for label, keys in value.items()}


LABELS = _Labels("a map of labels to keys of power", LABEL, Nested(PowerKeys), most=_MOST_LABELS)


@section
class PowerSection(PowerKeys):
    """Machines that sleep while there is nothing to do, and are woken for jobs. Off by default. See docs/power.md."""

    exclude: tuple[str, ...] = key(
        (),
        ListOf("a list of names of nodes such as [gpu-master]", NODE_NAME),
        "Nodes that are never suspended.",
        example=["gpu-master"],
    )
    labels: dict[str, PowerKeys] = key(
        {}, LABELS, "Other values for nodes with a label.", example={"lab2": {"suspend_after": "2h"}}
    )

    def check(self) -> None:
        uses_webhook = WEBHOOK in (self.suspend, self.resume)
        if uses_webhook and (self.webhook is None or self.secret_file is None):
            raise BadValueError("a webhook needs an address and a secret", hint="give webhook and secret_file")


def rule_of(name: str, labels: tuple[str, ...], own: PowerKeys, common: PowerSection) -> PowerRule | None:
    """None: UGRO neither suspends nor wakes it."""
    layers: list[PowerKeys] = [own, *(keys for label, keys in common.labels.items() if label in labels), common]
    if not any(layer.given_keys & _TURNS_ON for layer in layers):
        return None
    values: dict[str, Any] = {one: _value(one, layers) for one in PowerKeys.known_keys()}
    is_suspended = name not in common.exclude
    return PowerRule(
        suspend_after_s=values["suspend_after"] if is_suspended else None,
        suspend=values["suspend"],
        resume=values["resume"],
        on_node=values["on_node"],
        webhook=values["webhook"],
        secret_file=values["secret_file"],
        mac=values["mac"],
        suspend_timeout_s=values["suspend_timeout"],
        resume_timeout_s=values["resume_timeout"],
        cool_down_s=values["cool_down"],
        most_per_hour=values["most_per_hour"],
        idle_load=values["idle_load"],
    )


_TURNS_ON = frozenset({"suspend_after", "suspend", "resume"})


def _value(name: str, layers: list[PowerKeys]) -> object:
    layer = next((one for one in layers if name in one.given_keys), layers[-1])
    return getattr(layer, name)
