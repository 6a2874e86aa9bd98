"""``environment`` in job and cluster files: what it becomes, what is wrong in it, and what nobody gets to see."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ugro.cli.jobs.document import job_document
from ugro.features.environments.config import variables_in
from ugro.features.environments.model import EnvRequest, Whose
from ugro.features.environments.service.reading import environment_of, refuse_files, with_old_passwords, with_variables
from ugro.kernel.config.allowance import Effects
from ugro.kernel.config.load import parse_config
from ugro.kernel.files.results.job_folder import write_config
from ugro.kernel.jobs.config.file import edited_job, job_file, parse_job
from ugro.kernel.jobs.config.options import Given
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.kernel.support.errors import ConfigError
from ugro.web.pages.settings import groups

SECRET = "hunter2"
CLUSTER = "nodes: [n1]\n"
owners = partial(EnvRequest, whose=Whose.OWNER)


def request(text: str, folder: Path, cluster: str = CLUSTER, **fields: object) -> EnvRequest | None:
    draft = parse_job(f"command: [ls]\n{text}", folder / "job.yaml", fields=fields)
    return environment_of(draft, folder, parse_config(cluster, folder / "cluster.yaml", {}))


def refusal(text: str, folder: Path, cluster: str = CLUSTER, **fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        request(text, folder, cluster, **fields)
    return f"{caught.value}\n{caught.value.hint}"


def test_a_job_that_names_an_index_uses_it_although_the_cluster_file_has_none(tmp_path: Path) -> None:
    cluster = CLUSTER + "environment: {packages: [a], find_links: [/srv/wheels], no_index: true}\n"
    own = request("environment: {packages: [b], index_url: 'https://host/simple'}\n", tmp_path, cluster)
    assert own is not None
    assert (own.no_index, own.find_links) == (False, ("/srv/wheels",))
    same = request("environment: {packages: [b]}\n", tmp_path, cluster)
    assert same is not None
    assert same.no_index


def test_no_environment_is_none(tmp_path: Path) -> None:
    assert request("", tmp_path) is None


def test_a_requirements_file_is_read_when_the_job_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n-r more/base.txt\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("numpy\n")
    text = 'environment: {python: "3.11", requirements: requirements.txt, packages: [pyyaml]}\n'
    found = request(text, tmp_path)
    assert found == owners(python="3.11", requirements=("torch==2.13.0", "numpy", "pyyaml"))


def test_options_add_to_the_file_and_start_where_the_user_is(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("numpy\n")
    assert request("workdir: /elsewhere\n", tmp_path, requirements="r.txt") == owners(requirements=("numpy",))
    assert request("", tmp_path, package=["numpy", "torch"]) == owners(requirements=("numpy", "torch"))


def test_the_cluster_file_has_the_default_and_the_sources(tmp_path: Path) -> None:
    cluster = f"{CLUSTER}environment: {{packages: [numpy], index_url: https://i/simple, find_links: [wheels]}}\n"
    links = (str(tmp_path / "wheels"),)
    assert request("", tmp_path, cluster) == owners(
        requirements=("numpy",), index_url="https://i/simple", find_links=links
    )
    own = request("environment: {packages: [torch], find_links: [w]}\n", tmp_path, cluster)
    assert own == owners(
        requirements=("torch",), index_url="https://i/simple", find_links=(str(tmp_path / "w"),)
    )
    assert request("environment: {enabled: false}\n", tmp_path, cluster) is None
    assert request("", tmp_path, cluster, environment=False) is None
    assert request("environment: {existing: ~/venv}\n", tmp_path, cluster) == owners(existing="~/venv")


def test_a_job_undoes_what_the_cluster_file_says_of_sources(tmp_path: Path) -> None:
    cluster = f"{CLUSTER}environment: {{packages: [numpy], find_links: [/w], no_index: true, offline: true}}\n"
    kept = owners(requirements=("numpy",), find_links=("/w",), no_index=True, offline=True)
    assert request("", tmp_path, cluster) == kept
    own = request("environment: {offline: false, no_index: false, find_links: []}\n", tmp_path, cluster)
    assert own == owners(requirements=("numpy",))
    named = request("environment: {index_url: 'https://i/simple'}\n", tmp_path, cluster)
    assert named == replace(kept, index_url="https://i/simple", no_index=False), "it is asked, not ignored"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environment: {python: 3.11}", 'environment.python: expected a version of Python such as "3.11", got 3.11'),
        ("environment: {packages: ['-e .']}", "environment.packages: expected a package"),
        ("environment: {packages: [./lib]}", "environment.packages: a path of this machine"),
        ("environment:\n  requirements: no.txt", "environment.requirements:"),
        ("environment: {lock: uv.lock, packages: [a]}", "environment.packages: cannot be used beside lock"),
        ("environment: {existing: /e, offline: true}", "environment.offline: cannot be used beside existing"),
        ("environment: {packages: [a], no_index: true}", "environment.no_index: there are no packages then"),
        ("environment: {project: p.toml}", "environment.project: there is no lock"),
        ("environment: {overrides: {old: {}}}", "environment.overrides.old: it changes nothing"),
        ("environment: {pakages: [a]}", "environment.pakages: unknown key"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(text: str, message: str, tmp_path: Path) -> None:
    error = refusal(text + "\n", tmp_path)
    assert error.startswith(f"{tmp_path}/job.yaml:")
    assert message in error


def test_a_mistake_in_a_requirements_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("numpy\n-e .\n")
    error = refusal("environment:\n  requirements: r.txt\n", tmp_path)
    assert error.startswith(f"{tmp_path}/job.yaml:3: environment.requirements: r.txt:2: an editable package")
    assert refusal("", tmp_path, requirements="r.txt").startswith("--requirements: r.txt:2: an editable package")
    cluster = f"{CLUSTER}environment: {{requirements: r.txt}}\n"
    assert refusal("", tmp_path, cluster).startswith(f"{tmp_path}/cluster.yaml: environment.requirements: r.txt:2:")


@pytest.mark.parametrize("key", ["index_url", "extra_index_url", "find_links"])
def test_a_wrong_address_is_not_shown(key: str, tmp_path: Path) -> None:
    assert SECRET not in refusal(f"environment: {{packages: [a], {key}: 'ftp://ann:{SECRET}@host'}}\n", tmp_path)


def with_password(tmp_path: Path) -> JobSpec:
    url = f"https://ann:{SECRET}@host/simple"
    overrides = f"{{old: {{extra_index_url: [{url}]}}}}"
    text = f"environment: {{packages: [a], index_url: '{url}', find_links: ['{url}'], overrides: {overrides}}}\n"
    return JobSpec("a", ("ls",), environment=request(text, tmp_path))


def test_a_password_is_in_no_document_file_or_page(tmp_path: Path) -> None:
    spec = with_password(tmp_path)
    job = Job(1, spec, "ann", JobState.QUEUED, "", "2026-01-01T00:00:00Z")
    write_config(tmp_path / "job", job, None)
    cluster = f"{CLUSTER}environment: {{packages: [a], index_url: 'https://ann:{SECRET}@host/simple'}}\n"
    config = parse_config(cluster, tmp_path / "c.yaml", {})
    shown = [
        str(job_document(job)),
        job_file(spec),
        (tmp_path / "job" / "config.json").read_text(),
        *Effects.of(cluster, tmp_path / "c.yaml").lines,
        *(setting.value for group in groups(config) for setting in group.settings),
    ]
    assert any("environment" in text for text in shown)
    assert [text for text in shown if SECRET in text] == []


def test_another_password_in_the_cluster_file_needs_another_allowance(tmp_path: Path) -> None:
    texts = [f"{CLUSTER}environment: {{packages: [a], index_url: 'https://ann:{one}@h/s'}}\n" for one in ("x1", "x2")]
    first, second = (Effects.of(text, tmp_path / "c.yaml") for text in texts)
    assert first.lines == second.lines
    assert first.digest != second.digest


def test_a_variable_in_an_address_comes_from_the_submitter(tmp_path: Path) -> None:
    found = request("environment: {packages: [a], index_url: 'https://ann:${TOKEN}@h/s'}\n", tmp_path)
    assert found is not None
    assert variables_in(found) == ("TOKEN",)
    with pytest.raises(ConfigError, match="needs the variable TOKEN"):
        with_variables(found, {"TOKEN": ""})
    filled = with_variables(found, {"TOKEN": SECRET})
    assert filled is not None
    assert filled.index_url == f"https://ann:{SECRET}@h/s"


def exported(spec: JobSpec, folder: Path) -> EnvRequest | None:
    draft = parse_job(job_file(spec), folder / "job.yaml", fields={})
    return environment_of(draft, folder, parse_config(CLUSTER, folder / "c.yaml", {}))


def test_an_exported_job_is_the_same_again_and_asks_for_its_password(tmp_path: Path) -> None:
    spec = with_password(tmp_path)
    again = exported(spec, tmp_path)
    assert again is not None
    assert variables_in(again) == ("INDEX_PASSWORD",)
    assert with_variables(again, {"INDEX_PASSWORD": SECRET}) == spec.environment
    assert with_old_passwords(again, spec.environment) == spec.environment


@pytest.mark.parametrize(
    "environment",
    [
        owners(python="3.11", requirements=("torch==2.13.0", "numpy; python_version > '3'"), constraints=("b<2",)),
        owners(lock="version = 1\n[[package]]\n", lock_name="uv.lock", project='[project]\nname = "x"\n'),
        owners(existing="~/miniconda3/envs/torch"),
        owners(requirements=("a",), offline=True, no_index=True, find_links=("/w",)),
    ],
)
def test_an_exported_environment_is_the_same_again(environment: EnvRequest, tmp_path: Path) -> None:
    assert exported(JobSpec("a", ("ls",), environment=environment), tmp_path) == environment


@pytest.mark.parametrize(
    "text",
    [
        "{requirements: /etc/passwd}",
        "{packages: [a], constraints: /etc/passwd}",
        "{lock: uv.lock}",
        "{packages: [a], find_links: [/secret]}",
        "{packages: [a], index_url: 'file:///secret'}",
    ],
)
def test_a_browser_names_no_files_of_this_machine(text: str) -> None:
    with pytest.raises(ConfigError, match="of this machine cannot be named here"):
        from_browser(text)


def test_a_browser_keeps_the_folders_of_the_job_before() -> None:
    found = from_browser('{packages: [a], find_links: [/wheels], constraints: "b<2\\n"}')
    assert found is not None
    assert found.find_links == ("/wheels",)


def from_browser(text: str) -> EnvRequest | None:
    """Of a job that is made from one with a folder."""
    draft = edited_job(f"command: [ls]\nenvironment: {text}\n", Given())
    refuse_files(draft)
    config = parse_config("nodes: [n1]\n", Path("cluster.yaml"), {})
    return environment_of(draft, Path("/"), config, owners(find_links=("/wheels",)))


def test_a_lock_that_is_too_large_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text("#" * (1 << 20) + "\n")
    assert "uv.lock is larger than 1 MiB\nexport what" in refusal("environment: {lock: uv.lock}\n", tmp_path)


def test_a_lock_is_read_with_the_project_beside_it(tmp_path: Path) -> None:
    lock, project = 'version = 1\n[[package]]\nname = "a"\n', '[project]\nname = "x"\n'
    (tmp_path / "uv.lock").write_text(lock)
    assert "pyproject.toml" in refusal("environment: {lock: uv.lock}\n", tmp_path)
    (tmp_path / "pyproject.toml").write_text(project)
    found = request("environment: {lock: uv.lock}\n", tmp_path)
    assert found == owners(lock=lock, lock_name="uv.lock", project=project)


def test_the_indexes_of_a_lock_are_used_as_if_they_were_named(tmp_path: Path) -> None:
    lock = 'version = 1\n[[package]]\nname = "a"\nsource = { registry = "https://h/cu126" }\n'
    (tmp_path / "uv.lock").write_text(lock)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    found = request("environment: {lock: uv.lock, extra_index_url: 'https://more/simple'}\n", tmp_path)
    assert found is not None
    assert found.extra_index_url == ("https://more/simple", "https://h/cu126")
    assert exported(JobSpec("a", ("ls",), environment=found), tmp_path) == found
    none = request("environment: {lock: uv.lock, no_index: true, find_links: [w]}\n", tmp_path)
    assert none is not None
    assert none.extra_index_url == ()
