"""What ``ugro`` loads first: Ctrl-C while the rest is being loaded ends it as later on, and not with a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from ugro.cli.main import main as begin
    except KeyboardInterrupt:
        sys.exit(130)
    begin()
