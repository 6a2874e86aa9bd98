"""A submission under way: after Ctrl-C the job is withdrawn, unless it is recorded already."""

from __future__ import annotations

from dataclasses import dataclass, field

from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.client.jobs import new_key
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.operations import WithdrawSubmission
from ugro.kernel.support.errors import Interrupted, UgroError

_WITHDRAW_S = 10.0


@dataclass(slots=True)
class Submitting:
    output: Output
    key: str = field(default_factory=new_key)
    client: Client | None = None  # None: nothing has been sent
    job: Job | None = None  # None: no answer has been read

    def interrupted(self) -> Interrupted:
        """What became of it. Another Ctrl-C ends the wait for the agent's answer."""
        try:
            job = self.job or self._withdraw()
        except (UgroError, KeyboardInterrupt):
            return Interrupted("interrupted: not known whether the job was submitted", hint="look: ugro status last")
        if job is None:
            return Interrupted("interrupted: the job was not submitted")
        return Interrupted(
            f"interrupted after job {job.id} {job.spec.name} was submitted: it continues",
            hint=f"see: ugro logs {job.id} -f; stop it: ugro cancel {job.id}",
        )

    def _withdraw(self) -> Job | None:
        if self.client is None:
            return None
        self.output.note("withdrawing the job")
        return self.client.ask(WithdrawSubmission(self.key), timeout_s=_WITHDRAW_S).job
