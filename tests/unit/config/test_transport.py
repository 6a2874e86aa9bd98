"""Nodes that are containers or pods: their keys, and the commands by which they are reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.kernel.config.load import parse_config
from ugro.kernel.links.transport import LOCAL_COMMAND, SshOptions, link_command
from ugro.kernel.support.errors import ConfigError


def argv_of(node: str) -> list[str]:
    [spec] = parse_config(f"nodes: {{gpu1: {{{node}}}}}", Path("cluster.yaml"), {}).nodes
    argv = link_command(spec, SshOptions())
    assert tuple(argv[-len(LOCAL_COMMAND) :]) == LOCAL_COMMAND
    return argv[: -len(LOCAL_COMMAND)]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("transport: podman", "podman exec --interactive gpu1"),
        ("transport: docker, container: trainer.1", "docker exec --interactive trainer.1"),
        ("transport: podman, container: t, user: ann", "podman exec --interactive --user ann t"),
        ("transport: kubernetes", "kubectl exec --stdin --quiet gpu1 --"),
        (
            "transport: kubernetes, pod: gpu-0, namespace: ml, container: main",
            "kubectl exec --stdin --quiet --namespace ml --container main gpu-0 --",
        ),
        ("transport: [docker, exec, -i, gpu1]", "docker exec -i gpu1"),
    ],
)
def test_a_container_is_reached_by_a_command(node: str, words: str) -> None:
    assert argv_of(node) == words.split()


@pytest.mark.parametrize(
    ("node", "error"),
    [
        ("container: x", "nodes.gpu1.container: is for nodes that are containers"),
        ("transport: local, container: x", "nodes.gpu1.container: is for nodes that are containers"),
        ("transport: podman, pod: x", "nodes.gpu1.pod: is for nodes that are pods"),
        ("transport: docker, namespace: x", "nodes.gpu1.namespace: is for nodes that are pods"),
        ("transport: kubernetes, user: ann", "nodes.gpu1.user: a pod has no user to choose"),
        ("transport: podman, container: --privileged", "nodes.gpu1.container: expected the name or id of a container"),
        ("transport: podman, container: 'a b'", "nodes.gpu1.container: expected the name or id of a container"),
        ("transport: kubernetes, pod: -x", "nodes.gpu1.pod: expected a name of Kubernetes"),
        ("transport: kubernetes, pod: deploy/x", "nodes.gpu1.pod: expected a name of Kubernetes"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_a_hint(node: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace(".", r"\.")) as caught:
        argv_of(node)
    assert caught.value.hint
