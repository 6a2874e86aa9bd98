"""The guards of the node program and its folders, and of limits."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

TRUST = ("tests/integration/nodes/test_trust.py", "tests/unit/remote/test_trust.py")

_BOOTSTRAP = "src/ugro/nodes/bootstrap.py"
_TRUST = "src/ugro/remote/trust.py"
_LOADER = "src/ugro/remote/loader.py"

LIMITS = ("tests/integration/runs/test_limits.py", "tests/unit/remote/test_cgroup.py")
_LIMITS = "src/ugro/remote/runs/limits.py"
_RANKS = "src/ugro/remote/runs/ranks.py"

_SLOWLY = "\n            self.start("
_INSTALL = '    names["install"](data)'
_BESIDE = '    sys.path.insert(0, os.path.join(root, ".ugro", "program"))'

MUTANTS = (
    Mutant(
        "the hash of the kept program is not compared",
        (Edit(_BOOTSTRAP, 'return data if is_whole(data) else b""', "return data"),),
        TRUST,
    ),
    Mutant(
        "a module beside the program is found first",
        (
            Edit(_LOADER, "sys.meta_path.insert(0, Modules(", "sys.meta_path.insert(99, Modules("),
            Edit(_BOOTSTRAP, _INSTALL, f"{_BESIDE}\n{_INSTALL}"),
        ),
        TRUST,
    ),
    Mutant(
        "what is in UGRO's folder is not looked at",
        (Edit(_TRUST, "for path in _entries(home):", "for path in ():"),),
        TRUST,
    ),
    Mutant(
        "the folders above are not looked at",
        (Edit(_TRUST, "    fault = fault_above(found, account, _has_acl(path, found))", "    fault = None"),),
        TRUST,
    ),
    Mutant(
        "the mode of folders is not looked at",
        (Edit(_TRUST, "    if found.st_mode & _OTHERS_WRITE:", "    if False:"),),
        TRUST,
    ),
    Mutant(
        "the owner of folders above is not looked at",
        (Edit(_TRUST, "if found.st_uid != account.uid and found.st_uid not in account.roots:", "if False:"),),
        TRUST,
    ),
    Mutant(
        "a link in the place of UGRO's folder is followed",
        (Edit(_TRUST, '        return "link"', "        return None"),),
        TRUST,
    ),
    Mutant(
        "any group is taken for a private one",
        (Edit(_TRUST, "if found.st_gid != account.private_gid():", "if False:"),),
        TRUST,
    ),
    Mutant(
        "a rank of a limited run does not enter its group",
        (Edit(_LIMITS, "            self._group.enter()\n        if", "            pass\n        if"),),
        LIMITS,
    ),
    Mutant(
        "a rank that is started quickly has no limits",
        (Edit(_RANKS, f"        if self._enter is not None:{_SLOWLY}", f"        if False:{_SLOWLY}"),),
        LIMITS,
    ),
    Mutant(
        "two runs get the same cores",
        (Edit(_LIMITS, "if durable.lock_within(fd, fcntl.LOCK_EX, 0):", "if True:"),),
        LIMITS,
    ),
    Mutant(
        "a group is made and never removed",
        (Edit(_LIMITS, "            group.remove(_REMOVE_S)", "            pass"),),
        LIMITS,
    ),
)  # fmt: skip
