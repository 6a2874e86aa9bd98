"""What the guide to environments prints can be used as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ugro.kernel.config.load import parse_config
from ugro.kernel.jobs.config.file import parse_job

_ROOT = Path(__file__).parents[3]
_GUIDE = (_ROOT / "docs" / "environments.md").read_text()
_BLOCKS = re.findall(r"^```yaml\n(.*?)^```", _GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", _BLOCKS)
def test_every_example_of_the_guide_is_a_valid_job_or_cluster_file(text: str) -> None:
    if text.startswith("# cluster.yaml"):
        parse_config(f"{text}nodes: [gpu1]\n", Path("cluster.yaml"), {})
        return
    job = text if "script:" in text else f"script: train.py\n{text}"
    draft = parse_job(job, Path("job.yaml"), fields={})
    assert draft.section.environment.names_packages


def test_the_example_file_asks_for_an_environment() -> None:
    file = _ROOT / "examples" / "job.yaml"
    draft = parse_job(file.read_text(), file, fields={})
    assert (file.parent / str(draft.section.script)).is_file()
    assert draft.section.environment.packages
