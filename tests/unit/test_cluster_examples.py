"""The manifests and the container recipe: what can be known of them without Kubernetes and without Docker.

The schema has the fields of KubeRay's API (ray.io/v1: `RayCluster`, `RayJob`) that ours use, with their types, and no
other: a field that is misspelt is refused, as the API server refuses it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from etude.cli.commands import build_parser
from etude.environments.images.dockerfile import parse
from etude.environments.images.limits import ImageLimits
from etude.errors import Exit
from etude.loop.ray_cluster import ROLES

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
DOCKERFILE = ROOT / "examples" / "containers" / "Dockerfile"
PINNED = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))


def fields(required: str = "", **kinds: Any) -> dict[str, Any]:
    """An object of these fields alone."""
    return {
        "type": "object",
        "properties": kinds,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(kind: Any) -> dict[str, Any]:
    return {"type": "array", "items": kind, "minItems": 1}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}  # a map of strings: numbers must be quoted
SECURITY = fields(
    seccompProfile=fields("type", type={"enum": ["Unconfined", "RuntimeDefault", "Localhost"]}),
    procMount={"enum": ["Default", "Unmasked"]},
)
PROBE = fields(
    "httpGet periodSeconds",
    httpGet=fields("path port", path=TEXT, port={"type": ["string", "integer"]}),
    periodSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = fields(
    "name image resources volumeMounts",
    name=TEXT,
    image=TEXT,
    workingDir=TEXT,
    command=many(TEXT),
    ports=many(fields("containerPort", name=TEXT, containerPort=COUNT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    securityContext=SECURITY,
    resources=fields("requests limits", requests=TEXTS, limits=TEXTS),
    volumeMounts=many(fields("name mountPath", name=TEXT, mountPath=TEXT)),
)
SELECTOR = fields("matchLabels", matchLabels=TEXTS)
BESIDE = fields("topologyKey labelSelector", topologyKey=TEXT, labelSelector=SELECTOR)
POD = fields(
    "spec",
    metadata=fields("labels", labels=TEXTS),
    spec=fields(
        "containers volumes",
        hostUsers=FLAG,
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
        terminationGracePeriodSeconds=COUNT,
        affinity=fields(
            "podAffinity",
            podAffinity=fields(
                "requiredDuringSchedulingIgnoredDuringExecution",
                requiredDuringSchedulingIgnoredDuringExecution=many(BESIDE),
            ),
        ),
        containers=many(CONTAINER),
        volumes=many(
            fields(
                "name",
                name=TEXT,
                persistentVolumeClaim=fields("claimName", claimName=TEXT),
                secret=fields("secretName", secretName=TEXT),
            )
        ),
    ),
)
DEPLOYMENT = fields(
    "selector template",
    replicas=COUNT,
    strategy=fields("type", type={"enum": ["Recreate", "RollingUpdate"]}),
    selector=SELECTOR,
    template=POD,
)
SERVICE = fields(
    "selector ports",
    selector=TEXTS,
    ports=many(fields("port", name=TEXT, port=COUNT, targetPort={"type": ["string", "integer"]})),
)
FAILURES = fields(
    "rules",
    rules=many(
        fields(
            "action onExitCodes",
            action={"enum": ["FailJob", "Ignore", "Count"]},
            onExitCodes=fields("operator values", operator={"enum": ["In", "NotIn"]}, values=many(COUNT)),
        )
    ),
)
CRON = fields(
    "schedule jobTemplate",
    schedule={"type": "string", "pattern": r"^(\S+ ){4}\S+$"},
    concurrencyPolicy={"enum": ["Allow", "Forbid", "Replace"]},
    startingDeadlineSeconds=COUNT,
    successfulJobsHistoryLimit=COUNT,
    failedJobsHistoryLimit=COUNT,
    jobTemplate=fields(
        "spec",
        spec=fields("template", backoffLimit=COUNT, podFailurePolicy=FAILURES, template=POD),
    ),
)
CLUSTER = fields(
    "headGroupSpec workerGroupSpecs rayVersion",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(idleTimeoutSeconds=COUNT),
    headGroupSpec=fields("rayStartParams template", rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=many(
        fields(
            "groupName replicas minReplicas maxReplicas rayStartParams template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD,
        )
    ),
)
JOB = fields(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    backoffLimit=COUNT,
    rayClusterSpec=CLUSTER,
)
CLAIM = fields(
    "accessModes resources",
    accessModes={"const": ["ReadWriteMany"]},
    resources=fields("requests", requests=fields("storage", storage=TEXT)),
)
KINDS = {
    "RayCluster": ("ray.io/v1", CLUSTER),
    "RayJob": ("ray.io/v1", JOB),
    "PersistentVolumeClaim": ("v1", CLAIM),
    "Deployment": ("apps/v1", DEPLOYMENT),
    "Service": ("v1", SERVICE),
    "CronJob": ("batch/v1", CRON),
}


def read(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    spec: dict[str, Any] = manifest["spec"]
    return spec if manifest["kind"] == "RayCluster" else spec.get("rayClusterSpec")


def pod_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The pod of a Deployment or a CronJob."""
    spec: dict[str, Any] = manifest["spec"]
    job = spec.get("jobTemplate", {}).get("spec", spec)
    found: dict[str, Any] | None = job.get("template")
    return found


def check(manifest: dict[str, Any]) -> None:
    version, spec = KINDS[manifest["kind"]]
    metadata = fields("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?$"})
    whole = fields(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind=TEXT, metadata=metadata, spec=spec
    )
    jsonschema.validate(manifest, whole)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_the_fields_of_its_kind(path: Path) -> None:
    check(read(path))


def test_a_manifest_with_a_misspelt_field_or_a_number_for_a_string_is_refused() -> None:
    manifest = read(ROOT / "examples" / "kubernetes" / "run.yaml")
    group = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    group["rayStartParams"]["num-cpus"] = 1
    with pytest.raises(jsonschema.ValidationError, match="1 is not of type 'string'"):
        check(manifest)
    group["rayStartParams"].pop("num-cpus")
    group["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'minReplica' was unexpected"):
        check(manifest)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_role_is_offered_and_every_pod_mounts_the_claim(path: Path) -> None:
    cluster = cluster_of(read(path))
    if cluster is None:
        return
    claim = read(path.with_name("shared.yaml"))["metadata"]["name"]
    offered: set[str] = set()
    for group in cluster["workerGroupSpecs"]:
        [shell_word] = shlex.split(group["rayStartParams"]["resources"])  # KubeRay puts it into a shell's command line
        offered |= json.loads(shell_word).keys()
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert offered == set(ROLES)
    assert cluster["rayVersion"] == PINNED["ray"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]] == [claim]
        assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/shared"]


def test_the_jobs_command_is_one_that_etude_takes() -> None:
    entry = shlex.split(read(ROOT / "examples" / "kubernetes" / "run.yaml")["spec"]["entrypoint"])
    assert entry[:2] == ["sh", "-c"]
    _, _, command = entry[2].partition(" && ")
    name, *args = shlex.split(command)
    assert name == "etude"
    assert build_parser().parse_args(args).on == "ray"


PODS = [path for path in MANIFESTS if pod_of(read(path)) is not None]


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.name)
def test_the_command_of_a_pod_is_one_that_etude_takes_and_its_volumes_are_there(path: Path) -> None:
    pod = pod_of(read(path))
    assert pod is not None
    [container] = pod["spec"]["containers"]
    assert container["command"][0] == "etude"
    parsed = build_parser().parse_args(container["command"][1:])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert container["workingDir"] == mounts["shared"]
    places = (
        [parsed.destination] if hasattr(parsed, "destination") else [parsed.keys] if hasattr(parsed, "keys") else []
    )
    assert all(str(place.parent) in mounts.values() for place in places)
    if hasattr(parsed, "port"):
        service = read(path.with_name("serve-service.yaml"))["spec"]
        assert parsed.port == container["ports"][0]["containerPort"] == service["ports"][0]["port"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert parsed.host == "0.0.0.0"


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.name)
def test_a_job_is_not_tried_again_after_an_error_that_stays(path: Path) -> None:
    manifest = read(path)
    if manifest["kind"] != "CronJob":
        return
    job = manifest["spec"]["jobTemplate"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [Exit.BAD_INPUT, Exit.OTHER_RUN]}}
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a failure policy needs it"
    [beside] = job["template"]["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = read(path.with_name("serve.yaml"))["spec"]["template"]["metadata"]["labels"]
    assert beside["labelSelector"]["matchLabels"] in (labels, {"ray.io/node-type": "head"})


def test_the_containers_recipe_is_read_as_a_dockerfile_and_copies_what_is_there() -> None:
    stages = parse(DOCKERFILE.read_text(), ImageLimits()).stages
    instructions = [instruction for stage in stages for instruction in stage.instructions]
    copied = [word for i in instructions if i.name == "COPY" for word in " ".join(i.args).split()[:-1]]
    assert {"src", "native", "pyproject.toml", "constraints.txt"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    installs = " ".join(" ".join(i.args) for i in instructions if i.name == "RUN")
    assert f" torch=={PINNED['torch']}" in installs
    assert ' -c constraints.txt ".[train,ray,prometheus,signing]"' in installs
