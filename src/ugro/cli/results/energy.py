"""What a job used, as text: by device, rank and epoch. It prints nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ugro.core.energy import DeviceEnergy, JobEnergy
from ugro.core.support.quantity import format_duration, format_energy

_MOST_LISTED = 16


def energy_facts(energy: JobEnergy | None) -> Iterator[tuple[str, str]]:
    if energy is None:
        return
    yield "energy", energy.words
    devices = energy.devices
    if len(devices) > 1:
        yield "by device", _listed([_device(one) for one in devices])
    if len(energy.ranks) > 1:
        yield "by rank", _listed([f"{one.rank}: {format_energy(one.joules)}" for one in energy.ranks])
    if any(one.is_shared for one in energy.ranks):
        yield "", "devices that several ranks use count for each of them in equal parts"
    if len(energy.epochs) > 1:
        # The newest: the last one may still go on.
        some = energy.epochs[-_MOST_LISTED:]
        texts = [f"{one.epoch}: {format_energy(one.joules)} in {format_duration(one.seconds)}" for one in some]
        yield "by epoch", ", ".join(texts)


def _device(one: DeviceEnergy) -> str:
    share = one.measured_s / one.held_s if one.held_s else 0.0
    measured = "" if share >= 0.99 else f" ({100 * share:.0f} % measured)"
    return f"{one.node} {one.device}: {format_energy(one.joules)}{measured}"


def _listed(texts: list[str]) -> str:
    more = f", … {len(texts) - _MOST_LISTED} more: --json" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more
