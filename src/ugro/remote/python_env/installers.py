"""The commands of uv that make an environment, and the variables in which it finds what it needs.

Nothing outside UGRO's folder is written, and no configuration of the user is read: the home folder that uv sees is
an empty one. Addresses of indexes may hold passwords: they are passed as variables, which others cannot read.
"""

from __future__ import annotations

import os
from typing import Dict, List

from ugro.remote.process.execute import MARK
from ugro.remote.python_env.indexes import NETWORK, index_variables
from ugro.remote.python_env.place import Place
from ugro.remote.python_env.recipe import Recipe


class Site:
    """Where one environment is built: a folder that is deleted afterwards, whatever happens."""

    def __init__(self, place: Place, folder: str) -> None:
        self.place = place
        self.folder = folder
        self.env = os.path.join(folder, "env")
        self.wheels = os.path.join(folder, "wheels")
        self.home = os.path.join(folder, "home")
        self.tmp = os.path.join(folder, "tmp")
        self.requirements = os.path.join(folder, "requirements.txt")

    @property
    def python(self) -> str:
        return os.path.join(self.env, "bin", "python")

    def variables(self, marker: str) -> Dict[str, str]:
        """Returns those that uv needs anywhere. By ``marker`` the processes are found that it leaves behind."""
        passed = {name: os.environ[name] for name in NETWORK if name in os.environ}
        folders = {"HOME": self.home, "TMPDIR": self.tmp, "XDG_CONFIG_HOME": self.home, "XDG_DATA_HOME": self.home}
        texts = {"LC_ALL": "C.UTF-8", "NO_COLOR": "1", "COLUMNS": "200", "PYTHONNOUSERSITE": "1", MARK: marker}
        return {"PATH": os.defpath, **passed, **folders, **texts}


class Uv:
    def __init__(self, path: str, site: Site, recipe: Recipe) -> None:
        self._path = path
        self._site = site
        self._recipe = recipe

    @property
    def cache(self) -> str:
        """Of wheels that were sent, nothing is kept there: the content store has them."""
        return os.path.join(self._site.folder if self._recipe.is_offline else self._site.place.cache, "uv")

    def variables(self) -> Dict[str, str]:
        place, recipe = self._site.place, self._recipe
        found = {
            "UV_CACHE_DIR": self.cache,
            "UV_PYTHON_INSTALL_DIR": place.pythons,
            "UV_PYTHON_BIN_DIR": os.path.join(self._site.home, "bin"),
            "UV_PYTHON_INSTALL_BIN": "0",
            "UV_TOOL_DIR": os.path.join(self._site.home, "tools"),
            "UV_CREDENTIALS_DIR": os.path.join(self._site.home, "credentials"),
            "UV_NO_CONFIG": "1",
            "UV_NO_PROGRESS": "1",
            "UV_LINK_MODE": "hardlink",
        }
        if recipe.extra_index_urls and not recipe.is_offline:
            # Which index a file comes from does not matter: it has the hash that was resolved, or it is refused.
            found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        if not recipe.is_offline:
            found.update(index_variables("uv", recipe.index_url, recipe.extra_index_urls, recipe.find_links))
        return found

    def version(self) -> List[str]:
        return [self._path, "--version"]

    def get_python(self, minor: str) -> List[str]:
        return [self._path, "python", "install", "--no-config", minor]

    def create(self, python: str) -> List[str]:
        prompt = ["--prompt", self._recipe.name[:12]]
        return [self._path, "venv", "--no-config", "--no-project", "--python", python, *prompt, self._site.env]

    def install(self) -> List[str]:
        offline = ["--offline", "--no-index", "--find-links", self._site.wheels] if self._recipe.is_offline else []
        how = ["--no-config", "--require-hashes", "--no-deps", *offline]
        return [self._path, "pip", "install", "--python", self._site.python, *how, "-r", self._site.requirements]
