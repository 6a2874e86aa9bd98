"""How large a job may be, so that what is accepted can also be started.

A node is told about its processes in one message, and Linux gives no program a longer word than 128 KiB.
"""

from __future__ import annotations

import json

from ugro.config.yamltext import Limits
from ugro.core.job import JobSpec, Launcher
from ugro.core.support.quantity import format_size

MOST_WORDS = 10_000
LONGEST_BYTES = 128 * 1024 - 1  # of one word, or of one variable with its name
MOST_BYTES = 256 << 10  # of all words and variables of one process, as JSON
FILE_LIMITS = Limits(MOST_BYTES, 10_000)  # of files that users send: of jobs, sweeps and services
USE_A_FILE = "put them into a file that the program reads: code and --folder are sent to the nodes"
_MOST_ON_A_NODE = 816 << 10  # of its processes in one message, beside their own variables of UGRO's
_MOST_OF_RAY = 120 << 10  # its driver gets the words in one variable
_USUAL_PROCESSES = 16  # on a node, where the job takes all its GPUs


def why_too_large(spec: JobSpec) -> tuple[str, str] | None:
    """Returns the key that is too large and the reason; None if nodes can be told to start it."""
    words, variables = len(json.dumps(spec.argv)), len(json.dumps(dict(spec.env)))
    if max(words, variables) > LONGEST_BYTES:  # else no single one can be
        for key, one in (*(("args", word) for word in spec.argv), *(("env", f"{n}={v}") for n, v in spec.env)):
            if len(one.encode("utf-8", "surrogateescape")) > LONGEST_BYTES:
                return key, "one of them is longer than 128 KiB, which is all that Linux passes to a program"
    largest = "env" if variables > words else "command" if spec.launcher is Launcher.COMMAND else "args"
    if spec.launcher is Launcher.RAY and words > _MOST_OF_RAY:
        reason = f"the words of a Ray job may have {format_size(_MOST_OF_RAY)}, and these have {format_size(words)}"
        return "args", reason
    most, where = MOST_BYTES, ""
    if spec.launcher is Launcher.DDP:
        gpus = max((way.gpus_per_node for way in (spec.resources, *spec.resources.any_of)), default=0)
        processes = gpus if gpus > 0 else _USUAL_PROCESSES
        # One more: the ranks of an elastic training have a store beside them.
        most = min(MOST_BYTES, _MOST_ON_A_NODE // (processes + 1))
        where = f" of a script with up to {processes} processes on a node"
    if words + variables <= most:
        return None
    size = format_size(words + variables)
    return largest, f"the words and variables{where} may have {format_size(most)}, and these have {size}"
