"""Who reads the wall clock or the times of files, and why that is right there.

Somebody may set the clock at any time. Durations, deadlines and orders come from the clock of the boot
(``core/support/clock.py``, ``remote/clock.py``), from ``time.monotonic`` or from a sequence of our own.
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
    "agent/agent.py": SHOWN,
    "agent/api/audit_trail.py": SHOWN,
    "agent/api/result_files.py": "the time of a file that is copied",
    "agent/artifacts/collector.py": "the time beside a log, shown",
    "agent/artifacts/log_index.py": "the time beside a log, shown",
    "agent/artifacts/result_files.py": "the time of a file in an archive",
    "agent/code/scanner.py": IDENTITY,
    "agent/code/snapshot_store.py": IDENTITY,
    "agent/code/stat_cache.py": "whether a file changed just before it was read: by the clock that stamps files",
    "agent/discovery/watch.py": SHOWN,
    "agent/hardware/service.py": SHOWN,
    "agent/jobs/forecasts.py": SHOWN,
    "agent/jobs/results.py": IDENTITY,
    "agent/monitoring/headlines.py": "compared with times of metrics, by the node's clock and its offset",
    "agent/monitoring/monitor.py": "times of points and of notices, which are moved when the clock is set",
    "agent/monitoring/prometheus.py": SHOWN,
    "agent/monitoring/service.py": "which part of a curve is shown",
    "agent/ops/backups.py": "when the next backup is due after a restart, and ages, only while the clock is believed",
    "agent/ops/tokens.py": "a token ends at a date",
    "agent/planning/service.py": SHOWN,
    "agent/ray_cluster/service.py": SHOWN,
    "agent/ray_cluster/starting.py": SHOWN,
    "agent/recovery.py": "the name of a file",
    "agent/relocation.py": "the name of a file",
    "agent/safe_mode/journal.py": "the name of a file",
    "agent/safe_mode/control.py": SHOWN,
    "agent/support/loop_watch.py": SHOWN,
    "agent/tracking/cluster.py": IDENTITY,
    "agent/tracking/health.py": SHOWN,
    "cli/alerts.py": SHOWN,
    "cli/health.py": SHOWN,
    "cli/jobs/moment.py": "compared with the times beside logs",
    "client/pulling.py": "keeps the time of a file",
    "cli/token.py": SHOWN,
    "client/usage.py": "which part of the past is shown",
    "config/allowance.py": SHOWN,
    "core/support/clock.py": SELF,
    "inference/api/replies.py": SHOWN,
    "inference/service.py": SHOWN,
    "nodes/keepalive.py": SELF,
    "nodes/node.py": SHOWN,
    "remote/cas/gc.py": "least recently used; code that goes too early is sent again",
    "remote/cas/packs.py": "least recently used",
    "remote/checks/modules.py": IDENTITY,
    "remote/clock.py": SELF,
    "remote/folders/place.py": IDENTITY,
    "remote/folders/receiving.py": IDENTITY,
    "remote/folders/tidy.py": "least recently used; a folder that goes too early is sent again",
    "remote/files/api.py": "sent with the times of files, which the same clock stamps",
    "remote/files/checkpoint_dir.py": "a folder of the user, by the clock that stamps its files",
    "remote/files/checkpoint_order.py": IDENTITY,
    "remote/files/listing.py": IDENTITY,
    "remote/files/resumable.py": "whether a file changed just now: by the clock that stamps files",
    "remote/files/workdir.py": "compared with changes of files, by the clock that stamps them",
    "remote/hardware/gpu_locks.py": SHOWN,
    "remote/hardware/probe.py": SELF,
    "remote/home.py": "leftovers of transfers on a node; one that goes too early is sent again",
    "remote/presence/terminals.py": "when a terminal was last used, at the first look: by the clock that stamps it",
    "remote/process/cgroup.py": "empty control groups that are left; one that is in use cannot be removed",
    "remote/program.py": SELF,
    "remote/python_env/build.py": SHOWN,
    "remote/python_env/place.py": "times that are shown, and least recently used; what goes too early is made again",
    "remote/python_env/tidy.py": "least recently used; none that a run uses goes",
    "remote/runs/meter.py": "compared with the times of epochs, unless it was set meanwhile",
    "remote/runs/ranks.py": SHOWN,
    "remote/runs/run_state.py": SHOWN,
    "remote/runs/stop.py": SHOWN,
    "store/backup.py": SHOWN,
    "store/code.py": "which code a node got last: only makes the next transfer smaller",
    "store/database.py": SHOWN,
    "store/notes.py": SHOWN,
    "telemetry/collector.py": "the time of points that have none",
    "telemetry/metricstore.py": "the name of a file",
    "train/metrics.py": SHOWN,
    "train/trace.py": IDENTITY,
    "web/access.py": "the end of a session after weeks",
    "web/app.py": "the end of a session after weeks",
    "web/formatting.py": SHOWN,
    "web/live.py": SHOWN,
    "web/pages/experiments.py": SHOWN,
    "web/pages/usage.py": "which part of the past is shown",
    "web/site.py": SHOWN,
    "web/views/overview.py": SHOWN,
    "workloads/door/haproxy.py": SHOWN,
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
    assert unexplained == [], "use core/support/clock.py for durations, or say here why the wall clock is right"
    assert outdated == [], "these no longer read it"
