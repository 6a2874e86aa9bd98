"""What each route is called in the API's description, and what it answers. Pure; read only when somebody asks for it.

The one table of it, with the same routes as ``access_rules``. A test holds real answers against the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any, NotRequired

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import TypedDict

from ugro.features.alerts.model import Alert, Tried
from ugro.features.alerts.service import Watched
from ugro.features.discovery.model import Discovered
from ugro.features.experiments.model import Note
from ugro.features.experiments.rules.comparison import Row
from ugro.features.safe_mode.model import Reconciliation
from ugro.features.services.model import ServiceReport
from ugro.features.sweeps.model import Importance, SweepPlan, SweepReport
from ugro.features.training.model import Headline, JobEnergy, TraceFile
from ugro.kernel.access.model import AuditEntry
from ugro.kernel.agent.model import AgentStatus, ClusterFacts, DashboardLink, Event, Finding
from ugro.kernel.files.model import JobResults, SyncTotals, Tidied
from ugro.kernel.jobs.model import Attempt, Job
from ugro.kernel.jobs.records import DryRun
from ugro.kernel.jobs.scheduling.why import Why
from ugro.kernel.links.model import HostKey, NodeReport
from ugro.kernel.links.rules import Choice
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import Needs, Raw, Request, operation_name
from ugro.kernel.telemetry.curves import KeySummary
from ugro.kernel.telemetry.records import AttemptSteps

JSON = "application/json"
LINES = "application/x-ndjson"  # one JSON document per line
FRAMES = "application/vnd.ugro.frames"  # of ``node/wire.py``
TEXT = "text/plain"
Shape = Any  # a type; or names with types, for a document that has no class of its own


@dataclass(frozen=True, slots=True)
class Answer:
    """Without shapes: JSON that is not described, because only the commands of UGRO use it."""

    name: str  # of the operation; clients that are generated have it as a function
    shapes: tuple[Shape, ...] = ()  # the document is one of these; in a stream, each line is
    media: str = JSON


def _json(name: str, *shapes: Shape) -> Answer:
    return Answer(name, shapes)


def _lines(name: str, *shapes: Shape) -> Answer:
    return Answer(name, shapes, LINES)


class Change(TypedDict):
    """What happened, or which nodes and metrics have changed."""

    cursor: int  # the number of the last event before
    event: NotRequired[Event]
    nodes: NotRequired[list[NodeReport]]
    gone_nodes: NotRequired[list[str]]
    metrics: NotRequired[list[int]]  # jobs


class CurveColumns(TypedDict):
    """A metric of a rank in bins of steps, as columns of equal length: those that were asked for, or all."""

    owner: str
    attempt: int
    rank: int
    key: str
    count: int
    width: int
    steps: NotRequired[list[int]]
    times: NotRequired[list[float]]
    lows: NotRequired[list[float | None]]
    highs: NotRequired[list[float | None]]
    means: NotRequired[list[float | None]]
    counts: NotRequired[list[int]]
    odd: NotRequired[list[int]]


class FileEntry(TypedDict):
    """A file of a job's results."""

    name: str  # quoted as in a URL
    bytes: int
    mode: int
    modified_ns: int


_JOB_RESULTS = {"job": Job, "results": JobResults}
_SERVICE = {"service": ServiceReport}
_SWEEP = {"sweep": SweepReport}
_CURVES = {"curves": list[CurveColumns]}

def _declared(kind: type[Request[Any]]) -> Answer:
    operation, name = kind.operation, operation_name(kind)
    if operation.line is not None:
        return Answer(name, (operation.line,), LINES)
    return Answer(name, () if operation.answer in (None, Raw) else (operation.answer,), operation.media)


ANSWERS: Mapping[str, Answer] = {
    **{kind.operation.route: _declared(kind) for kind in requests()},
    "GET /v1/agent": _json("get_agent_status", AgentStatus),
    "GET /v1/openapi.json": _json("get_description"),
    "POST /v1/agent/stop": _json("stop_agent"),
    "GET /v1/agent/reconcile": _json("preview_reconciliation", Reconciliation),
    "POST /v1/agent/reconcile": _json("reconcile_agent", Reconciliation),
    "POST /v1/dashboard": _json("create_dashboard_link", DashboardLink),
    "GET /v1/audit": _json("list_audit_entries", {"audit": list[AuditEntry]}),
    # Configuration.
    "PUT /v1/cluster": _json("use_cluster_file"),
    "GET /v1/cluster/file": _json("read_cluster_file", ClusterFacts),
    "PUT /v1/cluster/file": _json("write_cluster_file"),
    "POST /v1/cluster/reload": _json("reload_cluster_file"),
    # Nodes.
    "GET /v1/health": _lines("check_health", NodeReport),
    "GET /v1/best": _json("choose_best_node", Choice),
    "GET /v1/nodes": _json("list_nodes", {"nodes": list[NodeReport], "watched": list[Watched]}),
    "POST /v1/nodes": _json("add_node"),
    "DELETE /v1/nodes/{name:path}": _json("remove_node"),
    "POST /v1/nodes/{name:path}/drain": _json("drain_node"),
    "POST /v1/nodes/{name:path}/resume": _json("resume_node"),
    "POST /v1/nodes/{name:path}/sleep": _json("suspend_node"),
    "POST /v1/nodes/{name:path}/wake": _json("wake_node"),
    "GET /v1/nodes/{name:path}/history": _json("get_node_history", _CURVES),
    "GET /v1/nodes/{name:path}/hostkey": _json("get_host_key", HostKey),
    "POST /v1/nodes/{name:path}/hostkey": _json("trust_host_key", HostKey),
    "GET /v1/doctor": _lines("diagnose", Finding),
    "POST /v1/examine": _lines("examine_hosts"),
    "GET /v1/ssh-hosts": _json("list_ssh_hosts", list[str]),
    "GET /v1/discovery": _json("list_discovered_machines", Discovered),
    "GET /v1/discovery/reports": _lines("report_discovered_machines"),
    "POST /v1/exec": Answer("run_command", media=FRAMES),
    "DELETE /v1/exec/{key}": _json("end_command"),
    "POST /v1/tunnel": Answer("open_tunnel", media="application/octet-stream"),
    # Code and environments on nodes.
    "GET /v1/sync": _json("get_sync_totals", SyncTotals),
    "POST /v1/sync": _lines("sync_code"),
    "POST /v1/tidy": _json("remove_unused_code", {"tidied": list[Tidied]}),
    # Files of clients on other machines.
    "POST /v1/remote/items": _json("offer_files"),
    "POST /v1/remote/known": _json("find_known_tree"),
    "POST /v1/remote/missing": _json("find_missing_contents"),
    "POST /v1/remote/trees": _json("upload_contents"),
    # Jobs.
    "GET /v1/jobs": _json("list_jobs", {"jobs": list[Job]}),
    "POST /v1/jobs": _json("submit_job", {"job": Job}, Needs),
    "POST /v1/jobs/batch": _json("submit_jobs", {"jobs": list[Job]}),
    "POST /v1/jobs/plan": _json("plan_job", {"dry_run": DryRun}, Needs),
    "POST /v1/plans": _lines("plan_training"),
    "POST /v1/folders": _lines("read_folders"),
    "POST /v1/recipes/launch": _json("prepare_recipe"),
    "DELETE /v1/submissions/{key}": _json("withdraw_submission", {"job": Job | None}),
    "GET /v1/jobs/{word}": _json("get_job", {"job": Job, "attempts": list[Attempt]}),
    "GET /v1/jobs/{word}/file": _json("get_job_file", {"file": str}),
    "GET /v1/jobs/{word}/why": _json("explain_job", Why),
    "GET /v1/jobs/{word}/wait": _lines("wait_for_job", Job),
    "GET /v1/jobs/{word}/log": Answer("read_job_log", (str,), TEXT),
    "GET /v1/jobs/{word}/logs": Answer("stream_job_logs", media=FRAMES),
    "GET /v1/jobs/{word}/results": _json("get_job_results", _JOB_RESULTS),
    "GET /v1/jobs/{word}/results/brief": _json("get_brief_job_results", {"results": JobResults}),
    "GET /v1/jobs/{word}/results/files": _lines("list_result_files", FileEntry),
    "POST /v1/jobs/{word}/results/content": Answer("read_result_files", media=FRAMES),
    "GET /v1/jobs/{word}/notes": _json("get_job_note", {"note": Note}),
    "GET /v1/jobs/{word}/profile": _json("get_job_profile"),
    "GET /v1/jobs/{word}/steps": _json("get_job_steps", {"job": Job, "attempts": list[AttemptSteps]}),
    "GET /v1/jobs/{word}/traces": _json("list_job_traces", {"job": Job, "traces": list[TraceFile]}),
    "GET /v1/jobs/{word}/headline": _json("get_job_headline", {"headline": Headline}),
    "GET /v1/jobs/{word}/energy": _json("get_job_energy", {"energy": JobEnergy | None}),
    "POST /v1/jobs/{word}/cancel": _json("cancel_job", Job),
    "POST /v1/jobs/{word}/retry": _json("retry_job", Job),
    "PUT /v1/jobs/{word}/notes": _json("change_job_note", {"note": Note}),
    "DELETE /v1/jobs/{word}/results": _json("delete_job_results", {"job": Job, "problems": list[str]}),
    "POST /v1/jobs/{word}/results/fetch": _json("fetch_job_results", _JOB_RESULTS),
    "POST /v1/jobs/{word}/trace": _json("trace_job"),
    "GET /v1/headlines": _json("list_headlines", {"headlines": list[Headline]}),
    "GET /v1/advice": _json("get_advice", {"note": str | None}),
    "GET /v1/compare": _json("compare_jobs", {"jobs": list[Job], "rows": list[Row]}),
    "GET /v1/events": _lines("list_events", Event),
    "GET /v1/changes": _lines("follow_changes", Change),
    "GET /v1/metrics": _json("get_metrics", _CURVES),
    "GET /v1/metrics/keys": _json(
        "list_metric_keys", {"keys": list[KeySummary], "names": list[str], "loss": str | None}
    ),
    "GET /metrics": Answer("get_prometheus_metrics", (str,), TEXT),
    # Sweeps.
    "GET /v1/sweeps": _json("list_sweeps", {"sweeps": list[SweepReport]}),
    "POST /v1/sweeps": _json("create_sweep", _SWEEP, Needs),
    "POST /v1/sweeps/plan": _json("plan_sweep", {"plan": SweepPlan}, Needs),
    "GET /v1/sweeps/{word}": _json("get_sweep", _SWEEP),
    "GET /v1/sweeps/{word}/document": _json("get_sweep_document", {"document": dict[str, Any]}),
    "GET /v1/sweeps/{word}/watch": _lines("watch_sweep", SweepReport),
    "GET /v1/sweeps/{word}/importance": _json("get_importance", {"importance": list[Importance]}),
    "POST /v1/sweeps/{word}/stop": _json("stop_sweep", _SWEEP),
    "POST /v1/sweeps/{word}/resume": _json("resume_sweep", _SWEEP),
    "POST /v1/sweeps/{word}/launch": _json("launch_best_of_sweep", {"job": Job}),
    # Services.
    "POST /v1/services": _json("create_service", _SERVICE, Needs),
    "POST /v1/services/{name}/update": _json("update_service", _SERVICE, Needs),
    # Ray clusters.
    # Notifications.
    "GET /v1/alerts": _json("list_alerts", {"alerts": list[Alert], "events": list[Event]}),
    "POST /v1/alerts/test": _json("test_channels", {"channels": list[Tried]}),
}


# --- answer schemas ---------------------------------------------------------------------------------------------------
# JSON schemas of what routes answer, made from the classes that the agent writes and the client reads.


Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    shapes: Mapping[str, tuple[Schema, ...]]  # by the names of operations
    components: Mapping[str, Schema]


class _AsWritten(GenerateJsonSchema):
    """As ``kernel/support/codec.py`` writes: every field of a dataclass is there, whether it has a default or not."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field.get("required", total)) if field["type"] == "typed-dict-field" else True

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would only repeat the field's name

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def schemas_of(answers: Iterable[Answer]) -> AnswerSchemas:
    kinds = [
        (f"{answer.name}_{number}", _kind(answer.name, shape))
        for answer in answers
        for number, shape in enumerate(answer.shapes)
    ]
    # In one: a class that many of them have is read once.
    all_kinds: TypeAdapter[Any] = TypeAdapter(make_dataclass("Answers", kinds))
    found = all_kinds.json_schema(mode="serialization", schema_generator=_AsWritten, ref_template=REFERENCE)
    names = short_names(found["$defs"])
    shapes: dict[str, tuple[Schema, ...]] = {}
    for key, schema in renamed(found["properties"], names).items():  # in order
        name = key.rpartition("_")[0]
        shapes[name] = (*shapes.get(name, ()), schema)
    return AnswerSchemas(shapes, {names[name]: renamed(one, names) for name, one in found["$defs"].items()})


def renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """With references to components by their new names."""
    if isinstance(schema, list):
        return [renamed(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: renamed(one, names) for key, one in schema.items()}
    if isinstance(reference := found.get("$ref"), str):
        prefix, _, name = reference.rpartition("/")
        found["$ref"] = f"{prefix}/{names.get(name, name)}"
    return found


def _kind(name: str, shape: Shape) -> Any:
    return make_dataclass(f"{camel(name)}Answer", list(shape.items())) if isinstance(shape, Mapping) else shape


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns ``LinksRole`` for ``ugro__kernel__links__model__Role``: pydantic names classes of one name by modules."""
    found = {name: _short(name) for name in names}
    assert len(set(found.values())) == len(found), f"two classes would have one name: {sorted(found)}"
    return found


def _short(name: str) -> str:
    *places, last = name.split("__")
    where = [place for place in places if place not in ("model", "api")]
    return camel(where[-1]) + last if where else last
