from __future__ import annotations

import os
import sys

from ugro.inference.main import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that still loads or computes has nothing left to do it for
