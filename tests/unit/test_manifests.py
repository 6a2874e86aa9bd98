"""The files of deploy/: what they promise, read from the files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ugro.kernel.config.load import parse_config
from ugro.kernel.links.transport import SshOptions, link_command

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(*files: Path) -> list[dict[str, Any]]:
    return [document for file in files or FILES for document in yaml.safe_load_all(file.read_text())]


def the(kind: str, name: str = "ugro") -> dict[str, Any]:
    [found] = [one for one in documents() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def test_a_copy_of_the_containers_home_on_another_machine_is_recognized() -> None:
    """An image has no machine id of its own, and the folder has the same name everywhere."""
    assert "/etc/machine-id:/etc/machine-id:ro" in compose()["services"]["agent"]["volumes"]


@pytest.mark.proof
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_manifests_follow_the_published_schemas(file: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(file):
        validate.validate(document, validate.latest_version(), strict=True)


def test_there_is_one_agent_and_never_two_with_one_state() -> None:
    spec = the("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert the("PersistentVolumeClaim", "ugro-state")["spec"]["accessModes"] == ["ReadWriteOncePod"]


def test_the_agents_pod_has_no_privileges() -> None:
    pod = the("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["exec"] == {"command": ["ugro", "agent", "status"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_agent_may_run_commands_in_pods_and_nothing_else() -> None:
    allowed = {
        (resource, verb) for rule in the("Role")["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    # kubectl exec looks at the pod, and then asks to connect: by POST, or from version 1.31 on by GET.
    assert allowed == {("pods", "get"), ("pods/exec", "create"), ("pods/exec", "get")}
    assert not [one["kind"] for one in documents() if one["kind"].startswith("ClusterRole")]
    assert the("RoleBinding")["roleRef"]["name"] == the("Role")["metadata"]["name"]
    pod = the("Deployment")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == the("ServiceAccount")["metadata"]["name"]


def test_names_and_labels_lead_to_each_other() -> None:
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Service")["spec"]["selector"] == the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    nodes = the("StatefulSet", "gpu")
    assert nodes["spec"]["template"]["metadata"]["labels"] == nodes["spec"]["selector"]["matchLabels"]
    config = parse_config(the("ConfigMap", "ugro-cluster")["data"]["cluster.yaml"], Path("cluster.yaml"), {})
    assert [node.name for node in config.nodes] == [f"gpu-{number}" for number in range(nodes["spec"]["replicas"])]
    assert link_command(config.nodes[0], SshOptions())[:3] == ["kubectl", "exec", "--stdin"]
    [container] = nodes["spec"]["template"]["spec"]["containers"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "data"]
    assert config.nodes[0].remote_root.startswith(mount["mountPath"])


def test_the_services_of_the_compose_file_listen_on_loopback_only() -> None:
    services = compose()["services"]
    assert set(services) == {"agent", "prometheus", "grafana", "postgres"}
    for name, service in services.items():
        assert service["network_mode"] == "host"
        assert "ports" not in service, name
        assert "privileged" not in service
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "listen_addresses=127.0.0.1" in services["postgres"]["command"]
    assert services["postgres"]["profiles"] == ["postgres"]


def test_what_the_compose_file_mounts_is_there_or_is_made_by_the_user() -> None:
    made = {"./home", "./secrets/dashboard.token", "./secrets/grafana.password", "./secrets/postgres.password"}
    named = set(compose()["volumes"])
    for service in compose()["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in made or source in named or (DEPLOY / source).exists(), source


def test_the_image_is_not_roots_and_says_whether_it_is_healthy() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    kinds = [kind for kind, _ in words]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert ["USER", "1000:1000"] in words
    [health] = [rest for kind, rest in words if kind == "HEALTHCHECK"]
    assert health.endswith('CMD ["ugro", "agent", "status"]')
    assert not [rest for kind, rest in words if kind in ("ENV", "ARG") and "TOKEN" in rest]


def test_what_grafana_is_given_fits_together() -> None:
    grafana = compose()["services"]["grafana"]
    places = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert places["./grafana/provisioning"] == "/etc/grafana/provisioning"  # where Grafana looks
    [source] = provisioned("datasources/prometheus.yml")["datasources"]
    [address] = [word for word in compose()["services"]["prometheus"]["command"] if "--web.listen-address" in word]
    assert (source["type"], source["url"]) == ("prometheus", f"http://{address.partition('=')[2]}")
    assert source["isDefault"] is True
    [provider] = provisioned("dashboards/ugro.yml")["providers"]
    assert places["./grafana/ugro.json"] == f"{provider['options']['path']}/ugro.json"


def provisioned(file: str) -> dict[str, Any]:
    found = dict(yaml.safe_load((DEPLOY / "grafana/provisioning" / file).read_text()))
    assert found["apiVersion"] == 1
    return found


def test_grafanas_dashboard_is_whole() -> None:
    dashboard = json.loads((DEPLOY / "grafana/ugro.json").read_text())
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    for owner in (variables["node"], *panels):
        assert owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        assert panel["title"]
        assert {target["refId"] for target in panel["targets"]}
        used = {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
        assert used <= {*variables, "__rate_interval", "__interval", "__range"}, panel["title"]


def test_dashboard_and_alerts_use_only_metrics_that_the_agent_exports() -> None:
    """``make proof`` asks a real Prometheus every query of the dashboard."""
    sources = (DEPLOY.parent / "src/ugro").rglob("*.py")
    exported = {name for source in sources for name in re.findall(r'"(ugro_\w+)"', source.read_text())}
    dashboard = json.loads((DEPLOY / "grafana/ugro.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "prometheus/ugro_alerts.yml").read_text())
    queries = [one["query"] for one in dashboard["templating"]["list"]]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for text in queries for name in re.findall(r"\bugro_\w+", text)}
    assert len(used) > 20
    assert used - exported == set()
