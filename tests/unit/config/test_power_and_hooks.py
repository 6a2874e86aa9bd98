"""The sections ``power`` and ``hooks``: which keys win, what is refused, and what must be allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.features.hooks.config import HookSection
from ugro.features.power.model import PowerRule
from ugro.kernel.config.allowance import Effects
from ugro.kernel.config.load import parse_config
from ugro.kernel.config.schema import Config
from ugro.kernel.support.errors import ConfigError

COMMON = """
power:
  suspend_after: 30m
  exclude: [a]
  labels:
    slow: {suspend_after: 2h, resume_timeout: 10m}
"""


def config_of(text: str) -> Config:
    return parse_config(text, Path("cluster.yaml"), {})


def rule_of(text: str, name: str) -> PowerRule | None:
    return {node.name: node.power for node in config_of(text).nodes}[name]


def test_nobody_is_suspended_by_default() -> None:
    assert rule_of("nodes: [a]", "a") is None
    assert rule_of("power: {cool_down: 1h}\nnodes: [a]", "a") is None


def test_a_nodes_own_keys_come_before_those_of_its_labels_and_those_before_the_common_ones() -> None:
    text = COMMON + "nodes: {a: {}, b: {labels: [slow]}, c: {labels: [slow], power: {suspend_after: 1h}}}"
    [a, b, c] = (rule_of(text, name) for name in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert (a.suspend_after_s, a.resume) == (None, "wol"), "it can be woken, and is never suspended"
    assert (b.suspend_after_s, b.resume_timeout_s) == (7200, 600)
    assert (c.suspend_after_s, c.resume_timeout_s) == (3600, 600)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("power: {suspend: now}", "power.suspend: expected ssh or webhook, or a command as a list of words"),
        ("power: {resume: []}", "power.resume: expected wol or webhook, or a command"),
        ("power: {resume: [--on]}", "power.resume"),
        ("power: {mac: 1-2}", "power.mac: expected a MAC address such as"),
        ("power: {suspend: webhook}", "power: a webhook needs an address and a secret"),
        ("power: {most_per_hour: 1}", "power.most_per_hour: expected a whole number from 2"),
        ("hooks: {idle: {for: 5m}}", "hooks.idle: it calls nothing"),
        ("hooks: {idle: {call: 'http://x/'}}", "hooks.idle: calls of an address are signed"),
        ("hooks: {idle: {call: 'http://ann:pw@x/'}}", "hooks.idle.call: expected an address"),
        ("hooks: {idle: {call: 'ftp://x/'}}", "hooks.idle.call: expected an address"),
        ("hooks: {idle: {call: [a], four: 5m}}", "hooks.idle.four: unknown key"),
        ("hooks: {queue: {call: [a]}}", "hooks.queue: unknown key"),
        ("hooks: {job_ended: {call: [a], states: [running]}}", "hooks.job_ended.states"),
        ("hooks: {idle: {call: [a], secret_file: /a, secret_env: B}}", "hooks.idle: it has two secrets"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"nodes: [a]\n{text}\n")
    assert message in str(caught.value)


def test_the_key_for_is_read_and_written() -> None:
    hook = config_of("nodes: [a]\nhooks: {idle: {for: 5m, call: [down]}}").section(HookSection).idle
    assert hook is not None
    assert hook.for_ == 300
    assert hook.written() == {"call": ["down"], "for": 300.0}
    assert hook.given_keys == {"call", "for"}


def test_commands_of_a_file_that_was_found_must_be_allowed_and_are_shown_first() -> None:
    text = """
nodes:
  a: {power: {suspend: [evil, "{node}"], resume: wol}}
hooks: {idle: {call: [worse]}}
power: {resume: [worst]}
"""
    lines = Effects.of(text, Path("cluster.yaml")).lines
    assert 'hooks.idle: {call: [worse]}' in lines[:4]
    assert any(line.startswith("power.resume: ") for line in lines[:4])
    assert any(line.startswith("node a is suspended by [evil") for line in lines[:4])
    other = Effects.of(text.replace("worse", "better"), Path("cluster.yaml"))
    assert other.digest != Effects.of(text, Path("cluster.yaml")).digest
