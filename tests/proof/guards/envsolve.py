"""The guards of environments on the agent's side: what they are called, when they change, and who sees a password."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

NAMES = ("tests/unit/policy/python_env/test_naming.py",)
RESOLVING = ("tests/integration/environments/test_resolving.py",)
SECRETS = ("tests/unit/config/test_python_env.py",)
MEMBERS = ("tests/unit/agent/test_env_of_members.py",)
TOOLS = ("tests/unit/agent/test_python_tools.py",)

_NAMING = "ugro.features.environments.rules.naming"
_RESOLVING = "ugro.features.environments.service.service"
_READING = "ugro.features.environments.service.reading"
_TOOLS = "ugro.features.environments.service.tools"

MUTANTS = (
    Mutant(
        "an environment's name does not depend on the hashes of its files",
        (
            Edit(
                _NAMING,
                "_canonical",
                "[f'{normal(name)}{equals}{version}', *hashes]",
                "[f'{normal(name)}{equals}{version}']",
            ),
        ),
        NAMES,
    ),
    Mutant(
        "hashes that a lock gives are replaced by those of the index",
        (Edit("ugro.features.environments.rules.requirements", "with_given_hashes", "not known", "known is not None"),),
        NAMES,
    ),
    Mutant(
        "an environment is resolved again by itself",
        (Edit(_RESOLVING, "Resolver.resolve", "not upgrade", "False"),),
        (*RESOLVING, "-k", "new_version"),
    ),
    Mutant(
        "an index's password is an argument of uv",
        (
            Edit(
                _RESOLVING,
                "Resolver._uv",
                "variables = await self._tools.variables(request, own, work)",
                "variables = await self._tools.variables(request, own, work)\n"
                "argv = [*argv, '--default-index', sources.index_url or '']",
            ),
        ),
        (*RESOLVING, "-k", "password"),
    ),
    Mutant(
        "an index's password is in what uv is said to have said",
        (Edit("ugro.features.environments.service.tools", "failed", "mask(line)", "line"),),
        ("tests/unit/agent/test_python_tools.py",),
    ),
    Mutant(
        "a job's document shows the password of its index",
        (
            Edit(
                "ugro.features.environments.model",
                "EnvRequest.masked",
                "self.with_addresses(without_passwords)",
                "self",
            ),
        ),
        (*SECRETS, "-k", "document"),
    ),
    Mutant(
        "what a cluster file says about an index is shown with its password",
        (Edit("ugro.kernel.config.allowance", "_setting_lines", "without_passwords(line)", "line"),),
        (*SECRETS, "-k", "document"),
    ),
    Mutant(
        "a browser has the agent read a file of this machine",
        (
            Edit(
                "ugro.features.environments.service.reading",
                "refuse_files",
                "value is not None and '\\n' not in value",
                "False",
            ),
        ),
        (*SECRETS, "-k", "browser"),
    ),
    Mutant(
        "a package is built on the agent's machine for a member",
        (
            Edit(
                _RESOLVING,
                "Resolver._pinned",
                "('--only-binary', ':all:', '--format', 'pylock.toml')",
                "('--format', 'pylock.toml')",
            ),
        ),
        (*RESOLVING, "-k", "built"),
    ),
    Mutant(
        "the packages of a lock are not looked at",
        (Edit(_RESOLVING, "Resolver._pinned", "_checked", "tuple"),),
        (*RESOLVING, "-k", "lock"),
    ),
    Mutant(
        "a member's packages are taken for the owner's",
        (Edit(_READING, "_whose", "if may_read_files():\n    return Whose.OWNER", "return Whose.OWNER"),),
        MEMBERS,
    ),
    Mutant(
        "a file's own sources are not looked at",
        (
            Edit(
                _READING,
                "environment_of",
                "request.addresses if own.names_packages else own.addresses",
                "own.addresses",
            ),
        ),
        MEMBERS,
    ),
    Mutant(
        "uv sees the agent's variables for everybody",
        (Edit(_TOOLS, "Tools.variables", "not request.is_foreign", "True"),),
        TOOLS,
    ),
    Mutant(
        "the login of pip's index is everybody's",
        (Edit(_TOOLS, "Tools.sources_of", "request.is_foreign", "False"),),
        TOOLS,
    ),
    Mutant(
        "what a member got with a password is resolved for everybody",
        (Edit(_NAMING, "apart", "request.user if has_login else True", "True"),),
        NAMES,
    ),
    Mutant(
        "the files of an environment are sent to whoever knows its name",
        (Edit(_NAMING, "files_key", "request.is_foreign", "False"),),
        (*RESOLVING, "-k", "private"),
    ),
    Mutant(
        "a uv that was damaged here is executed and sent",
        (
            Edit(
                "ugro.features.environments.service.tools",
                "_is_whole",
                "blob_of(folder / _UV).content == _record(folder).read_text()",
                "blob_of(folder / _UV).content != ''",
            ),
        ),
        ("tests/unit/agent/test_python_tools.py",),
    ),
)
