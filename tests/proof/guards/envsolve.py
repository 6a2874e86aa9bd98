"""The guards of environments on the agent's side: what they are called, when they change, and who sees a password."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

NAMES = ("tests/unit/policy/python_env/test_naming.py",)
RESOLVING = ("tests/integration/environments/test_resolving.py",)
SECRETS = ("tests/unit/config/test_python_env.py",)
MEMBERS = ("tests/unit/agent/test_env_of_members.py",)
TOOLS = ("tests/unit/agent/test_python_tools.py",)

_NAMING = "src/ugro/policy/python_env/naming.py"
_RESOLVING = "src/ugro/agent/python_env/resolving.py"
_READING = "src/ugro/agent/python_env/reading.py"
_TOOLS = "src/ugro/agent/python_env/tools.py"

MUTANTS = (
    Mutant(
        "an environment's name does not depend on the hashes of its files",
        (Edit(_NAMING, '{equals}{version}", *hashes]', '{equals}{version}"]'),),
        NAMES,
    ),
    Mutant(
        "hashes that a lock gives are replaced by those of the index",
        (
            Edit(
                "src/ugro/policy/python_env/pinned.py",
                "    if not known:\n        return resolved\n",
                "    if known is not None:\n        return resolved\n",
            ),
        ),
        NAMES,
    ),
    Mutant(
        "an environment is resolved again by itself",
        (Edit(_RESOLVING, "if not upgrade and (known := ", "if False and (known := "),),
        (*RESOLVING, "-k", "new_version"),
    ),
    Mutant(
        "an index's password is an argument of uv",
        (
            Edit(
                _RESOLVING,
                "        ended = await run([uv, *argv], env=",
                '        argv = [*argv, "--default-index", sources.index_url or ""]\n'
                "        ended = await run([uv, *argv], env=",
            ),
        ),
        (*RESOLVING, "-k", "password"),
    ),
    Mutant(
        "an index's password is in what uv is said to have said",
        (Edit("src/ugro/agent/python_env/tools.py", "[mask(line) for line in", "[line for line in"),),
        ("tests/unit/agent/test_python_tools.py",),
    ),
    Mutant(
        "a job's document shows the password of its index",
        (
            Edit(
                "src/ugro/core/python_env.py",
                "        return self.with_addresses(without_passwords)",
                "        return self",
            ),
        ),
        (*SECRETS, "-k", "document"),
    ),
    Mutant(
        "what a cluster file says about an index is shown with its password",
        (Edit("src/ugro/config/allowance.py", "yield without_passwords(line) if", "yield line if"),),
        (*SECRETS, "-k", "document"),
    ),
    Mutant(
        "a browser has the agent read a file of this machine",
        (Edit("src/ugro/agent/python_env/reading.py", 'if value is not None and "\\n" not in value:', "if False:"),),
        (*SECRETS, "-k", "browser"),
    ),
    Mutant(
        "a package is built on the agent's machine for a member",
        (Edit(_RESOLVING, '("--only-binary", ":all:", ', "("),),
        (*RESOLVING, "-k", "built"),
    ),
    Mutant(
        "the packages of a lock are not looked at",
        (Edit(_RESOLVING, "=_checked(line for _, line in exported)", "=tuple(line for _, line in exported)"),),
        (*RESOLVING, "-k", "lock"),
    ),
    Mutant(
        "a member's packages are taken for the owner's",
        (Edit(_READING, "    if may_read_files():\n        return Whose.OWNER\n", "    return Whose.OWNER\n"),),
        MEMBERS,
    ),
    Mutant(
        "a file's own sources are not looked at",
        (Edit(_READING, "chosen = request.addresses if own.names_packages else own.addr", "chosen = own.addr"),),
        MEMBERS,
    ),
    Mutant(
        "uv sees the agent's variables for everybody",
        (Edit(_TOOLS, "if not request.is_foreign:\n            return env", "if True:\n            return env"),),
        TOOLS,
    ),
    Mutant(
        "the login of pip's index is everybody's",
        (Edit(_TOOLS, "if request.is_foreign:\n            index, extra", "if False:\n            index, extra"),),
        TOOLS,
    ),
    Mutant(
        "what a member got with a password is resolved for everybody",
        (Edit(_NAMING, "request.user if has_login else True", "True"),),
        NAMES,
    ),
    Mutant(
        "the files of an environment are sent to whoever knows its name",
        (Edit(_NAMING, "{name}\" if request.is_foreign else name", "{name}\" if False else name"),),
        (*RESOLVING, "-k", "private"),
    ),
    Mutant(
        "a uv that was damaged here is executed and sent",
        (Edit("src/ugro/agent/python_env/tools.py", ".content == _record(folder).read_text()", ".content != ''"),),
        ("tests/unit/agent/test_python_tools.py",),
    ),
)
