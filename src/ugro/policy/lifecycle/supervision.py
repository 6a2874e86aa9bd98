"""Which runs may share a supervising process on their node."""

from __future__ import annotations

from ugro.core.job import Job, Launcher, OnLost


def shares_supervisor(job: Job) -> bool:
    """A process for each of a thousand small commands would cost more than the commands, so these share one.

    A supervisor of its own is for work that others must not end or outlive: with a shared one all its runs are lost
    when it is killed, and only with one run a supervisor knows exactly whose every process is. So GPUs, which must be
    free when a run is over, leases and checkpoints get one, and so does everything that starts several ranks.
    """
    spec = job.spec
    holds_gpus = job.placement is not None and any(share.gpus for share in job.placement.shares)
    has_lease = spec.disconnect.on_lost is OnLost.RESTART
    return spec.launcher is Launcher.COMMAND and not (holds_gpus or has_lease or spec.has_checkpoints)
