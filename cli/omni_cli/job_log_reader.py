"""The pod that reads a job's stored logs where none of its own runs, as the operator wrote it down.

Who asks for logs may have more rights than who can write ConfigMaps: what neither the operator nor
the job's spec says never becomes a pod.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from omni_cli.job_read import JobRecord
from omni_cli.kubectl import Kubectl, NotFoundError
from omni_contract import names
from omni_contract.base import SpecModel
from omni_contract.errors import OmniError, SpecError
from omni_contract.log_store import LOG_READER_FILE, job_folder
from omni_contract.spec_run import PodTemplateSpec

_ROOT: Final = f"{LOG_READER_FILE}.spec"
_REFUSED: Final = (
    "is refused: only what the operator sets itself and what the job's spec says may stand here, "
    "and never a folder of a node or a privilege"
)
_NEVER: Final = ("hostPath", "privileged", "allowPrivilegeEscalation")
_TMP: Final = {"name": "tmp", "emptyDir": {}}
_ENV: Final = (
    {"name": "HOME", "value": "/tmp"},
    {"name": "USER", "value": "omni"},
    {"name": "PYTHONUNBUFFERED", "value": "1"},
)
_POD_SECURITY: Final[Mapping[str, Any]] = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


class _Container(SpecModel):
    name: Literal["data"]
    image: str
    image_pull_policy: str
    command: tuple[Literal["sleep"], Annotated[str, Field(pattern=r"^[0-9]+$")]]
    env: list[dict[str, Any]]
    env_from: list[dict[str, Any]] = []
    volume_mounts: list[dict[str, Any]]
    security_context: dict[str, Any]
    resources: dict[str, Any]


class _PodSpec(SpecModel):
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    security_context: dict[str, Any]
    image_pull_secrets: list[dict[str, Any]] = []
    enable_service_links: Literal[False]
    automount_service_account_token: Literal[False]
    restart_policy: Literal["Never"]
    active_deadline_seconds: int
    termination_grace_period_seconds: int
    containers: Annotated[list[_Container], Field(min_length=1, max_length=1)]
    volumes: list[dict[str, Any]]


class _Pod(SpecModel):
    api_version: Literal["v1"]
    kind: Literal["Pod"]
    metadata: dict[str, Any]
    spec: _PodSpec


def read_log_reader(kubectl: Kubectl, job: JobRecord) -> dict[str, Any]:
    """The pod to create. Raises OmniError where none is written down, or not by the operator."""
    config_map = _find(kubectl, job)
    template = PodTemplateSpec.parse(job.spec.get("podTemplate") or {}, path="spec.podTemplate")
    try:
        _check_owner(config_map["metadata"], job)
        spec = _parse(config_map["data"][LOG_READER_FILE])
        _check(spec, job, template)
    except SpecError as exc:
        raise OmniError(
            f"ConfigMap {config_map['metadata']['name']} does not hold the pod that the operator "
            f"writes for job {job.name}, so none is made: {exc}. Where the job's spec was edited, "
            "its next attempt writes another one; if not, ask who wrote this one. "
            f"{_where_else(job)}"
        ) from None
    base = names.base_name(job.name, job.uid)
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": job.name, "uid": job.uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{base}-logs-",
            "namespace": job.namespace,
            "labels": {names.LABEL_JOB: job.name, names.LABEL_LOG_READER: job.uid},
            "ownerReferences": [owner | {"controller": False}],
        },
        # What was checked, not what was read: the two may spell a field differently.
        "spec": spec.model_dump(by_alias=True, exclude_unset=True),
    }


def _find(kubectl: Kubectl, job: JobRecord) -> dict[str, Any]:
    """The ConfigMap of the newest placement. Labels prove nothing, so it is looked up by name."""
    base = names.base_name(job.name, job.uid)
    attempt, summary = job.status.attempt, job.status.placement
    tried = [f"{base}-placement-{number}" for number in (attempt, attempt - 1) if number > 0]
    for name in dict.fromkeys([summary.config_map, *tried] if summary else tried):
        try:
            found = kubectl.get("configmap", name)
        except NotFoundError:
            continue
        if LOG_READER_FILE in (found.get("data") or {}):
            return found
    raise OmniError(
        f"no pod of job {job.name} runs, and its placement, which says how to make one that "
        f"reads its logs, is gone. {_where_else(job)}"
    )


def _where_else(job: JobRecord) -> str:
    uri = (job.spec.get("checkpoint") or {}).get("uri", "spec.checkpoint.uri")
    folder = job_folder(names.base_name(job.name, job.uid))
    return f"Any S3 client finds the logs in {uri}/{folder}/"


def _check_owner(metadata: Mapping[str, Any], job: JobRecord) -> None:
    owners = metadata.get("ownerReferences") or ()
    if not any(o.get("controller") is True and o.get("uid") == job.uid for o in owners):
        raise SpecError("metadata.ownerReferences", f"its controller is not the job ({job.uid})")


def _parse(text: str) -> _PodSpec:
    try:
        raw = json.loads(text)
    except ValueError as exc:
        raise SpecError(LOG_READER_FILE, f"this is no JSON ({exc})") from None
    return _Pod.parse(raw, path=LOG_READER_FILE).spec


def _check(spec: _PodSpec, job: JobRecord, template: PodTemplateSpec) -> None:
    """Raise SpecError at what neither the operator nor the job's spec says of such a pod."""
    (container,) = spec.containers
    theirs = [c for c in template.containers if c["name"] == names.DATA_CONTAINER]
    secret = (job.spec.get("storage") or {}).get("credentialsSecret")
    # A plan's name ends with its hash: any plan of this job may stand there.
    plan_name = rf"{re.escape(names.base_name(job.name, job.uid))}-plan-[0-9a-f]+"
    plans = re.findall(plan_name, json.dumps(spec.volumes))
    volumes = [{"name": "plan", "configMap": {"name": name}} for name in plans]
    volumes += [_TMP, *map(_tamed, template.volumes)]
    secrets = [{"name": name} for name in template.image_pull_secrets]
    _check_items("volumes", spec.volumes, volumes)
    _check_items("imagePullSecrets", spec.image_pull_secrets, secrets)
    keys = [{"secretRef": {"name": secret}}] if secret else []
    _check_items("containers[0].env", container.env, [*_ENV, *_items(theirs, "env")])
    _check_items("containers[0].envFrom", container.env_from, [*keys, *_items(theirs, "envFrom")])
    contexts = [c["securityContext"] for c in theirs if "securityContext" in c]
    said = [{"privileged": False}, *map(_tamed, contexts)]
    _check_context("", spec.security_context, _POD_SECURITY, [template.security_context])
    _check_context("containers[0].", container.security_context, _CONTAINER_SECURITY, said)
    # Only the operator writes a status. One of before says nothing of the image.
    placed = None if job.status.placement is None else job.status.placement.data_image
    where, image = "podTemplate.dataImage", template.data_image
    if image is None:
        where, image = "status.placement.dataImage", placed
    if image not in (None, container.image):
        raise SpecError(
            f"{_ROOT}.containers[0].image",
            f"{container.image!r} is not {where} of the job, {image!r}",
        )


def _check_items(field: str, given: Sequence[Any], said: Sequence[Any]) -> None:
    for item in given:
        if item not in said:
            raise SpecError(f"{_ROOT}.{field}", f"{json.dumps(item)} {_REFUSED}")


def _check_context(
    where: str, given: Mapping[str, Any], ours: Mapping[str, Any], theirs: Sequence[Any]
) -> None:
    if not (given.keys() >= ours.keys() and _is_said(given, [ours, *theirs])):
        raise SpecError(f"{_ROOT}.{where}securityContext", f"{json.dumps(given)} {_REFUSED}")


def _is_said(given: Any, said: Sequence[Any]) -> bool:
    """Whether every value stands in one of several maps laid over each other."""
    if not isinstance(given, Mapping):
        return given in said
    maps = [one for one in said if isinstance(one, Mapping)]
    return all(_is_said(value, [m[k] for m in maps if k in m]) for k, value in given.items())


def _items(containers: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """What the job adds to a list of its data container."""
    found = [container.get(key) for container in containers]
    return [item for items in found if isinstance(items, list) for item in items]


def _tamed(part: Any) -> Any:
    """A part of the job's pods without what is refused whoever says it."""
    if not isinstance(part, Mapping):
        return part
    return {key: value for key, value in part.items() if key not in _NEVER}
