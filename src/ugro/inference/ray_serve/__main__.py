from __future__ import annotations

import sys

from ugro.inference.ray_serve.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
