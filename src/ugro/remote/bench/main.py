"""The fresh Python that measures: one part, then it ends. What it finds, it says as soon as it is known."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any, Dict, List

from ugro.remote.bench import gpu_use
from ugro.remote.bench.api import PARAMS
from ugro.remote.bench.meter import skip
from ugro.remote.program import Refused

NO_IMPORT = "it cannot be imported"  # the beginning of why something was skipped
MODULES = {
    "machine": "ugro.remote.bench.machine",
    "devices": "ugro.remote.bench.devices",
    "count": "ugro.remote.bench.devices",
    "listen": "ugro.remote.bench.network",
    "connect": "ugro.remote.bench.network",
    "allreduce": "ugro.remote.bench.allreduce",
}


def main(words: List[str]) -> None:
    params: Dict[str, Any] = json.loads(os.environ.pop(PARAMS))
    part = words[0]
    try:
        gpu_use.hold(params)
        getattr(importlib.import_module(MODULES[part]), part)(params)
    except (OSError, EOFError) as error:
        skip(part, str(error))
    except Refused as refusal:
        skip(part, str(refusal))
    except ImportError as error:
        skip(part, "%s: %s" % (NO_IMPORT, error))
