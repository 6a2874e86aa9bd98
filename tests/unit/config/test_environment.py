"""Environment variables over the cluster file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.config.load import load_config, parse_config, variables
from ugro.kernel.config.schema import Config, Settings
from ugro.kernel.support.errors import ConfigError

TEXT = """
nodes:
  a:
  b: {remote_root: /own}
remote_root: /common
ssh: {timeout: 3, key_file: /k}
"""


def config_with(**env: str) -> Config:
    return parse_config(TEXT, Path("cluster.yaml"), env)


def value_of(config: Settings, section: str | None, key: str) -> object:
    return getattr(getattr(config, section) if section else config, key)


def test_a_variable_wins_over_the_file() -> None:
    config = config_with(
        UGRO_SSH_TIMEOUT="20s",
        UGRO_SSH_MAX_RETRIES="0",
        UGRO_HEALTH_CHECK_GPU_WEIGHT="2",
        UGRO_SYNC_USE_CHECKSUMS="no",
        UGRO_SYNC_EXCLUDE_PATTERNS=".git, *.pyc",
        UGRO_CLUSTER_NAME="lab",
        UGRO_TRAINING_DEFAULT_MODEL="llama-7b",
    )
    assert config.ssh.timeout == 20
    assert config.ssh.max_retries == 0
    assert config.health_check.gpu_weight == 2.0
    assert config.sync.use_checksums is False
    assert config.sync.exclude_patterns == (".git", "*.pyc")
    assert config.cluster.name == "lab"
    assert config.training.default_model == "llama-7b"


def test_a_variable_changes_its_key_alone() -> None:
    changed = config_with(UGRO_SSH_TIMEOUT="20s")
    assert replace(changed, ssh=replace(changed.ssh, timeout=3.0)) == config_with()


def test_a_nodes_own_directory_stays_when_the_common_one_is_overridden() -> None:
    assert [node.remote_root for node in config_with(UGRO_REMOTE_ROOT="/env").nodes] == ["/env", "/own"]


def test_an_empty_variable_counts_as_not_set() -> None:
    assert config_with(UGRO_SSH_TIMEOUT="", UGRO_SSH_KEY_FILE=" ") == config_with()


def test_null_clears_a_key_that_may_be_empty() -> None:
    assert config_with().ssh.key_file == "/k"
    assert config_with(UGRO_SSH_KEY_FILE="null").ssh.key_file is None


def test_every_key_has_a_variable_that_sets_it() -> None:
    keys: set[tuple[str | None, str]] = {(None, "remote_root"), (None, "channels")}
    for name, declared in Settings.known_keys().items():
        if declared.section is not None:
            keys |= {(name, key) for key in declared.section.known_keys()}
    assert {(variable.section, variable.key) for variable in variables().values()} == keys
    for variable in variables().values():
        if variable.example != "null":
            config = load_config(None, {variable.name: variable.example})
            expected = variable.kind.parse(variable.kind.from_text(variable.example))
            assert value_of(config, variable.section, variable.key) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "UGRO_SSH_TIMEOUT",
            "soon",
            'expected a duration over 0 and up to 1d, such as 10, 500ms or 1h30m, got "soon"',
        ),
        ("UGRO_SSH_TIMEOUT", "-1", "expected a duration"),
        ("UGRO_SSH_MAX_RETRIES", "1.5", 'expected a whole number from 0 to 100, got "1.5"'),
        ("UGRO_SSH_MAX_RETRIES", "٣", "expected a whole number"),
        ("UGRO_SSH_MAX_RETRIES", "9" * 5000, "expected a whole number"),
        ("UGRO_HEALTH_CHECK_CPU_WEIGHT", "nan", "expected a number from 0"),
        ("UGRO_HEALTH_CHECK_CPU_WEIGHT", "much", 'expected a number from 0 to 1000000, got "much"'),
        ("UGRO_SYNC_FOLLOW_SYMLINKS", "maybe", 'expected true or false, got "maybe"'),
        ("UGRO_SYNC_EXCLUDE_PATTERNS", "a,,b", 'expected a pattern, got ""'),
        ("UGRO_RAY_DASHBOARD_PORT", "70000", "expected a whole number from 1 to 65535, got 70000"),
        ("UGRO_RAY_LOG_LEVEL", "loud", "expected debug, info, warning, error or critical"),
        ("UGRO_REMOTE_ROOT", "here", "expected a directory on the node"),
        ("UGRO_SSH_TIMEOUT", "null", "expected a duration"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(name: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(**{name: text})
    assert str(caught.value).startswith(f"{name}: {expected}")
    assert str(caught.value.hint).startswith(f"for example: {name}=")


def test_a_misspelt_variable_is_not_ignored_in_silence() -> None:
    with pytest.raises(ConfigError, match="UGRO_SSH_TIMOUT: unknown variable") as caught:
        config_with(UGRO_SSH_TIMOUT="3")
    assert caught.value.hint == "did you mean UGRO_SSH_TIMEOUT?"


def test_variables_of_other_parts_are_left_alone() -> None:
    others = ("UGRO_HOME", "UGRO_CLUSTER", "UGRO_LOG_LEVEL", "UGRO_JOB_ID", "UGRO_TOKEN", "SSH_TIMEOUT")
    assert config_with(**dict.fromkeys(others, "x")) == config_with()


@given(st.dictionaries(st.sampled_from(sorted(variables())), st.text(max_size=10), max_size=4))
def test_no_environment_raises_anything_but_a_configuration_error(env: dict[str, str]) -> None:
    try:
        config = load_config(None, env)
    except ConfigError:
        return
    assert config.ssh.timeout > 0
