from __future__ import annotations

import pytest

from ugro.features.services.config import ALL, ScaleSection, name_problem, read_service
from ugro.features.services.model import Probes
from ugro.kernel.support.errors import ConfigError


def refused(text: str, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        read_service(text, "service.yaml", options, {})
    assert error.value.hint
    return error.value


def test_a_file_has_keys_of_services_and_of_their_jobs() -> None:
    text = "model: 12\nreplicas: all\nresources: {cpus: 2, only: [gpu1]}\npriority: batch\nenv: {A: b}\n"
    found = read_service(text, "service.yaml", {}, {"memory": "2GB"})
    assert (found.section.model, found.section.replicas) == ("12", ALL)
    assert found.fields == {"cpus": 2, "only": ["gpu1"], "priority": "batch", "env": {"A": "b"}, "memory": "2GB"}


def test_options_override_the_file() -> None:
    options = {"port": "9000", "replicas": "0..3", "probes.ready.path": "/up", "drain": "5s"}
    found = read_service("port: 8000\nprobes: {ready: {failures: 7}}", "service.yaml", options, {}).section
    assert (found.port, found.drain) == (9000, 5.0)
    assert isinstance(found.replicas, ScaleSection)
    assert (found.replicas.min, found.replicas.max) == (0, 3)
    ready = found.probes.over(Probes()).ready
    assert (ready.path, ready.failures, ready.interval_s) == ("/up", 7, Probes().ready.interval_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: x", "service.yaml:1: modle: unknown key"),
        ("replicas: -1", "service.yaml:1: replicas"),
        ("replicas: {min: 3, max: 1}", "min is 3"),
        ("port: 70000", "service.yaml:1: port"),
        ("bind: 0.0.0.0", "needs tls"),
        ("bind: 127.example.org", "needs tls"),
        ("bind: 0.0.0.0\nkeys: false\ntls: {cert: /c, key: /k}", "needs keys"),
        ("tls: {cert: /c}", "belong together"),
        ("probes: {ready: {status: 700}}", "probes.ready.status"),
        ("probes: {ready: {path: health}}", "probes.ready.path"),
        ("update: {canary: 120%}", "update.canary"),
        ("script: train.py", "script: a service has none"),
        ("- a", "expected a map"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(text: str, said: str) -> None:
    assert said in str(refused(text))


def test_a_wrong_option_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match=r"--bind: .*needs tls"):
        read_service(None, "service.yaml", {"bind": "0.0.0.0"}, {})


def test_an_open_address_needs_keys_unless_it_is_public() -> None:
    tls = "bind: 0.0.0.0\ntls: {cert: /c, key: /k}\n"
    assert read_service(tls, "f", {}, {}).section.needs_keys
    assert not read_service(tls + "public: true", "f", {}, {}).section.needs_keys
    assert not read_service("port: 1", "f", {}, {}).section.needs_keys
    assert read_service("keys: true", "f", {}, {}).section.needs_keys


@pytest.mark.parametrize("name", ["", "17", "a b", "x" * 49, "-a"])
def test_names_that_jobs_could_not_have_are_refused(name: str) -> None:
    assert name_problem(name) is not None
    assert name_problem("chat-1.b") is None


@pytest.mark.parametrize("option", ["probe.ready.path", "probes.raedy.path", "", "a.b.c"])
def test_an_unknown_option_of_a_client_is_an_unknown_key(option: str) -> None:
    assert "unknown key" in str(refused("model: x", **{option: "/up"}))
