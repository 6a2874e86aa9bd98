"""Who reads the wall clock or the times of files, and why that is right there.

Somebody may set the clock at any time. Durations, deadlines and orders come from the clock of the boot
(``kernel/support/moments.py``, ``node/clock.py``), from ``time.monotonic`` or from a sequence of our own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ugro

ROOT = Path(ugro.__file__).parent
SHOWN = "a time that is shown"
IDENTITY = "whether a file is still the same one, not which is newer"
SELF = "measures this clock"
ALLOWED = {
    "kernel/agent/agent.py": SHOWN,
    "kernel/operations/audit_trail.py": SHOWN,
    "kernel/files/service.py": "the time of a file that is copied",
    "kernel/files/results/collector.py": "the time beside a log, shown",
    "kernel/files/results/log_mirror.py": "the time beside a log, shown",
    "kernel/files/results/output_store.py": "the time of a file in an archive",
    "kernel/files/code/scanner.py": "whether a file changed just before it was read: by the clock that stamps files",
    "kernel/files/code/snapshot_store.py": IDENTITY,
    "features/discovery/candidates.py": SHOWN,
    "features/hardware/service.py": SHOWN,
    "features/planning/forecasts.py": SHOWN,
    "kernel/files/results/service.py": IDENTITY,
    "features/training/service.py": "compared with times of metrics, by the node's clock and its offset",
    "features/alerts/service.py": "times of points and of notices, which are moved when the clock is set",
    "kernel/telemetry/prometheus.py": SHOWN,
    "kernel/telemetry/service.py": "which part of a curve is shown",
    "kernel/agent/backups.py": (
        "when the next backup is due after a restart, and ages, only while the clock is believed; the name of a "
        "file"
    ),
    "kernel/access/service.py": "a token ends at a date",
    "features/planning/service.py": SHOWN,
    "features/ray/service.py": SHOWN,
    "features/ray/starting.py": SHOWN,
    "kernel/store/relocation.py": "the name of a file",
    "features/safe_mode/records.py": "the name of a file",
    "features/safe_mode/service.py": SHOWN,
    "kernel/agent/loop_watch.py": SHOWN,
    "kernel/links/cluster.py": IDENTITY,
    "kernel/links/reports.py": SHOWN,
    "features/alerts/cli.py": SHOWN,
    "cli/health.py": SHOWN,
    "cli/jobs/logs.py": "compared with the times beside logs",
    "client/pulling.py": "keeps the time of a file",
    "cli/access.py": SHOWN,
    "kernel/config/allowance.py": SHOWN,
    "kernel/support/moments.py": SELF,
    "features/services/inference/openai.py": SHOWN,
    "features/services/inference/service.py": SHOWN,
    "kernel/links/link.py": SELF,
    "kernel/links/node.py": SHOWN,
    "node/files/gc.py": "least recently used; code that goes too early is sent again",
    "node/files/packs.py": "least recently used",
    "node/check.py": IDENTITY,
    "node/clock.py": SELF,
    "node/files/folders.py": "least recently used; a folder that goes too early is sent again",
    "node/files/folders_api.py": IDENTITY,
    "node/files/api.py": "sent with the times of files, which the same clock stamps",
    "node/files/checkpoint_dir.py": "a folder of the user, by the clock that stamps its files",
    "node/files/listing.py": IDENTITY,
    "node/files/transfer.py": "whether a file changed just now: by the clock that stamps files",
    "node/files/workdir.py": "compared with changes of files, by the clock that stamps them",
    "node/hardware/gpu_locks.py": SHOWN,
    "node/hardware/probe.py": SELF,
    "node/home.py": "leftovers of transfers on a node; one that goes too early is sent again",
    "features/power/node/presence.py": "when a terminal was last used, at the first look: by the clock that stamps it",
    "node/process/cgroup.py": "empty control groups that are left; one that is in use cannot be removed",
    "node/program.py": SELF,
    "features/environments/node/build.py": SHOWN,
    "features/environments/node/place.py": (
        "times that are shown, and least recently used; what goes too early is made again"
    ),
    "features/environments/node/tidy.py": "least recently used; none that a run uses goes",
    "features/training/on_node.py": "compared with the times of epochs, unless it was set meanwhile",
    "node/runs/ranks.py": SHOWN,
    "node/runs/run_state.py": SHOWN,
    "node/runs/stop.py": SHOWN,
    "kernel/store/backup.py": SHOWN,
    "kernel/store/database.py": "which code a node got last: only makes the next transfer smaller",
    "features/experiments/store.py": SHOWN,
    "kernel/telemetry/collector.py": "the time of points that have none",
    "kernel/telemetry/metricstore.py": "the name of a file",
    "train/reporting.py": SHOWN,
    "train/telemetry.py": IDENTITY,
    "web/access.py": "the end of a session after weeks",
    "web/dashboard.py": "the end of a session after weeks",
    "web/site.py": SHOWN,
    "features/experiments/pages.py": SHOWN,
    "features/quotas/pages.py": "which part of the past is shown",
    "web/pages/overview.py": SHOWN,
    "features/services/node/haproxy.py": SHOWN,
}
_CALLS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
_TIMES_OF_FILES = {"st_mtime", "st_mtime_ns", "getmtime"}
_WORDS = {*_TIMES_OF_FILES, *(attribute for _, attribute in _CALLS if attribute != "time"), "time.time"}


def readers() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in _WORDS):  # most files: parsing takes long
            continue
        if any(map(_reads_the_wall_clock, ast.walk(ast.parse(text)))):
            yield str(path.relative_to(ROOT))


def _reads_the_wall_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    return (owner, node.attr) in _CALLS or node.attr in _TIMES_OF_FILES


def test_nothing_is_decided_by_a_clock_that_can_be_set() -> None:
    found = set(readers())
    unexplained, outdated = sorted(found - ALLOWED.keys()), sorted(ALLOWED.keys() - found)
    assert unexplained == [], "use kernel/support/moments.py for durations, or say here why the wall clock is right"
    assert outdated == [], "these no longer read it"
