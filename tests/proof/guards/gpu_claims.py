"""Guards of claims on GPUs, which keep accounts of one machine apart."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

_TESTS = "tests/integration/runs/test_gpu_claims.py"
_GPU_CLAIMS = "ugro.node.hardware.gpu_claims"

MUTANTS = (
    Mutant(
        "a GPU that another account has is taken",
        (Edit(_GPU_CLAIMS, "_listen", "raise Taken(name) from error", "return None"),),
        (_TESTS, "-k", "one_account_has"),
    ),
    Mutant(
        "a GPU that another account shares is taken",
        (Edit(_GPU_CLAIMS, "held", "set(range(MOST_SHARES)).difference(own_seats)", "()"),),
        (_TESTS, "-k", "do_not_share"),
    ),
    Mutant(
        "whoever has the pid of a holder that is gone passes for its job",
        (Edit(_GPU_CLAIMS, "ClaimTable.run_above", "record is not None and uid in _uids(one)", "record is not None"),),
        (_TESTS, "-k", "covers_no_process"),
    ),
    Mutant(
        "what is said without a claim takes a GPU",
        (Edit(_GPU_CLAIMS, "ClaimTable.look", "self._known.get(one) or listener(one[1].decode())", "Listener(1, 0)"),),
        (_TESTS, "-k", "forged"),
    ),
    Mutant(
        "a GPU is free for other accounts while ranks of a killed supervisor use it",
        (Edit("ugro.node.hardware.gpu_locks", "GpuLocks.take", "self._claims.hand_over()", "pass"),),
        ("tests/integration/runs/test_gpu_locks.py", "-k", "see_the_gpu_as_taken"),
    ),
)
