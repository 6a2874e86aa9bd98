"""The guards of what a cluster file from a folder may do, of secrets, and of the audit log."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

ALLOWED = ("tests/integration/agent/test_allowance.py", "-k", "cloned_file or edit_of or ssh_uses")
SECRETS = ("tests/unit/core/test_secret.py",)
RULES = ("tests/unit/config/test_allowance.py",)

AUDIT = ("tests/unit/agent/test_audit.py",)

_TRAIL = "ugro.kernel.operations.audit_trail"
_AUDIT_RULES = "ugro.kernel.operations.audit_rules"
_ALLOWANCE = "ugro.kernel.config.allowance"
_SECRET = "ugro.kernel.support.secrets"
_CLUSTER = "ugro.kernel.links.cluster"
_AGENT = "ugro.kernel.agent.agent"

MUTANTS = (
    Mutant(
        "a part of a command is hidden",
        (Edit(_ALLOWANCE, "_setting_lines", "is_masked and _IS_COMMAND.search(line) is None", "is_masked"),),
        RULES,
    ),
    Mutant(
        "a cluster file from a folder is used without being asked for",
        (
            Edit(
                "ugro.client.launcher",
                "nearest_cluster_file",
                "ClusterFile(path, is_asked_for=True, is_found=True)",
                "ClusterFile(path, is_asked_for=True)",
            ),
        ),
        ALLOWED,
    ),
    Mutant(
        "an edit of what is executed is applied without being allowed",
        (Edit(_CLUSTER, "Cluster._reload", "self.guard", "None"),),
        ALLOWED,
    ),
    Mutant(
        "ssh reads the configuration that is there, not the one that was allowed",
        (Edit(_CLUSTER, "_load", "_Loaded(config, str(guard.ssh_config))", "_Loaded(config)"),),
        ALLOWED,
    ),
    Mutant(
        "a restarted agent takes the file as one that was named",
        (Edit("ugro.kernel.agent.main", "_cluster_file", "link == home.served_found", "False"),),
        ALLOWED,
    ),
    Mutant(
        "adding a node allows what somebody else has edited",
        (
            Edit(_AGENT, "Agent._edit", "self.allowances.require(Effects.of(before, path))", "pass"),
            Edit(_ALLOWANCE, "keep_allowed", "allowances.has(Effects.of(before, path))", "True"),
        ),
        ALLOWED,
    ),
    Mutant(
        "any content of an allowed file is allowed",
        (Edit(_ALLOWANCE, "Allowances.require", "any((one['digest'] == effects.digest for one in known))", "known"),),
        RULES,
    ),
    Mutant(
        "the content of an ssh configuration does not count",
        (
            Edit(
                _ALLOWANCE,
                "_ssh_lines",
                "for line in content.decode('utf-8', 'replace').split('\\n'):\n"
                "    if not line.strip() or line.lstrip(' \\t').startswith('#'):\n"
                "        continue\n"
                "    keyword = _KEYWORD.match(line)\n"
                "    if keyword is None or keyword[1].lower() not in "
                "_QUIET_OF_SSH:\n"
                "        yield f'ssh configuration: "
                "{escaped(line.strip().expandtabs(1))}'",
                "for line in content.decode('utf-8', 'replace').split('\\n'):\n"
                "    if not line.strip() or line.lstrip(' \\t').startswith('#'):\n"
                "        continue\n"
                "    keyword = _KEYWORD.match(line)\n"
                "    if keyword is None or keyword[1].lower() not in "
                "_QUIET_OF_SSH:\n"
                "        yield f'ssh configuration: "
                "{escaped(line.strip().expandtabs(1))}'\n"
                "return",
            ),
        ),
        RULES,
    ),
    Mutant(
        "passphrases are no secrets",
        (Edit(_SECRET, "", "'PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL'", "'PASSWORD|PASSWD|CREDENTIAL'"),),
        SECRETS,
    ),
    Mutant(
        "a PAT is no secret",
        (Edit(_SECRET, "_is_secret", "_ENDING.search(word) or _WHOLE.fullmatch(word)", "_ENDING.search(word)"),),
        SECRETS,
    ),
    Mutant("every PATH is a secret", (Edit(_SECRET, "_is_secret", "_WHOLE.fullmatch", "_WHOLE.match"),), SECRETS),
    Mutant(
        "passwords in addresses are shown",
        (Edit(_SECRET, "without_passwords", "'://' not in text or '@' not in text", "True"),),
        SECRETS,
    ),
    Mutant(
        "programs get secrets in documents",
        (Edit("ugro.cli.jobs.document", "without_secrets", "tuple(masked(of.env).items())", "of.env"),),
        ("tests/unit/cli/test_jobs.py",),
    ),
    Mutant(
        "what is done is not recorded", (Edit(_TRAIL, "AuditTrail._note", "self._audit.note(entry)", "pass"),), AUDIT
    ),
    Mutant(
        "what is refused can fill the audit log",
        (Edit(_TRAIL, "AuditTrail._note", "outcome != DONE", "False"),),
        AUDIT,
    ),
    Mutant(
        "refusals of one user count for all",
        (Edit("ugro.kernel.access.service", "RefusalLimit.counted", "entry.user", "''"),),
        AUDIT,
    ),
    Mutant(
        "who does most pushes out what others did",
        (
            Edit(
                "ugro.kernel.access.store",
                "_trim",
                "'SELECT seq FROM audit WHERE user = ? ORDER BY seq LIMIT ?'",
                "\"SELECT seq FROM audit WHERE ? <> '' ORDER BY seq LIMIT ?\"",
            ),
        ),
        AUDIT,
    ),
    Mutant(
        "looks that are refused are not recorded",
        (Edit(_AUDIT_RULES, "refused_look", "status != 403", "True"),),
        AUDIT,
    ),
    Mutant(
        "tunnels that are refused are not recorded",
        (Edit(_AUDIT_RULES, "refused_look", "status >= 400", "False"),),
        AUDIT,
    ),
    Mutant(
        "the audit log has secrets of commands",
        (
            Edit(
                _AUDIT_RULES, "_shown", "masked_command((str(part) for part in value))", "(str(part) for part in value)"
            ),
        ),
        AUDIT,
    ),
)
