"""Makes an ordinary launch of ``--model`` and ``--dataset``: recipe, folders, environment; and checks its memory."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from ugro.features.environments.service.service import PythonEnvService
from ugro.features.recipes import on_node as hub_cache
from ugro.features.recipes.model import PreparedLaunch, Recipe
from ugro.features.recipes.rules import Whereabouts, check_flags, choose, dataset_id, hub_id, shape_of, travel
from ugro.features.recipes.rules_memory import Device, devices_of, judge, known_config, training_of
from ugro.features.recipes.trainings import catalog
from ugro.kernel.access.caller import expect_files, may_read_files
from ugro.kernel.files.client_files import expect_local, remote_client
from ugro.kernel.jobs.config.options import OPTIONS
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import Placement
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity, Node, NodeCalls
from ugro.kernel.support.aio import together
from ugro.kernel.support.errors import UgroError, Unsatisfiable, UsageError
from ugro.node import foreign

# --- model files ------------------------------------------------------------------------------------------------------
# Models and data as they are named on a command line: paths of this machine, and what its caches have. Blocks.


_MOST_BYTES = 1 << 20
_WEIGHTS = ".safetensors"
_NAMED_PATHS = ("./", "../", "/", "~")


def path_of(text: str, here: Path) -> Path | None:
    """None if it names something of the hub."""
    if remote_client() is not None:  # whether there is such a file is known on the client's machine alone
        if text.startswith(_NAMED_PATHS):
            expect_local(f"the folder {text}", "name a model or dataset of the hub; or run it on the master")
        return None
    path = here / os.path.expanduser(text)
    is_path = text.startswith(_NAMED_PATHS) or (may_read_files() and os.path.exists(path))
    return Path(os.path.abspath(path)) if is_path else None


def check_model(path: Path) -> None:
    """Raises UsageError for a folder that is no model."""
    try:
        names = os.listdir(path)
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file", hint="name the folder of the model, with its config.json") from error
    except OSError as error:
        hint = "--model names a folder, a hub id or a short name"
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from error
    if "adapter_config.json" in names and "config.json" not in names:
        raise UsageError(
            f"{path} is a LoRA adapter, not a model", hint="train with --merge to get a whole model, and name that"
        )
    if "config.json" not in names:
        raise UsageError(f"{path} is not a model: it has no config.json", hint="save one there: save_pretrained")
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise UsageError(f"{path} has no weights (*{_WEIGHTS})", hint="save the model there: save_pretrained")


def check_dataset(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        hint = "--dataset names a file or folder, a hub id or a short name"
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from error


def config_of(folder: Path | str | None) -> Mapping[str, Any] | None:
    """Of a model on this machine; raises UsageError if it cannot be read."""
    if folder is None:
        return None
    path = Path(folder) / "config.json"
    try:
        with path.open("rb") as file:
            found = foreign.read(file, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="is it a model of transformers?") from error
    return found if isinstance(found, dict) else None


def cached(kind: str, repo: str, env: Mapping[str, str]) -> str | None:
    """The folder in the cache of this machine; ``env`` says where the submitter has it, if that is here."""
    if remote_client() is not None:
        return None
    try:
        return hub_cache.find(kind, repo, env)
    except ValueError as error:
        hint = "a hub id has the form org/name"
        raise UsageError(f"{repo!r} is not a {kind} of the hub", hint=hint) from error


# --- service ----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_HUB = "https://huggingface.co/"
_ENDPOINT = "HF_ENDPOINT"  # the variable that names another hub, such as a mirror
_CONNECT_S = 3.0
_HAS_S = 120.0
_MODULES = {"pillow": "PIL"}  # what a package is imported as, where that differs
_TINY = "--tiny"
_SOURCE = "UGRO_MODEL_SOURCE"


class HubCache(NodeCalls):
    async def has(self, kind: str, repo: str, env: Mapping[str, str]) -> bool:
        answer = await self._call(hub_cache.cached, _HAS_S, kind=kind, repo=repo, env=dict(env))
        return answer.get("folder") is not None


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """As a client sends it. The fields of ``submit`` have no script; ``args`` are the script's."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    submit: Submit
    model: str | None = None
    dataset: str | None = None
    recipe: str | None = None
    cache: Mapping[str, str] = field(default_factory=dict)  # variables that say where the submitter's cache is


@dataclass(frozen=True, slots=True)
class _Found:
    """A model or a dataset, as its script is told about it."""

    name: str
    folder: str | None = None  # that goes with the job
    config: Mapping[str, Any] | None = None
    note: str | None = None


@dataclass(slots=True)
class RecipeService:
    cluster: Cluster
    jobs: JobService
    scheduler_input: SchedulerInput
    envs: PythonEnvService
    identity: Identity

    async def prepare(self, request: RecipeRequest) -> PreparedLaunch:
        args = [str(word) for word in request.submit.fields.get("args") or ()]
        _check(request, args)
        recipe, model = await self._model(request)
        check_flags(recipe, args)
        dataset = await self._dataset(request, recipe)
        found = [one for one in (model, dataset) if one is not None]
        fields = _fields(request, recipe, model, dataset, args)
        environment, note = await self._environment(request.submit.fields, recipe, args)
        fields |= environment
        notes = [f"recipe {recipe.name}: {recipe.summary}", *(one.note for one in found if one.note), note]
        notes += await self._fit(request, recipe, model, fields, args)
        return PreparedLaunch(fields, tuple(notes), recipe.name)

    # --- the model and the data ----------------------------------------------------------------------------------

    async def _model(self, request: RecipeRequest) -> tuple[Recipe, _Found | None]:
        recipes, wanted = catalog.all_recipes(), request.recipe
        if request.model is None:
            assert wanted is not None
            return catalog.find(wanted), None
        path = path_of(request.model, request.submit.here)
        if path is not None:
            expect_files(path)
            check_model(path)
            config = await asyncio.to_thread(config_of, path)
            recipe = catalog.find(wanted) if wanted else choose(recipes, None, request.dataset, config)
            return recipe, _Found(path.name, str(path), config, f"model {path}: sent to nodes that lack it")
        repo = hub_id(recipes, request.model)
        about = await self._whereabouts("model", repo, request)
        config = await asyncio.to_thread(config_of, about.here) or known_config(repo)
        folder, note = travel(about)
        recipe = catalog.find(wanted) if wanted else choose(recipes, repo, request.dataset, config)
        return recipe, _Found(repo, folder, config, note)

    async def _dataset(self, request: RecipeRequest, recipe: Recipe) -> _Found | None:
        if request.dataset is None:
            return None
        path = path_of(request.dataset, request.submit.here)
        if path is not None and request.dataset not in recipe.datasets:
            expect_files(path)
            check_dataset(path)
            return _Found(path.name, str(path), None, f"dataset {path}: sent to nodes that lack it")
        about = await self._whereabouts("dataset", dataset_id(recipe, request.dataset), request)
        folder, note = travel(about)
        return _Found(request.dataset, folder, None, note)

    async def _whereabouts(self, kind: str, repo: str, request: RecipeRequest) -> Whereabouts:
        here = await asyncio.to_thread(cached, kind, repo, request.cache) if may_read_files() else None
        await self.scheduler_input.first_answers()
        nodes = self._candidates(request.submit.fields)
        if here is None:  # one that is away may never be used: it must not keep the others from it
            nodes = self._present(nodes)
        own = _variables(request.submit.fields)
        has = dict(zip([one.spec.name for one in nodes], await together(
            self._has(one, kind, repo, own) for one in nodes
        ), strict=True))  # fmt: skip
        lacking = [name for name, is_there in has.items() if not is_there] if here is None else []
        reaches = dict(zip(lacking, await together(self._reaches(name, own) for name in lacking), strict=True))
        has_token = any(name in own for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
        return Whereabouts(kind, repo, here, has, reaches, has_token)

    def _candidates(self, fields: Mapping[str, Any]) -> list[Node]:
        only, labels = (set(_names(fields.get(name))) for name in ("only", "label"))
        return [
            node
            for node in self.cluster.inventory
            if (not only or node.spec.name in only) and labels <= set(node.spec.labels)
        ]

    def _present(self, nodes: Sequence[Node]) -> list[Node]:
        """Those that could take a job now."""
        reports = self.scheduler_input.reports
        linked = ((node, reports.of(node).report) for node in nodes if node.link is not None)
        return [node for node, report in linked if report is None or report.drained is None]

    async def _has(self, node: Node, kind: str, repo: str, own: Mapping[str, str | None]) -> bool:
        """False also for a node that cannot be asked. One that is away is not dialled for it: it may be asleep."""
        if node.link is None:
            return False
        env = {**dict(node.spec.env), **{name: text for name, text in own.items() if text}}
        known = {name: text for name, text in env.items() if name in _CACHE_VARIABLES}
        try:
            return await HubCache(node, self.identity, _CONNECT_S).has(kind, repo, known)
        except UgroError as error:
            log.info("cannot tell what is in its cache: %s", error, extra={"node": node.spec.name})
            return False

    async def _reaches(self, node: str, own: Mapping[str, str | None]) -> bool:
        env = dict(self.cluster.inventory.get(node).spec.env)
        hub = own.get(_ENDPOINT) or env.get(_ENDPOINT) or _HUB
        try:
            return await self.envs.hosts.reaches(node, (hub,))
        except UgroError as error:
            log.info("cannot tell whether it reaches the hub: %s", error, extra={"node": node})
            return False

    # --- its Python ----------------------------------------------------------------------------------------------

    async def _environment(
        self, fields: Mapping[str, Any], recipe: Recipe, args: Sequence[str]
    ) -> tuple[dict[str, Any], str]:
        """The recipe's, unless somebody named one, or every node has what it imports."""
        named = [name for name in fields if name in OPTIONS and OPTIONS[name].path[0] == "environment"]
        if named or self.cluster.config.environment.given_keys:
            return {}, "Python: the environment that was named"
        packages = [*recipe.packages, *(["bitsandbytes>=0.43"] if "--qlora" in args else [])]
        modules = {_module(package) for package in packages}
        await self.scheduler_input.first_answers()
        nodes = self._present(self._candidates(fields))
        await self.scheduler_input.modules.learn(modules, nodes)
        if nodes and not any(self.scheduler_input.modules.lacking(node) & modules for node in nodes):
            return {}, f"Python: the nodes' own, which has {', '.join(sorted(modules))}"
        return {"package": packages}, f"Python: an environment with {', '.join(packages)}"

    # --- its memory ----------------------------------------------------------------------------------------------

    async def _fit(
        self, request: RecipeRequest, recipe: Recipe, model: _Found | None, fields: Mapping[str, Any],
        args: Sequence[str],
    ) -> list[str]:
        """What it needs on each device. Raises Unsatisfiable if it cannot fit."""
        if model is None or _TINY in args:
            return []
        shape = shape_of({**(model.config or {}), **_labels(recipe)})
        if shape is None:
            return ["memory: not known for this architecture"]
        probe = {name: value for name, value in fields.items() if name not in ("folder", "package")}
        spec = await self.jobs.read(replace(request.submit, fields=probe))
        if isinstance(spec, Needs):
            return []
        devices = self._devices(await self.jobs.place_idle(spec))
        if not devices:
            return ["memory: the devices are not known yet"]
        verdict = judge(shape, training_of(args, recipe, devices), devices)
        if verdict.problem is not None:
            raise Unsatisfiable(f"{request.model} {verdict.problem}", hint=verdict.hint)
        return [f"memory: {line}" for line in verdict.lines]

    def _devices(self, placement: Placement) -> list[Device]:
        found: list[Device] = []
        for share in placement.shares:
            node = self.cluster.inventory.get(share.node)
            facts = self.scheduler_input.facts(node)
            if facts is not None:
                found += devices_of(share.node, share.gpus, facts)
        return found


_CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def _check(request: RecipeRequest, args: Sequence[str]) -> None:
    if request.submit.fields.get("script") or request.submit.fields.get("command"):
        raise UsageError("give a script or --model, not both", hint="a recipe has a script of its own")
    if _TINY in args:
        if request.model is None and request.recipe is None:
            raise UsageError("which recipe?", hint="for example: ugro launch --recipe causal_lm --tiny")
        return
    if request.model is None:
        raise UsageError("--model is missing", hint="ugro launch --model gpt2 --dataset wikitext")
    if request.dataset is None:
        raise UsageError(
            "--dataset is missing", hint="a short name such as wikitext, a hub id, or a file such as ./text.txt"
        )


def _fields(
    request: RecipeRequest, recipe: Recipe, model: _Found | None, dataset: _Found | None, args: Sequence[str]
) -> dict[str, Any]:
    named = [("--model", model), ("--dataset", dataset)]
    words = [word for flag, one in named if one is not None for word in (flag, one.name)]
    folders = {flag[2:]: one.folder for flag, one in named if one is not None and one.folder is not None}
    given = dict(request.submit.fields)
    fields: dict[str, Any] = {
        **given, "workdir": recipe.folder, "script": recipe.script, "args": [*words, *args],
        "name": given.get("name") or _job_name(recipe, model),
    }  # fmt: skip
    if folders:
        fields["folder"] = [*_texts(given.get("folder")), *(f"{name}={path}" for name, path in folders.items())]
    if "model" in folders:
        fields["env"] = [*_texts(given.get("env")), f"{_SOURCE}={folders['model']}"]
    return fields


def _job_name(recipe: Recipe, model: _Found | None) -> str:
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name.rpartition("/")[2] if model else "tiny").strip("._-")
    return f"{recipe.name.replace('_', '-')}-{word}"[:60].strip("._-")


def _variables(fields: Mapping[str, Any]) -> dict[str, str | None]:
    pairs = [text.partition("=")[::2] for text in _texts(fields.get("env"))]
    return {name: text or None for name, text in pairs}


def _names(given: Any) -> list[str]:
    return [part.strip() for part in given.split(",")] if isinstance(given, str) else _texts(given)


def _texts(given: Any) -> list[str]:
    """As a client gives a value of several: one text, a list of them, or a map of names."""
    if isinstance(given, Mapping):
        return [str(name) if text is None else f"{name}={text}" for name, text in given.items()]
    return [given] if isinstance(given, str) else [str(one) for one in given or ()]


def _module(package: str) -> str:
    name = re.split(r"[<>=!~\[; ]", package, maxsplit=1)[0].lower()
    return _MODULES.get(name, name.replace("-", "_"))


def _labels(recipe: Recipe) -> dict[str, Any]:
    """A classifier gets a new head; a few labels more or less change nothing."""
    return {} if recipe.task == "causal-lm" else {"id2label": None, "num_labels": 2}
