"""What the project promises of its own text: sizes, what the node program may import, what is in the docs.

Each check is a function from text to complaints, and has a sample that it must complain about. Parsing all of the tree
takes long: a file is parsed only for a check that its text gives cause for.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "ugro"
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_CLASS = 500
MOST_LINES_OF_THE_ARCHITECTURE = 120
FEWEST_QUESTIONS = 24  # of its table "Where to look"
OLDEST_PYTHON_ON_A_NODE = (3, 9)
NEWER_THAN_A_NODE = {"tomllib", "annotationlib", "compression"}
RUNS_WHAT_IT_LOADS = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
THE_PRINTER = "src/ugro/cli/output.py"

# The files with handlers that catch everything, and why nothing less would do.
CATCHES_EVERYTHING = {
    "src/ugro/features/batches/worker.py": (
        "what a user's object raises when it is pickled or loaded is the answer; an item may raise anything: it "
        "fails alone, and the others go on"
    ),
    "src/ugro/features/batches/jobs_engine.py": (
        "the top of a thread that keeps a host: a pool would wait for it for ever"
    ),
    "src/ugro/features/batches/run.py": (
        "the error of the user's own input is raised to the user, after the results before it"
    ),
    "src/ugro/cli/candidates.py": "a message would land in the line that the user types",
    "src/ugro/cli/main.py": "the last stop: a user gets one clear line and never a traceback",
    "src/ugro/features/services/inference/service.py": (
        "what a user's model raises is the answer to that request; the others go on; the top of a thread: its "
        "error is raised in the event loop that waits for it"
    ),
    "src/ugro/features/services/inference/generation.py": (
        "the top of a thread: everybody who waits for a text must hear of it"
    ),
    "src/ugro/train/samples.py": "a look at what a user's collate function does must not end a training that works",
    "src/ugro/kernel/store/engine.py": "whoever asked for it gets the error; the thread must serve the others",
    "src/ugro/kernel/operations/responses.py": (
        "the end of a stream: its reader gets one clear line and not a broken answer"
    ),
    "src/ugro/kernel/jobs/engine/leases.py": (
        "the top of a loop that must not end: what runs would end for want of our word"
    ),
    "src/ugro/kernel/agent/loop_watch.py": "the top of a thread that must not end: it speaks for a loop that stands",
    "src/ugro/kernel/jobs/engine/reconciler.py": (
        "the top of the daemon's loop: whatever happens to one pass, jobs go on"
    ),
}

# Those with two, whose reasons are both stated.
SEVERAL = {"src/ugro/features/batches/worker.py": 2, "src/ugro/features/services/inference/service.py": 2}

# Who loads pickles all the same, and whose they are.
LOADS_ITS_OWN = {
    "src/ugro/features/batches/worker.py": (
        "between the processes of one user's pool, over pipes or a cluster of that user"
    ),
    "src/ugro/features/batches/local.py": "only writes",
    "src/ugro/features/batches/pipes.py": "only writes",
}

# Spelled in pieces, so that this file does not find itself.
LEAKS = re.compile(
    r"(?<![\w~.])/wo" r"rk/|/opt/(py" r"pi|whe" r"els)"
    r"|sub-?ag" r"ent|cla" r"ude|anthr" r"opic|mission\.m" r"d",
    re.IGNORECASE,
)
NOT_OURS = {".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "node_modules"}


@dataclass(frozen=True)
class Module:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


Check = Callable[[Module], Iterator[str]]


def too_long(module: Module) -> Iterator[str]:
    lines = len(module.text.splitlines())
    if lines > MOST_LINES_OF_A_FILE:
        yield f"{module.path}: {lines} lines; split it by its nouns"


def large_classes(module: Module) -> Iterator[str]:
    if module.text.count("\n") < MOST_LINES_OF_A_CLASS:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_CLASS:
                yield f"{module.path}:{node.lineno}: class {node.name} has {lines} lines"


def shells(module: Module) -> Iterator[str]:
    if not re.search("shell|system|popen", module.text):
        return
    for call in _calls(module):
        name = ast.unparse(call.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        shell = options.get("shell", "False")
        by_option = shell == "True" or (shell != "False" and name.startswith("subprocess."))
        if by_option or name in {"os.system", "os.popen"} or name.endswith("create_subprocess_shell"):
            yield f"{module.path}:{call.lineno}: {name} gives a string to a shell; give an argv list"


def broad_excepts(module: Module) -> Iterator[str]:
    if not re.search(r"except\s*:|Exception\b", module.text):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and _caught(node) & {"", "Exception", "BaseException"}:
            yield f"{module.path}:{node.lineno}: catches everything; name the errors that are expected"


def unsafe_loading(module: Module) -> Iterator[str]:
    if module.path in LOADS_ITS_OWN or not re.search("|".join(RUNS_WHAT_IT_LOADS), module.text):
        return
    for line, name in _imports(module):
        if name.partition(".")[0] in RUNS_WHAT_IT_LOADS:
            yield f"{module.path}:{line}: {name} runs what it loads"


def prints(module: Module) -> Iterator[str]:
    if module.path == THE_PRINTER or "print" not in module.text:
        return
    for call in _calls(module):
        if ast.unparse(call.func) == "print":
            yield f"{module.path}:{call.lineno}: only {THE_PRINTER} prints"


def foreign_imports(module: Module) -> Iterator[str]:
    for line, name in _imports(module):
        top = name.partition(".")[0]
        is_ours = f"{name}.".startswith("ugro.node.") or PART_ON_NODES.fullmatch(name)
        if not is_ours and (top not in sys.stdlib_module_names or top in NEWER_THAN_A_NODE):
            yield f"{module.path}:{line}: a node may have no {name}"


def newer_syntax(module: Module) -> Iterator[str]:
    try:
        ast.parse(module.text, feature_version=OLDEST_PYTHON_ON_A_NODE)
    except SyntaxError as error:
        yield f"{module.path}:{error.lineno}: {error.msg}"


def leaks(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if found := LEAKS.search(line):
            yield f"{path}:{number}: {found[0]!r} is of no use to a reader of the project"


def undocumented(commands: Iterable[str], text: str) -> Iterator[str]:
    for command in commands:
        if not re.search(rf"(?:`|^#+ ){re.escape(command)}(?=[\s`\[]|$)", text, re.MULTILINE):
            yield f"{command} is not in docs/cli.md"


def broken_links(path: str, text: str, exists: Callable[[str], bool]) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target) and not exists(target):
            yield f"{path}: no {target}"


def lost_paths(page: str, exists: Callable[[str], bool]) -> Iterator[str]:
    """A path has a slash or is a Python file; commands have spaces."""
    for word in re.findall(r"`([^`\s]+)`", page):
        if ("/" in word or word.endswith(".py")) and not exists(word):
            yield f"there is no {word}"


def questions(page: str) -> list[tuple[str, str, str]]:
    """What a reader looks for, the file to open, and the word to find there."""
    found = (re.fullmatch(r"\| (.+) \| `([^`]+\.\w+)` \| `([^`]+)` \|", line) for line in page.splitlines())
    return [(row[1], row[2], row[3]) for row in found if row]


def wrong_doors(page: str, text_of: Callable[[str], str]) -> Iterator[str]:
    for question, file, word in questions(page):
        if not re.search(rf"\b{re.escape(word)}\b", text_of(file)):
            yield f"{question}: {file} has no {word}"


def unlike_its_docstring(page: str, docstrings: dict[str, str | None]) -> Iterator[str]:
    """Each room has a row, which says what its docstring says: what is in it, and what it is not."""
    rows = {room: said for room, *said in re.findall(r"^\| `(\S+)/` \| (.+) \| (.+) \|$", page, re.MULTILINE)}
    for room, docstring in docstrings.items():
        said = " ".join((docstring or "").replace("``", "`").split())
        if not said:
            yield f"{room} has no docstring"
        elif room not in rows:
            yield f"{room} has no row"
        else:
            yield from (f"the docstring of {room} does not say: {cell}" for cell in rows[room] if cell not in said)


def leaf_commands(command: click.Command, name: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield name
        return
    context = click.Context(command, info_name=name)
    for child_name in command.list_commands(context):
        child = command.get_command(context, child_name)
        assert child is not None, f"{name} lists {child_name} and has no such command"
        if not child.hidden:
            yield from leaf_commands(child, f"{name} {child_name}")


def _calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {""}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).removeprefix("builtins.") for kind in kinds}


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    """Absolute names; a relative one is taken from the module's own package."""
    package = module.path.removeprefix("src/").split("/")[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])


def _python(place: Path) -> list[Path]:
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def modules(*folders: str) -> list[Module]:
    paths = [path for folder in folders for path in _python(ROOT / folder)]
    return [_module(path) for path in paths]


@cache
def _module(path: Path) -> Module:
    return Module(path.relative_to(ROOT).as_posix(), path.read_text())


def texts() -> Iterator[tuple[str, str]]:
    """Every text in the tree that is ours, hidden folders such as .github included."""
    for folder, children, names in os.walk(ROOT):
        children[:] = [name for name in children if name not in NOT_OURS and not name.endswith("_cache")]
        for path in (Path(folder) / name for name in names if name not in NOT_OURS):
            try:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # not a text


def is_in_tree(folder: Path) -> Callable[[str], bool]:
    return lambda target: (folder / target).exists()


PART_ON_NODES = re.compile(r"ugro\.features\.\w+(\.(node|on_node)(\.\w+)*)?")
# What runs on nodes: the kernel's part, and what features add.
ON_NODES = (
    "src/ugro/node",
    "src/ugro/features/environments/node",
    "src/ugro/features/hardware/node",
    "src/ugro/features/power/node",
    "src/ugro/features/recipes/on_node.py",
    "src/ugro/features/training/on_node.py",
)
EVERYWHERE = ("src", "tests", "bench", "scripts")


@pytest.mark.parametrize(
    ("check", "folders"),
    [
        (too_long, EVERYWHERE),
        (large_classes, EVERYWHERE),
        (shells, EVERYWHERE),
        (unsafe_loading, EVERYWHERE),
        (prints, ("src", "scripts")),
        (foreign_imports, ON_NODES),
        (newer_syntax, (*ON_NODES, "src/ugro/features/services/node", "scripts")),
    ],
)
def test_our_code_keeps_its_promises(check: Check, folders: tuple[str, ...]) -> None:
    looked_at = modules(*folders)
    assert looked_at
    assert [complaint for module in looked_at for complaint in check(module)] == []


def test_everything_is_caught_only_where_a_reason_is_given() -> None:
    caught = {module.path: list(broad_excepts(module)) for module in modules("src", "bench", "scripts")}
    surprising = [line for path, lines in caught.items() for line in lines if path not in CATCHES_EVERYTHING]
    assert surprising == []
    assert [path for path in CATCHES_EVERYTHING if len(caught.get(path, [])) != SEVERAL.get(path, 1)] == []
    assert all(CATCHES_EVERYTHING.values())


def test_the_tree_speaks_of_the_project_alone() -> None:
    assert [complaint for path, text in texts() for complaint in leaks(path, text)] == []


def test_every_command_is_documented() -> None:
    from ugro.cli.main import cli

    commands = list(leaf_commands(cli, "ugro"))
    assert commands
    assert list(undocumented(commands, (ROOT / "docs" / "cli.md").read_text())) == []


def test_the_architecture_fits_two_pages() -> None:
    lines = len((ROOT / "ARCHITECTURE.md").read_text().splitlines())
    assert 0 < lines <= MOST_LINES_OF_THE_ARCHITECTURE


def test_every_path_in_the_architecture_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    below = {path.name for path in PACKAGE.rglob("*.py")}
    known = below | {f"{folder.name}/" for folder in PACKAGE.rglob("*") if folder.is_dir()}
    exists = lambda path: path in known or (PACKAGE / path).exists() or (ROOT / path).exists()  # noqa: E731
    assert list(lost_paths(page, exists)) == []
    proofs = (ROOT / ".github/workflows/proof.yml").read_text()
    assert [path for path in re.findall(r"src/[\w/]+", proofs) if not (ROOT / path).exists()] == []


def test_where_to_look_leads_to_the_right_doors() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(questions(page)) >= FEWEST_QUESTIONS
    assert list(wrong_doors(page, lambda file: (PACKAGE / file).read_text())) == []


def test_every_room_and_feature_has_its_row_and_its_docstring() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = [path for place in (".", "kernel", "features") for path in (PACKAGE / place).glob("*/__init__.py")]
    shown = [path for path in rooms if path.parent.name not in ("kernel", "features")]
    assert list(unlike_its_docstring(page, docstrings(shown))) == []


def test_every_package_says_what_it_is_for() -> None:
    assert [name for name, text in docstrings(PACKAGE.rglob("__init__.py")).items() if not text] == []


def docstrings(packages: Iterable[Path]) -> dict[str, str | None]:
    folders = {path.parent.relative_to(PACKAGE).as_posix(): path for path in packages}
    return {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in sorted(folders.items())}


def test_links_between_our_pages_lead_somewhere() -> None:
    pages = [(path, text) for path, text in texts() if path.endswith(".md")]
    assert pages
    found = [broken_links(path, text, is_in_tree((ROOT / path).parent)) for path, text in pages]
    assert [complaint for complaints in found for complaint in complaints] == []


REMOTE = "src/ugro/node/x.py"


@pytest.mark.parametrize(
    ("check", "path", "bad"),
    [
        (too_long, "src/x.py", "\n" * 601),
        (large_classes, "src/x.py", "class A:\n" + "    x = 1\n" * 500),
        (shells, "src/x.py", "subprocess.run('ls', shell=True)"),
        (shells, "src/x.py", "subprocess.run('ls', shell=wanted)"),
        (shells, "src/x.py", "os.system('ls')"),
        (shells, "src/x.py", "asyncio.create_subprocess_shell('ls')"),
        (broad_excepts, "src/x.py", "try: f()\nexcept: pass"),
        (broad_excepts, "src/x.py", "try: f()\nexcept Exception as error: pass"),
        (broad_excepts, "src/x.py", "try: f()\nexcept (OSError, BaseException): pass"),
        (unsafe_loading, "src/x.py", "import pickle"),
        (unsafe_loading, "src/x.py", "from marshal import loads"),
        (prints, "src/x.py", "print('x')"),
        (foreign_imports, REMOTE, "import yaml"),
        (foreign_imports, REMOTE, "import tomllib"),
        (foreign_imports, REMOTE, "from ugro.kernel.support import errors"),
        (foreign_imports, REMOTE, "from ugro import remotely"),
        (foreign_imports, REMOTE, "from ..core import errors"),
        (foreign_imports, REMOTE, "def f():\n    import torch"),
        (newer_syntax, REMOTE, "match x:\n    case 1: pass"),
        (newer_syntax, REMOTE, "try: f()\nexcept* OSError: pass"),
    ],
)
def test_a_broken_promise_is_noticed(check: Check, path: str, bad: str) -> None:
    assert list(check(Module(path, bad)))


@pytest.mark.parametrize(
    ("check", "path", "good"),
    [
        (too_long, "src/x.py", "\n" * 600),
        (large_classes, "src/x.py", "class A:\n" + "    x = 1\n" * 399),
        (shells, "src/x.py", "subprocess.run(['ls'], shell=False)"),
        (shells, "src/x.py", "User(shell='/usr/bin/fish')"),
        (broad_excepts, "src/x.py", "try: f()\nexcept (OSError, ValueError): pass"),
        (unsafe_loading, "src/x.py", "import json"),
        (prints, THE_PRINTER, "print('x')"),
        (prints, "src/x.py", "console.print('x')"),
        (foreign_imports, REMOTE, "import os.path\nfrom . import wire\nfrom .wire import f"),
        (foreign_imports, REMOTE, "import ugro.node.wire\nfrom ugro.node import wire"),
        (newer_syntax, REMOTE, "with open(a) as b, open(c) as d: pass"),
    ],
)
def test_a_kept_promise_is_not_complained_about(check: Check, path: str, good: str) -> None:
    assert list(check(Module(path, good))) == []


@pytest.mark.parametrize("bad", ["in /wo" + "rk/x", "a Sub" + "agent said", "file:///opt/py" + "pi/simple"])
def test_a_leak_is_noticed(bad: str) -> None:
    assert [leak.partition(": ")[0] for leak in leaks("x.md", f"fine\n{bad}")] == ["x.md:2"]


def test_a_users_own_work_folder_is_no_leak() -> None:
    assert list(leaks("x.md", "~/work/train.py and /home/me/work/train.py")) == []


def test_a_command_that_is_not_in_the_docs_is_noticed() -> None:
    docs = "## ugro node ls\n`ugro run -- CMD` runs. `ugro top`\nugro bare"
    commands = ["ugro node ls", "ugro run", "ugro top", "ugro node", "ugro bare", "ugro to"]
    assert list(undocumented(commands[:4], docs)) == []
    assert list(undocumented(commands[4:], docs)) == [
        "ugro bare is not in docs/cli.md",
        "ugro to is not in docs/cli.md",
    ]


def test_commands_are_found_in_groups_and_hidden_ones_are_left_out() -> None:
    nested = click.Group("node", commands=[click.Command("ls"), click.Command("debug", hidden=True)])
    assert list(leaf_commands(click.Group("ugro", commands=[nested, click.Command("top")]), "ugro")) == [
        "ugro node ls",
        "ugro top",
    ]


def test_a_link_to_nothing_is_noticed() -> None:
    page = "[a](here.md#part) [b](https://example.org/x) [c](gone.md) [d](#part)"
    assert list(broken_links("x.md", page, {"here.md"}.__contains__)) == ["x.md: no gone.md"]


def test_a_path_that_is_gone_is_noticed() -> None:
    page = "`a/b.py` → `b.py`, `gone/`, `ugro run a/b.py`, `word`"
    assert list(lost_paths(page, {"a/b.py", "b.py"}.__contains__)) == ["there is no gone/"]


def test_a_function_that_moved_is_noticed() -> None:
    page = "| why | `a.py` | `reason` |\n| how | `a.py` | `unreason` |\n| `kernel/` | a.py | x |"
    assert list(wrong_doors(page, lambda file: "def unreason(): ...")) == ["why: a.py has no reason"]


def test_a_room_that_is_not_as_its_row_says_is_noticed() -> None:
    page = "| Room | Is | Is not |\n| --- | --- | --- |\n| `a/` | Ants | Does not fly |\n| `b/` | Bees | Does not eat |"
    said = {"a": "Ants.\n\nDoes not fly.", "b": "Bees. Does not sing.", "c": "Cats. Does not bark.", "d": None}
    assert list(unlike_its_docstring(page, said)) == [
        "the docstring of b does not say: Does not eat",
        "c has no row",
        "d has no docstring",
    ]
