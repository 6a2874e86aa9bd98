"""What this version's jobs and trainings can do, as their own declarations say: nothing here is a list of features."""

from __future__ import annotations

import inspect

from ugro.cli.jobs.options import option_with
from ugro.client.experiments import Abilities

_LOCAL = "local"
_STALENESS, _ROUND_S = "UGRO_MAX_STALENESS", "UGRO_ROUND_S"  # variables of trainings with local updates
_COMPRESS = "compress"
_KINDS = ("fp16", "powersgd", "auto")


def abilities() -> Abilities:
    from ugro.train.run import Run  # without torch

    option = option_with(_LOCAL)
    compress = _KINDS if _COMPRESS in inspect.signature(Run.wrap).parameters else None
    if option is None:
        return Abilities(compress=compress)
    return Abilities({option: _LOCAL}, _STALENESS, _ROUND_S, compress)
