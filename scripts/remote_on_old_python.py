"""Loads every module of the node program with the Python that runs this, which may be as old as 3.9.

It needs no package and no set-up; what the modules do is tested elsewhere.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def main() -> int:
    source = Path(__file__).resolve().parent.parent / "src"
    sys.path.insert(0, str(source))
    package = str(source / "ugro" / "remote")
    names = [module.name for module in pkgutil.walk_packages([package], "ugro.node.")]
    for name in names:
        if not name.endswith(".__main__"):
            importlib.import_module(name)
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.stdout.write(f"{len(names)} modules of the node program load with Python {version}\n")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
