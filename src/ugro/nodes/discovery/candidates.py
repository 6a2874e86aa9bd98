"""From what a source says to candidates: names, addresses, ports and labels are checked, and all is bounded.

Anybody who can write to a registry writes these values. None of them may become an option of ssh, reach a shell, choose
the account that is logged in to (unless the user allows that), or fill the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ugro.config.kinds import BadValueError
from ugro.config.names import HOST, LABEL, NODE_NAME, USER
from ugro.config.schema import Config, NodeEntry
from ugro.config.yamltext import shown
from ugro.core.discovery import Candidate
from ugro.core.node import NodeSpec
from ugro.nodes.discovery.source import Offer, Source
from ugro.remote.globs import Glob

MOST_OFFERS = 1000
_MOST_LABELS = 16
_MOST_REFUSED = 20


@dataclass(frozen=True, slots=True)
class Rules:
    """What the cluster file says of all that is found."""

    match: tuple[str, ...] = ()
    user: str | None = None

    def admit(self, name: str) -> bool:
        return not self.match or any(Glob(pattern).fits(name) for pattern in self.match)


@dataclass(frozen=True, slots=True)
class Checked:
    candidates: tuple[Candidate, ...] = ()
    refused: tuple[str, ...] = ()  # sentences


def check_offers(offers: Sequence[Offer], source: Source, rules: Rules) -> Checked:
    found: dict[str, Candidate] = {}
    refused: list[str] = []
    for offer in offers[:MOST_OFFERS]:
        try:
            candidate = _candidate(offer, source, rules)
        except BadValueError as error:
            refused.append(f"{_named(offer)}: {error.message}")
            continue
        if not rules.admit(candidate.name):
            continue
        if candidate.name in found:
            refused.append(f"{candidate.name}: listed twice, the first is used")
        else:
            found[candidate.name] = candidate
    if len(offers) > MOST_OFFERS:
        refused.insert(0, f"{len(offers)} machines are listed, only the first {MOST_OFFERS} are used")
    more = [f"and {len(refused) - _MOST_REFUSED} more"] if len(refused) > _MOST_REFUSED else []
    return Checked(tuple(found.values()), (*refused[:_MOST_REFUSED], *more))


def spec_of(candidate: Candidate, config: Config) -> NodeSpec:
    """As the cluster file would have it, with what that says of all nodes."""
    host = None if candidate.host == candidate.name else candidate.host
    entry = NodeEntry(host=host, user=candidate.user, port=candidate.port, labels=candidate.labels)
    return replace(entry.spec(candidate.name, config), found_by=", ".join(candidate.sources) or "discovery")


def merged(of_sources: Iterable[Checked]) -> dict[str, Candidate]:
    """By name. A machine that several sources list is taken as the first of them has it."""
    found: dict[str, Candidate] = {}
    for checked in of_sources:
        for one in checked.candidates:
            known = found.get(one.name)
            found[one.name] = one if known is None else replace(known, sources=(*known.sources, *one.sources))
    return found


def _candidate(offer: Offer, source: Source, rules: Rules) -> Candidate:
    name = NODE_NAME.parse(offer.name)
    return Candidate(
        name=name,
        host=name if offer.host in (None, "") else HOST.parse(offer.host),
        user=_user(offer, source, rules),
        port=_port(offer.port),
        labels=_labels(offer.labels),
        sources=(source.name,),
    )


def _user(offer: Offer, source: Source, rules: Rules) -> str | None:
    if source.may_name_users and offer.user not in (None, ""):
        return USER.parse(offer.user)
    # The hosts of an ssh configuration have their users there.
    return None if source.name == "ssh_config" else rules.user


def _port(value: object) -> int | None:
    if value in (None, 0, ""):
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 6 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        raise BadValueError(f"expected a port from 1 to 65535, got {shown(value)}")
    return number


def _labels(value: object) -> tuple[str, ...]:
    if value in (None, ""):
        return ()
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or len(words) > _MOST_LABELS:
        raise BadValueError(f"expected at most {_MOST_LABELS} labels, got {shown(value)}")
    return tuple(dict.fromkeys(LABEL.parse(word) for word in words))


def _named(offer: Offer) -> str:
    return offer.name if isinstance(offer.name, str) and NODE_NAME.is_valid(offer.name) else shown(offer.name)
