"""The section `energy` of the cluster file."""

from __future__ import annotations

from ugro.kernel.config.kinds import Number
from ugro.kernel.config.section import LABEL, Section, key, section


@section
class EnergySection(Section):
    """What a job's energy costs. Where power can be read, `ugro results` says what a job used, with or without this."""

    price_per_kwh: float | None = key(
        None, Number(), "The price of a kilowatt-hour; null shows no cost.", example=0.32
    )
    currency: str = key("EUR", LABEL, "The currency of the price.")
