"""The page about job files has every key, option and cause; its examples and the example file are job files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from ugro.kernel.config.document import read_document
from ugro.kernel.config.reference import job_example, job_sections
from ugro.kernel.jobs.config.file import parse_job
from ugro.kernel.jobs.config.options import OPTIONS
from ugro.kernel.jobs.model import Cause, JobSpec

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "jobs.md"


def load(text: str, env: Mapping[str, str] | None = None) -> JobSpec:
    return parse_job(text, Path("job.yaml"), fields={}).spec(env or {}, lambda name: 7)


def test_the_example_file_loads() -> None:
    text = (ROOT / "job.example.yaml").read_text(encoding="utf-8")
    assert load(text).resources.max_nodes == 4
    opened = "".join(line.replace("# ", "", 1) + "\n" for line in text.splitlines() if line.startswith("  # "))
    tree = yaml.safe_load(opened)
    assert set(tree) == {"WANDB_API_KEY", "labels", "any_of"}
    assert len(load(f"script: a.py\nresources: {json.dumps({'any_of': tree['any_of']})}").resources.any_of) == 2


def test_the_page_has_every_key_flag_and_cause() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for _, section in job_sections():
        for key, declared in section.known_keys().items():
            rows = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
            assert any(row.endswith(f"| {declared.meaning} |") for row in rows), key
            assert declared.meaning.endswith("."), key
    for option in OPTIONS.values():
        assert f"`{option.flag}`" in page
    for cause in Cause:
        assert f"| `{cause}` |" in page


def test_every_snippet_of_the_page_loads() -> None:
    snippets = [part.partition("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]]
    assert len(snippets) == 5
    for snippet in snippets:
        assert load(snippet, env={"WANDB_API_KEY": "x"}).argv


def test_the_pages_example_has_every_key() -> None:
    lines = read_document(job_example(), "job.yaml").lines
    keys = {tuple(part for part in path if isinstance(part, str)) for path in lines}
    for path, section in job_sections():
        assert {(*path, key) for key in section.known_keys()} <= keys


def test_a_spec_has_nothing_that_a_job_file_cannot_say() -> None:
    said = load(job_example())
    default = JobSpec(name="job", argv=())
    unsaid = {f.name for f in dataclasses.fields(JobSpec) if getattr(said, f.name) == getattr(default, f.name)}
    with_submit = {"snapshot", "imports", "sdk", "environment", "folders"}  # the last two name files, read then
    of_services = {"avoid"}  # which nodes have other replicas
    of_retries = {"earlier"}  # the job that is submitted again
    assert unsaid == {"disconnect", "stop", *with_submit, *of_services, *of_retries}, "two have their defaults"
