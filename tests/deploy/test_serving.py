"""Compare the files under deploy/ with the real application.

These are probes, ports, metrics, keys and times.
"""

import re
from typing import Any

import pytest
import yaml

from specjax.serving.http import run
from specjax.serving.http.app import make_app
from specjax.serving.http.protocol import ConnectionLimits
from tests.deploy.files import (
    DEPLOY,
    command_lines,
    config_of,
    containers,
    of_kind,
    pods,
    templates,
)
from tests.deploy.test_commands import CLOSING
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import ask, service_of

SERVE, HOSTS, SCALE = (
    DEPLOY / "kubernetes" / f"{name}.yaml" for name in ("serve", "hosts", "autoscale")
)
SKY = yaml.safe_load((DEPLOY / "skypilot" / "serve.yaml").read_text())
KEY = "a-key-of-the-tests"
SERVERS = [container for container in containers(SERVE, HOSTS) if "ports" in container]
PROBES = [
    (kind, container[kind])
    for container in SERVERS
    for kind in ("startupProbe", "readinessProbe", "livenessProbe")
]


def port_of(container: dict[str, Any], name: Any) -> int:
    """Return the number of a port, which may be written by a name."""
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    return named.get(name, name)


def test_there_are_servers_with_all_probes() -> None:
    assert len(SERVERS) == 2
    assert len(PROBES) == 6


def test_a_server_that_takes_as_long_to_close_as_is_reckoned_with() -> None:
    config = run._config(make_app(service_of(MadeUpEngine())), ConnectionLimits(), None)
    assert config.timeout_graceful_shutdown == CLOSING


@pytest.mark.parametrize(
    "path",
    [*(probe["httpGet"]["path"] for _, probe in PROBES), SKY["service"]["readiness_probe"]["path"]],
)
def test_a_probe_needs_no_key_and_says_whether_requests_are_taken(path: str) -> None:
    service = service_of(MadeUpEngine(), api_keys=(KEY,))
    assert ask(service, path, "GET").status_code == 200
    service.is_draining = True
    assert ask(service, path, "GET").status_code == 503
    failed = service_of(MadeUpEngine(), api_keys=(KEY,))
    failed.engine.is_down = True  # pyright: ignore[reportAttributeAccessIssue]
    assert ask(failed, path, "GET").status_code == 503


def test_probes_and_services_ask_the_port_at_which_a_server_listens() -> None:
    for container in SERVERS:
        config = config_of(container["args"])
        assert config.host == "0.0.0.0"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert port_of(container, container[kind]["httpGet"]["port"]) == config.port
        for service in of_kind("Service", SERVE, HOSTS):
            (port,) = service["spec"]["ports"]
            assert port_of(container, port["targetPort"]) == config.port
    (words,) = command_lines(DEPLOY / "skypilot" / "serve.yaml")
    config = config_of(words)
    assert (config.host, config.port) == ("0.0.0.0", SKY["resources"]["ports"])


def test_a_probe_waits_no_longer_than_its_period() -> None:
    for _, probe in PROBES:
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_what_selects_pods_selects_some() -> None:
    labels = [
        template["metadata"]["labels"]
        for kind in ("Deployment", "LeaderWorkerSet")
        for object_ in of_kind(kind)
        for template in templates(object_)
    ]

    def count(selector: dict[str, str]) -> int:
        return sum(selector.items() <= labels_of_pod.items() for labels_of_pod in labels)

    # Of the hosts only the leader is selected.
    assert [count(service["spec"]["selector"]) for service in of_kind("Service")] == [1, 1]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        (object_,) = of_kind(kind)
        assert count(object_["spec"]["selector"]["matchLabels"]) == 1
    (scaled,), (deployment,) = of_kind("ScaledObject"), of_kind("Deployment")
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_only_the_leader_is_probed_and_both_run_one_command() -> None:
    leader, worker = containers(HOSTS)
    assert leader["args"] == worker["args"]
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)


def test_the_mesh_has_all_gpus_of_the_group() -> None:
    (group,) = of_kind("LeaderWorkerSet")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    for container in containers(HOSTS):
        data, model = config_of(container["args"]).mesh
        assert data * model == size * int(container["resources"]["limits"]["nvidia.com/gpu"])


def test_what_scales_reads_metrics_of_the_served_model() -> None:
    (scaled,), (container,) = of_kind("ScaledObject"), containers(SERVE)
    config = config_of(container["args"])
    service = service_of(MadeUpEngine(), names=config.served_model_name, api_keys=(KEY,))
    (trigger,) = scaled["spec"]["triggers"]
    samples = re.findall(r"\w+:\w+\{[^}]*\}", trigger["metadata"]["query"])
    assert len(samples) == trigger["metadata"]["query"].count("sum(") == 2
    assert any("waiting" in sample for sample in samples)
    metrics = ask(service, "/metrics", "GET", {"Authorization": f"Bearer {KEY}"}).text
    for sample in samples:
        assert f"\n{sample} " in metrics, sample
    assert 0 < float(trigger["metadata"]["threshold"]) < config.rows
    assert scaled["spec"]["minReplicaCount"] >= of_kind("Deployment")[0]["spec"]["replicas"]


def test_prometheus_asks_with_the_key_where_the_metrics_are() -> None:
    (monitor,), (container,), (pod,) = of_kind("PodMonitor"), containers(SERVE), pods(SERVE)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    service = service_of(MadeUpEngine(), api_keys=(KEY,))
    assert ask(service, endpoint["path"], "GET").status_code == 401
    header = f"{endpoint['authorization']['type']} {KEY}"
    assert ask(service, endpoint["path"], "GET", {"Authorization": header}).status_code == 200
    assert port_of(container, endpoint["port"]) == config_of(container["args"]).port
    secret = next(volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume)
    assert endpoint["authorization"]["credentials"]["name"] == secret


@pytest.mark.parametrize("file", [SERVE, HOSTS], ids=lambda file: file.stem)
def test_the_key_is_where_the_server_reads_it(file: Any) -> None:
    match = re.search(
        r"kubectl create secret generic (\S+) --from-literal=(\w+)=", file.read_text()
    )
    assert match
    for pod in pods(file):
        (container,) = pod["containers"]
        mounted = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in pod["volumes"]
            if "secret" in volume
        }
        places = {
            mount["mountPath"]: mounted.get(mount["name"]) for mount in container["volumeMounts"]
        }
        folder, _, name = config_of(container["args"]).api_key_file.rpartition("/")
        assert (places[folder], name) == match.groups()


def test_a_pod_has_time_to_drain() -> None:
    for pod in pods(SERVE, HOSTS):
        (container,) = pod["containers"]
        _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        needed = int(pause) + config_of(container["args"]).drain_seconds + CLOSING
        assert pod["terminationGracePeriodSeconds"] >= needed


def test_every_mount_has_a_volume() -> None:
    for pod in pods():
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file",
    [SERVE, HOSTS, *(DEPLOY / "kubernetes" / f"{name}.yaml" for name in ("regenerate", "train"))],
    ids=lambda file: file.stem,
)
def test_kubernetes_own_objects_fit_their_schemas(file: Any) -> None:
    reason = "THE MANIFESTS WERE NOT CHECKED: there are no schemas; pip install kubernetes-validate"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    objects = [
        object_
        for object_ in yaml.safe_load_all(file.read_text())
        if ".x-k8s.io/" not in object_["apiVersion"]
    ]
    assert objects
    for object_ in objects:
        validate.validate(object_, "1.30", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(objects[0] | {"spec": {"unheard-of": 1}}, "1.30", strict=True)
