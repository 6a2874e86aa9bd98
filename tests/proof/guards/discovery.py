"""The guards of machines that are found: who joins, who goes, and what their registry may say."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

CIRCLE = ("tests/integration/nodes/test_discovery.py", "-k", "once_its_key")
RULES = ("tests/unit/policy/nodes/test_discovery.py",)
STORE = ("tests/unit/store/test_discovered.py",)
CANDIDATES = ("tests/unit/nodes/discovery/test_candidates.py",)
ALLOWED = ("tests/unit/config/test_discovery.py",)

_RULES = "ugro.features.discovery.rules"
_STORE = "ugro.features.discovery.store"
_CANDIDATES = "ugro.features.discovery.candidates"

MUTANTS = (
    Mutant(
        "a program that finds machines gets the agent's environment",
        (Edit("ugro.features.discovery.sources", "CommandSource._output", "inherited(os.environ)", "None"),),
        ("tests/integration/nodes/test_discovery_sources.py", "-k", "environment"),
    ),
    Mutant(
        "a machine joins with a host key that nobody accepted",
        (Edit("ugro.kernel.links.transport", "ssh_command", "_KNOWN_KEYS_ONLY if spec.found_by else {}", "{}"),),
        CIRCLE,
    ),
    Mutant(
        "a node that left is dropped while a job runs there",
        (Edit(_RULES, "_step", "Step(Act.REMOVE, name) if name not in now.busy else None", "Step(Act.REMOVE, name)"),),
        RULES,
    ),
    Mutant(
        "a node that left is dropped before the files of its jobs are here",
        (
            Edit(
                "ugro.features.discovery.service",
                "Discovery._take_steps",
                "await self._store.busy() | self._ties.uncollected(await self._store.unkept())",
                "await self._store.busy()",
            ),
        ),
        ("tests/integration/nodes/test_discovery.py", "-k", "only_after_the_files"),
    ),
    Mutant(
        "the record of a node is removed while a job holds something there",
        (
            Edit(
                _STORE,
                "_remove",
                "'SELECT 1 FROM held_devices WHERE node = ?'",
                "'SELECT 1 FROM held_devices WHERE node = ? AND 0'",
            ),
        ),
        STORE,
    ),
    Mutant(
        "a job can start on a node that was removed a moment ago",
        (
            Edit(_STORE, "_remove", "'node-removed'", "''"),
            Edit(_STORE, "_remove", "'no job uses it any more'", "str(db.execute(_UNDRAIN, (name,)))"),
        ),
        STORE,
    ),
    Mutant(
        "a person's drain is undone when the node is back",
        (
            Edit(
                _STORE,
                "",
                "\"DELETE FROM drained_nodes WHERE name = ? AND drained_by = 'discovery'\"",
                "'DELETE FROM drained_nodes WHERE name = ?'",
            ),
        ),
        STORE,
    ),
    Mutant(
        "discovery's drain replaces a person's",
        (
            Edit(
                _STORE,
                "_leave",
                '"INSERT INTO drained_nodes (name, reason, drained_at, '
                "drained_by) VALUES (?, ?, ?, 'discovery') ON CONFLICT (name) DO "
                'NOTHING"',
                '"INSERT INTO drained_nodes (name, reason, drained_at, '
                "drained_by) VALUES (?, ?, ?, 'discovery') ON CONFLICT (name) DO "
                "UPDATE SET drained_by = 'discovery'\"",
            ),
        ),
        STORE,
    ),
    Mutant(
        "a person's drain of a node that left is taken for discovery's",
        (
            Edit(
                "ugro.kernel.store.database",
                "Store.drain",
                '"INSERT INTO drained_nodes (name, reason, drained_at, '
                "drained_by) VALUES (?, ?, ?, 'person') ON CONFLICT (name) DO "
                "UPDATE SET reason = excluded.reason, drained_at = "
                'excluded.drained_at, drained_by = excluded.drained_by"',
                '"INSERT INTO drained_nodes (name, reason, drained_at, '
                "drained_by) VALUES (?, ?, ?, 'person') ON CONFLICT (name) DO "
                "UPDATE SET reason = excluded.reason, drained_at = "
                'excluded.drained_at, drained_by = drained_by"',
            ),
        ),
        STORE,
    ),
    Mutant(
        "a registry that is down drains its nodes",
        (
            Edit(
                _RULES,
                "why_gone",
                "member.name in now.candidates or set(sources) & set(now.unsure)",
                "member.name in now.candidates",
            ),
        ),
        RULES,
    ),
    Mutant(
        "a node that sleeps leaves because it is not listed",
        (
            Edit(
                _RULES,
                "why_gone",
                "member.name not in now.sleeping and now.absent_s.get(member.name, 0.0) >= now.leave_after_s",
                "now.absent_s.get(member.name, 0.0) >= now.leave_after_s",
            ),
        ),
        RULES,
    ),
    Mutant(
        "discovery does not know which nodes sleep",
        (Edit("ugro.kernel.agent.wiring", "_view", "sleepers.is_sleeping", "lambda name: False"),),
        ("tests/integration/nodes/test_discovery.py", "-k", "is_suspended"),
    ),
    Mutant(
        "a machine without a network takes all others to be gone",
        (Edit("ugro.features.discovery.sources", "_addresses", "not found", "False"),),
        ("tests/integration/nodes/test_discovery_sources.py", "-k", "in_no_network"),
    ),
    Mutant(
        "a node that answers and has a job is dialled at another address",
        (Edit(_RULES, "_stays", "listed.reach != member.candidate.reach and is_held", "False"),),
        RULES,
    ),
    Mutant(
        "nodes leave while it is not certain which jobs run",
        (Edit(_RULES, "_step", "if not now.may_leave:\n    return None", ""),),
        RULES,
    ),
    Mutant(
        "a registry chooses the account",
        (
            Edit(
                _CANDIDATES,
                "_user",
                "source.may_name_users and offer.user not in (None, '')",
                "offer.user not in (None, '')",
            ),
        ),
        CANDIDATES,
    ),
    Mutant(
        "an address may be an option of ssh",
        (Edit(_CANDIDATES, "_candidate", "HOST.parse", "str"),),
        CANDIDATES,
    ),
    Mutant(
        "a program that finds machines needs no allowance",
        (
            Edit(
                "ugro.kernel.config.allowance",
                "",
                "{'leave_after', 'interval', 'timeout'}",
                "{'leave_after', 'interval', 'timeout', 'command'}",
            ),
        ),
        ALLOWED,
    ),
)
