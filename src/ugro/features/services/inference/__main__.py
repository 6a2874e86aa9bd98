""""""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from ugro.features.services.inference.loading import NoRoom
from ugro.features.services.inference.options import Options, parse
from ugro.kernel.support.errors import UgroError

# --- main -------------------------------------------------------------------------------------------------------------
# Starts the server. What is wrong with the command, the Python or the model is one sentence on stderr.


LASTING = 64  # exit code of what would go wrong again at once: there is no use in another start
_WEB = ("fastapi", "uvicorn")
_MODELS = ("torch", "transformers", "safetensors")


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        options = parse(argv, os.environ)
        _check_packages(options)
        from ugro.features.services.inference.server import serve  # needs what was just checked

        return asyncio.run(serve(options))
    except UgroError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint:  {error.hint}\n" if error.hint else ""))
        return 1 if isinstance(error, NoRoom) else LASTING
    except KeyboardInterrupt:
        return 130


def _check_packages(options: Options) -> None:
    """Found, not imported: torch takes seconds, and the server should answer in the meantime."""
    wanted = _WEB if options.factory is not None else (*_WEB, *_MODELS)
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        hint = f"{sys.executable} -m pip install {names}; or name them in the job's environment: packages"
        raise UgroError(f"this Python lacks {', '.join(missing)}", hint=hint)


# --- main -------------------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that still loads or computes has nothing left to do it for
