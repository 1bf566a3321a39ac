"""Files for containers are valid, harmless by default, and fit the service."""

import re
from pathlib import Path

import pytest

from alight.cli.parser import parser
from alight.serve.access import PUBLIC
from alight.serve.monitoring import Metrics
from alight.serve.run import GRACE

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ("--ledger", "--token-file")
yaml = pytest.importorskip("yaml")


def documents(name):
    return [*yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())]


def by_kind(name):
    return {each["kind"]: each for each in documents(name)}


def options_of(arguments):
    """The arguments of a container as the command reads them."""
    return parser().parse_args([word for word in arguments if not word.startswith("--token-file")])


@pytest.mark.parametrize("name", ["alight.yaml", "ledger.yaml"])
def test_kubernetes_takes_the_manifests(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    found = documents(name)
    assert found
    for document in found:
        assert kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", ["alight.yaml", "ledger.yaml"])
def test_pods_may_do_nothing_that_they_need_not(name):
    kinds = by_kind(name)
    pod = (kinds.get("Deployment") or kinds["StatefulSet"])["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    secure = container["securityContext"]
    assert (secure["allowPrivilegeEscalation"], secure["readOnlyRootFilesystem"]) == (False, True)
    assert secure["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert set(kinds["NetworkPolicy"]["spec"]["policyTypes"]) == {"Ingress", "Egress"}


def test_the_deployment_fits_the_service():
    kinds, ledger = by_kind("alight.yaml"), by_kind("ledger.yaml")
    deployment = kinds["Deployment"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    options = options_of(container["args"])
    assert options.host == "0.0.0.0"
    assert options.threads == int(container["resources"]["limits"]["cpu"])
    (port,) = container["ports"]
    assert options.port == port["containerPort"] == kinds["Service"]["spec"]["ports"][0]["targetPort"]
    for kind, path in {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}.items():
        assert container[f"{kind}Probe"]["httpGet"] == {"path": path, "port": options.port}
        assert path in PUBLIC  # probes bring no token
    labels = template["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        ledger["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    assert options.ledger == f"redis://{ledger['Service']['metadata']['name']}:6379/0"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {*mounts} == {volume["name"] for volume in template["spec"]["volumes"]}
    (tokens,) = [word.partition("=")[2] for word in container["args"] if word.startswith("--token-file")]
    assert str(Path(tokens).parent) == mounts["tokens"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert template["spec"]["terminationGracePeriodSeconds"] > pause + GRACE
    assert kinds["PodDisruptionBudget"]["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_the_autoscaler_and_the_alarms_read_metrics_that_exist():
    names = {metric.name for metric in Metrics().registry.collect()}
    known = names | {f"{name}_total" for name in names} | {f"{name}_bucket" for name in names}
    (configuration,) = documents("prometheus.yaml")
    rules = configuration["adapter"]["rules"]
    assert {rule["seriesQuery"] for rule in rules} <= known
    scaled = {rule["name"]["as"] if "name" in rule else rule["seriesQuery"] for rule in rules}
    autoscaler = by_kind("alight.yaml")["HorizontalPodAutoscaler"]["spec"]
    assert {each["pods"]["metric"]["name"] for each in autoscaler["metrics"]} == scaled
    alerts = [rule["expr"] for rule in configuration["prometheus"]["groups"][0]["rules"]]
    assert set(re.findall(r"alight_\w+", " ".join(alerts))) <= known
    (job,) = configuration["prometheus"]["scrape_configs"]
    assert "/metrics" not in PUBLIC  # so the job brings a token
    assert job["authorization"]


def test_the_compose_file_fits_the_image_and_the_service():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    for each in services.values():
        assert each["read_only"]
        assert not each["user"].startswith("0")
        assert each["cap_drop"] == ["ALL"]
        assert each["security_opt"] == ["no-new-privileges:true"]
        assert each["tmpfs"]
    alight = services["alight"]
    options = options_of(alight["command"])
    assert options.threads == int(alight["deploy"]["resources"]["limits"]["cpus"])
    assert options.ledger.split("/")[2].split(":")[0] in services
    assert int(alight["stop_grace_period"].rstrip("s")) > GRACE
    assert {*alight["secrets"]} == {*compose["secrets"]}
    image = (DEPLOY / "Dockerfile").read_text()
    assert "USER 1000:1000" in image
    assert f"EXPOSE {options.port}" in image
    assert 'ENTRYPOINT ["alight"]' in image
