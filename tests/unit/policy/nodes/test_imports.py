"""What a script imports, read from its source."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from ugro.features.environments.rules.imports import imports_of, uses
from ugro.kernel.jobs.model import Imports


class Files:
    def __init__(self, **files: str) -> None:
        """Keyed by path, with a double underscore for a slash, and ``init`` for ``__init__``."""
        paths = (name.replace("__", "/") for name in files)
        names = (re.sub(r"\binit$", "__init__", path) + ".py" for path in paths)
        self.files = dict(zip(names, files.values(), strict=True))

    def source(self, path: str) -> str | None:
        return self.files.get(path)

    def is_folder(self, path: str) -> bool:
        return any(path in map(str, PurePosixPath(name).parents) for name in self.files)

    def module_names(self) -> frozenset[str]:
        return frozenset(part.removesuffix(".py") for name in self.files for part in PurePosixPath(name).parts)


def imported(script: str, **files: str) -> Imports:
    return imports_of("train.py", Files(train=script, **files))


def names(script: str, **files: str) -> tuple[str, ...]:
    found = imported(script, **files)
    assert found.is_certain
    return found.names


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.nn.functional as F, os",
        "from torch import nn",
        "from __future__ import annotations\nimport json\nfrom torch.utils.data import Dataset",
        'if __name__ == "__main__":\n    import torch',
        "class Model:\n    import torch",
        "try:\n    import torch\nexcept ValueError:\n    raise",
        "try:\n    x = 1\nexcept Exception:\n    pass\nfinally:\n    import torch",
        '"""Install it first: pip install torch"""\nimport torch  # sys.path stays as it is',
    ],
)
def test_what_the_script_cannot_do_without_counts(text: str) -> None:
    assert names(text) == ("torch",)


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys, json",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "try:\n    import torch\nexcept (ImportError, OSError):\n    pass",
        "try:\n    import torch\nexcept:\n    pass",
        "try:\n    import torch\nexcept Exception:\n    pass",
        "try:\n    import torch\nexcept errors.NotThere:\n    pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "import sys\nif sys.platform == 'win32':\n    import torch",
        "def main():\n    import torch",
        "async def main():\n    import torch",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import torch",
        "for name in ():\n    import torch",
        "print('import torch')",
        "from . import torch",
        "",
    ],
)
def test_what_is_optional_conditional_or_pythons_own_does_not_count(text: str) -> None:
    assert names(text) == ()


def test_modules_of_the_code_are_followed_and_do_not_count() -> None:
    found = names(
        "import models.net\nfrom data import load\nfrom helpers import *\nimport lib",
        models__init="import einops",
        models__net="from . import parts\nfrom ..elsewhere import x",
        models__parts="import timm",
        models__unused="import never",
        data__init="",
        data__load="import numpy",
        helpers="import train\nimport yaml",  # in a circle
        lib__only="import far",  # a folder without __init__: its module was not imported
    )
    assert found == ("einops", "numpy", "timm", "yaml")


def test_a_script_in_a_folder_finds_what_is_beside_it() -> None:
    files = Files(src__train="import model, tools, torch", src__model="import timm", tools="import rich")
    assert imports_of("src/train.py", files) == Imports(("rich", "timm", "torch"))


def test_a_module_anywhere_in_the_code_may_be_the_one_that_is_meant() -> None:
    assert names("import torch, vendored", third__party__vendored="") == ("torch",)


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.path.insert(0, 'libs')\nimport torch",
        "from sys import path\nimport torch",
        "import site\nimport torch",
        "import importlib\nimport torch",
        "import os\nos.system('pip install torch')\nimport torch",
        "import subprocess\nsubprocess.run(['python', '-m', 'pip', 'install', 'torch'])\nimport torch",
        "import os\nos.environ['PYTHONPATH'] = 'x'\nimport torch",
    ],
)
def test_a_script_that_may_find_it_elsewhere_leaves_a_doubt(text: str) -> None:
    assert imported(text) == Imports(("torch",), is_certain=False)


def test_code_that_cannot_be_read_leaves_a_doubt() -> None:
    assert imported("import torch\nimport other", other="print 'hello'") == Imports(("torch",), is_certain=False)
    assert imported("if:") == Imports((), is_certain=False)
    assert imports_of("missing.py", Files()) == Imports()


@pytest.mark.parametrize(
    ("script", "files", "found"),
    [
        ("import ugro.train as ut", {}, True),
        ("def main():\n    from ugro import train", {}, True),
        ("try:\n    import ugro\nexcept ImportError:\n    pass", {}, True),
        ("from lib.loop import fit", {"lib__loop": "import ugro.train"}, True),
        ("from lib import loop", {"lib__loop": "from . import deep", "lib__deep": "import ugro"}, True),
        ("import ugro", {"ugro__init": ""}, True),
        ("# for ugro launch\nimport torch", {"other": "import ugro.train"}, False),
        ("import os, types", {"other__types": "import ugro"}, False),
        ("import loop", {"src__loop": "import ugro"}, None),
        ("import importlib", {"loop": "import ugro"}, None),
        ("print hello", {}, None),
    ],
)
def test_whether_a_script_uses_a_module(script: str, files: dict[str, str], found: bool | None) -> None:
    assert uses("train.py", Files(train=script, **files), "ugro") is found


def test_nobody_can_tell_what_a_script_uses_that_is_not_in_the_code() -> None:
    assert uses("elsewhere.py", Files(train="import ugro"), "ugro") is None
