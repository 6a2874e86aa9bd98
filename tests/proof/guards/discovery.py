"""The guards of machines that are found: who joins, who goes, and what their registry may say."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

CIRCLE = ("tests/integration/nodes/test_discovery.py", "-k", "once_its_key")
RULES = ("tests/unit/policy/nodes/test_discovery.py",)
STORE = ("tests/unit/store/test_discovered.py",)
CANDIDATES = ("tests/unit/nodes/discovery/test_candidates.py",)
ALLOWED = ("tests/unit/config/test_discovery.py",)

_RULES = "src/ugro/policy/nodes/discovery.py"
_STORE = "src/ugro/store/discovered.py"
_CANDIDATES = "src/ugro/nodes/discovery/candidates.py"

MUTANTS = (
    Mutant(
        "a program that finds machines gets the agent's environment",
        (Edit("src/ugro/nodes/discovery/command.py", "env=inherited(os.environ)", "env=None"),),
        ("tests/integration/nodes/test_discovery_sources.py", "-k", "environment"),
    ),
    Mutant(
        "a machine joins with a host key that nobody accepted",
        (Edit("src/ugro/nodes/transport.py", "strict = _KNOWN_KEYS_ONLY if spec.found_by else {}", "strict = {}"),),
        CIRCLE,
    ),
    Mutant(
        "a node that left is dropped while a job runs there",
        (Edit(_RULES, "(Act.REMOVE, name) if name not in now.busy else None", "(Act.REMOVE, name)"),),
        RULES,
    ),
    Mutant(
        "a node that left is dropped before the files of its jobs are here",
        (Edit("src/ugro/agent/discovery/service.py", " | self.uncollected(await self._store.unkept())", ""),),
        ("tests/integration/nodes/test_discovery.py", "-k", "only_after_the_files"),
    ),
    Mutant(
        "the record of a node is removed while a job holds something there",
        (Edit(_STORE, "SELECT 1 FROM held_devices WHERE node = ?", "SELECT 1 FROM held_devices WHERE node = ? AND 0"),),
        STORE,
    ),
    Mutant(
        "a job can start on a node that was removed a moment ago",
        (Edit(_STORE, '"node-removed", "no job uses it any more")', '"", str(db.execute(_UNDRAIN, (name,))))'),),
        STORE,
    ),
    Mutant(
        "a person's drain is undone when the node is back",
        (Edit(_STORE, "WHERE name = ? AND drained_by = 'discovery'\"", "WHERE name = ?\""),),
        STORE,
    ),
    Mutant(
        "discovery's drain replaces a person's",
        (Edit(_STORE, "ON CONFLICT (name) DO NOTHING", "ON CONFLICT (name) DO UPDATE SET drained_by = 'discovery'"),),
        STORE,
    ),
    Mutant(
        "a person's drain of a node that left is taken for discovery's",
        (Edit("src/ugro/store/database.py", '"drained_by = excluded.drained_by"', '"drained_by = drained_by"'),),
        STORE,
    ),
    Mutant(
        "a registry that is down drains its nodes",
        (Edit(_RULES, " or set(sources) & set(now.unsure):", ":"),),
        RULES,
    ),
    Mutant(
        "a node that sleeps leaves because it is not listed",
        (Edit(_RULES, "is_missed = member.name not in now.sleeping and ", "is_missed = "),),
        RULES,
    ),
    Mutant(
        "discovery does not know which nodes sleep",
        (Edit("src/ugro/agent/wiring.py", "    base.discovery.is_sleeping = power.is_sleeping\n", ""),),
        ("tests/integration/nodes/test_discovery.py", "-k", "is_suspended"),
    ),
    Mutant(
        "a machine without a network takes all others to be gone",
        (Edit("src/ugro/nodes/discovery/mdns.py", "    if not found:\n", "    if False:\n"),),
        ("tests/integration/nodes/test_discovery_sources.py", "-k", "in_no_network"),
    ),
    Mutant(
        "a node that answers and has a job is dialled at another address",
        (Edit(_RULES, "if listed.reach != member.candidate.reach and is_held:", "if False:"),),
        RULES,
    ),
    Mutant(
        "nodes leave while it is not certain which jobs run",
        (Edit(_RULES, "    if not now.may_leave:\n        return None\n", ""),),
        RULES,
    ),
    Mutant(
        "a registry chooses the account",
        (Edit(_CANDIDATES, "if source.may_name_users and offer.user", "if offer.user"),),
        CANDIDATES,
    ),
    Mutant(
        "an address may be an option of ssh",
        (Edit(_CANDIDATES, "else HOST.parse(offer.host)", "else str(offer.host)"),),
        CANDIDATES,
    ),
    Mutant(
        "a program that finds machines needs no allowance",
        (
            Edit(
                "src/ugro/config/allowance.py",
                'frozenset({"leave_after", "interval", "timeout"})',
                'frozenset({"leave_after", "interval", "timeout", "command"})',
            ),
        ),
        ALLOWED,
    ),
)
