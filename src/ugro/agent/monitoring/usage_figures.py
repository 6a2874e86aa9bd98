"""What users have used, for Prometheus. Users who used little are one series: names are without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ugro.agent.monitoring.usage import sums
from ugro.policy.quotas.report import Tally
from ugro.telemetry.prometheus import Family

MOST_USERS = 200
OTHERS = "(others)"

_COUNTERS: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("ugro_usage_gpu_seconds_total", "GPU-seconds that a user's jobs held.", lambda one: one.gpu_s),
    (
        "ugro_usage_cpu_seconds_total",
        "Core-seconds that a user's jobs held on nodes where they had no GPU.",
        lambda one: one.cpu_s,
    ),
    ("ugro_usage_energy_joules_total", "What a user's jobs used, where it is measured.", lambda one: one.joules),
    ("ugro_usage_jobs_total", "Jobs of a user that were started.", lambda one: one.jobs),
)


def of_usage(tallies: Mapping[str, Tally]) -> Iterator[Family]:
    shown = _bounded(tallies)
    for name, words, value in _COUNTERS:
        family = Family(name, "counter", words)
        for user, tally in shown.items():
            family.add(value(tally), user=user)
        yield family


def _bounded(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    if len(tallies) <= MOST_USERS:
        return dict(sorted(tallies.items()))
    order = sorted(tallies, key=lambda user: (-tallies[user].gpu_s, -tallies[user].cpu_s, user))
    first = {user: tallies[user] for user in sorted(order[: MOST_USERS - 1])}
    return {**first, OTHERS: sums(tallies[user] for user in order[MOST_USERS - 1 :])}
