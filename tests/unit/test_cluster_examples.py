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
CONTAINER = fields(
    "name image resources volumeMounts",
    name=TEXT,
    image=TEXT,
    securityContext=SECURITY,
    resources=fields("requests limits", requests=TEXTS, limits=TEXTS),
    volumeMounts=many(fields("name mountPath", name=TEXT, mountPath=TEXT)),
)
POD = fields(
    "spec",
    spec=fields(
        "containers volumes",
        hostUsers=FLAG,
        containers=many(CONTAINER),
        volumes=many(fields("name persistentVolumeClaim", name=TEXT, persistentVolumeClaim=fields(claimName=TEXT))),
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
KINDS = {"RayCluster": ("ray.io/v1", CLUSTER), "RayJob": ("ray.io/v1", JOB), "PersistentVolumeClaim": ("v1", CLAIM)}


def read(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    spec: dict[str, Any] = manifest["spec"]
    return spec if manifest["kind"] == "RayCluster" else spec.get("rayClusterSpec")


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


def test_the_containers_recipe_is_read_as_a_dockerfile_and_copies_what_is_there() -> None:
    stages = parse(DOCKERFILE.read_text(), ImageLimits()).stages
    instructions = [instruction for stage in stages for instruction in stage.instructions]
    copied = [word for i in instructions if i.name == "COPY" for word in " ".join(i.args).split()[:-1]]
    assert {"src", "native", "pyproject.toml", "constraints.txt"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    installs = " ".join(" ".join(i.args) for i in instructions if i.name == "RUN")
    assert f" torch=={PINNED['torch']}" in installs
    assert ' -c constraints.txt ".[train,ray]"' in installs
