"""The guards of what a cluster file from a folder may do, of secrets, and of the audit log."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

ALLOWED = ("tests/integration/agent/test_allowance.py", "-k", "cloned_file or edit_of or ssh_uses")
SECRETS = ("tests/unit/core/test_secret.py",)
RULES = ("tests/unit/config/test_allowance.py",)

AUDIT = ("tests/unit/agent/test_audit.py",)

_TRAIL = "src/ugro/agent/api/audit_trail.py"
_AUDIT_RULES = "src/ugro/agent/api/audit_rules.py"
_ALLOWANCE = "src/ugro/config/allowance.py"
_SECRET = "src/ugro/core/support/secret.py"
_CLUSTER = "src/ugro/agent/tracking/cluster.py"
_AGENT = "src/ugro/agent/agent.py"

MUTANTS = (
    Mutant(
        "a part of a command is hidden",
        (Edit(_ALLOWANCE, " and _IS_COMMAND.search(line) is None", ""),),
        RULES,
    ),
    Mutant(
        "a cluster file from a folder is used without being asked for",
        (Edit("src/ugro/client/clusterfile.py", "is_asked_for=True, is_found=True)", "is_asked_for=True)"),),
        ALLOWED,
    ),
    Mutant(
        "an edit of what is executed is applied without being allowed",
        (
            Edit(
                _CLUSTER,
                "loaded = await asyncio.to_thread(_load, self.path, self.guard)",
                "loaded = await asyncio.to_thread(_load, self.path, None)",
            ),
        ),
        ALLOWED,
    ),
    Mutant(
        "ssh reads the configuration that is there, not the one that was allowed",
        (Edit(_CLUSTER, "return _Loaded(config, str(guard.ssh_config))", "return _Loaded(config)"),),
        ALLOWED,
    ),
    Mutant(
        "a restarted agent takes the file as one that was named",
        (Edit("src/ugro/agent/main.py", "is_found=link == home.served_found", "is_found=False"),),
        ALLOWED,
    ),
    Mutant(
        "adding a node allows what somebody else has edited",
        (
            Edit(_AGENT, "            self.allowances.require(Effects.of(before, path))", "            pass"),
            Edit(_ALLOWANCE, "    if allowances.has(Effects.of(before, path)):\n", "    if True:\n"),
        ),
        ALLOWED,
    ),
    Mutant(
        "any content of an allowed file is allowed",
        (Edit(_ALLOWANCE, 'if not any(one["digest"] == effects.digest for one in known):', "if not known:"),),
        RULES,
    ),
    Mutant(
        "the content of an ssh configuration does not count",
        (Edit(_ALLOWANCE, 'yield f"ssh configuration: sha256', 'return\n    yield f"ssh configuration: sha256'),),
        RULES,
    ),
    Mutant(
        "passphrases are no secrets",
        (Edit(_SECRET, "PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", "PASSWORD|PASSWD|CREDENTIAL"),),
        SECRETS,
    ),
    Mutant("a PAT is no secret", (Edit(_SECRET, " or _WHOLE.fullmatch(word)", ""),), SECRETS),
    Mutant("every PATH is a secret", (Edit(_SECRET, "_WHOLE.fullmatch(word)", "_WHOLE.match(word)"),), SECRETS),
    Mutant(
        "passwords in addresses are shown",
        (Edit(_SECRET, 'if "://" not in text or "@" not in text:', "if True:"),),
        SECRETS,
    ),
    Mutant(
        "programs get secrets in documents",
        (Edit("src/ugro/cli/jobs/document.py", "env=tuple(masked(of.env).items())", "env=of.env"),),
        ("tests/unit/cli/test_jobs.py",),
    ),
    Mutant("what is done is not recorded", (Edit(_TRAIL, "    self._audit.note(entry)", "    pass"),), AUDIT),
    Mutant(
        "what is refused can fill the audit log",
        (Edit(_TRAIL, "        if outcome != DONE:", "        if False:"),),
        AUDIT,
    ),
    Mutant(
        "refusals of one user count for all",
        (Edit("src/ugro/agent/ops/audit.py", "self._count_of(entry.user, ", 'self._count_of("", '),),
        AUDIT,
    ),
    Mutant(
        "who does most pushes out what others did",
        (Edit("src/ugro/store/audit.py", "WHERE user = ? ORDER BY seq", "WHERE ? <> '' ORDER BY seq"),),
        AUDIT,
    ),
    Mutant(
        "looks that are refused are not recorded",
        (Edit(_AUDIT_RULES, "    if status != 403:", "    if True:"),),
        AUDIT,
    ),
    Mutant(
        "tunnels that are refused are not recorded",
        (Edit(_AUDIT_RULES, "tunnel_end(query)) if status >= 400", "tunnel_end(query)) if False"),),
        AUDIT,
    ),
    Mutant(
        "the audit log has secrets of commands",
        (
            Edit(
                _AUDIT_RULES,
                "shlex.join(masked_command(str(part) for part in value))",
                "shlex.join(str(part) for part in value)",
            ),
        ),
        AUDIT,
    ),
)
