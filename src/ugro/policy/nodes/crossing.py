"""Whether nodes reach each other: who should try whom, at which addresses, and what the outcome means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from ugro.core.finding import Finding, Grade
from ugro.core.node import NodeSpec, Role
from ugro.core.support.quantity import format_duration
from ugro.policy.nodes.examination import Examination, SshSettings, Untold

# With more, all pairs would be more connections than they can tell us.
MOST_NODES_FOR_ALL_PAIRS = 12


@dataclass(frozen=True, slots=True)
class Tried:
    address: str
    error: str


@dataclass(frozen=True, slots=True)
class Connection:
    """How one node's attempt to connect to another went; ``address`` is the one that worked."""

    address: str | None
    connect_s: float | None
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    connector: Examination
    listener: Examination
    outcome: Connection | Untold


def pairs_to_try(specs: Sequence[NodeSpec]) -> list[tuple[str, str]]:
    """Connector and listener: everybody to everybody, or, of many, around a ring and the master to all."""
    names = [spec.name for spec in specs]
    if len(names) <= MOST_NODES_FOR_ALL_PAIRS:
        return [(one, other) for one in names for other in names if one != other]
    master = next((spec.name for spec in specs if spec.role is Role.MASTER), names[0])
    ring = zip(names, [*names[1:], names[0]], strict=True)
    return list(dict.fromkeys([*ring, *((master, name) for name in names if name != master)]))


def addresses_to_try(connector: Examination, listener: Examination) -> list[str]:
    """Where the listener may be reached: as it says itself, then as the user dials it."""
    dialled = [listener.spec.host, listener.ssh.host_name if isinstance(listener.ssh, SshSettings) else ""]
    is_same_machine = listener.machine.boot_id == connector.machine.boot_id != ""
    candidates = [*listener.addresses, *filter(_is_ipv4, dialled), "127.0.0.1"]
    # A loopback address leads everywhere to oneself.
    usable = [address for address in candidates if is_same_machine or not ip_address(address).is_loopback]
    return list(dict.fromkeys(usable))


def judge_trial(trial: Trial) -> Finding | None:
    """None when it worked: only what did not is told pair by pair."""
    subject = f"{trial.connector.name} → {trial.listener.name}"
    outcome = trial.outcome
    if isinstance(outcome, Untold):
        return Finding(subject, "network", Grade.WARNING, f"could not be tried: {outcome.text}", outcome.hint)
    if outcome.address is not None:
        return None
    tried = "; ".join(f"{tried.address}: {tried.error}" for tried in outcome.tried)
    text = f"cannot connect ({tried})" if tried else f"{trial.listener.name} has no address that could be tried"
    return Finding(subject, "network", Grade.FAILED, text, _firewall(trial))


def judge_trials(trials: Sequence[Trial]) -> Finding | None:
    """The one line that says that all is well."""
    times_s = [trial.outcome.connect_s for trial in trials if isinstance(trial.outcome, Connection)]
    worked_s = [time_s for time_s in times_s if time_s is not None]
    if not trials or len(worked_s) < len(trials):
        return None
    nodes = {node.name for trial in trials for node in (trial.connector, trial.listener)}
    which = " that were tried" if len(trials) < len(nodes) * (len(nodes) - 1) else ""
    text = f"all {len(trials)} pairs{which} reach each other, connecting in at most {format_duration(max(worked_s))}"
    return Finding("cluster", "network", Grade.OK, text)


def _firewall(trial: Trial) -> str:
    source = next(iter(trial.connector.addresses), "ADDRESS")
    return f"let {trial.connector.name} through on {trial.listener.name}: sudo ufw allow from {source}"


def _is_ipv4(host: str) -> bool:
    try:
        return ip_address(host).version == 4
    except ValueError:
        return False
