"""The part ``elastic`` of a job file: whether a training goes on when some of its ranks are lost."""

from __future__ import annotations

from ugro.config.kinds import DAY_S, Duration, Whole
from ugro.config.section import Section, key, section
from ugro.core import job

_MOST_RANKS = 4096


@section
class ElasticSection(Section):
    """When a rank dies or its node is lost, the others go on without it. The script must use `ugro.train`."""

    makes = job.Elastic

    min_ranks: int | None = key(
        None,
        Whole(1, _MOST_RANKS),
        "Go on as long as so many ranks are left. With fewer, the job fails, and is retried from its last checkpoint. "
        "Null means that all ranks are needed.",
        example=1,
    )
    timeout: float = key(
        job.Elastic().timeout_s,
        Duration(DAY_S),
        "How long a rank may keep the others waiting before they go on without it. It must be longer than anything "
        "that one rank does alone, such as writing a checkpoint.",
        option="rank_timeout",
        to="timeout_s",
    )
    rejoins: int = key(
        job.Elastic().rejoins,
        Whole(0, 1000),
        "How often a lost rank is started again, to join the others.",
        example=0,
    )
