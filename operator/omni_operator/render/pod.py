"""The pod of one node of a job: supervisor and data service, gated, without rights of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from omni_contract.names import (
    DATA_CONTAINER,
    DATA_PORT,
    ENV_JOB_UID,
    ENV_LEASE,
    GATE,
    LEASE_TOKEN_DIR,
    PLAN_DIR,
    POD_INFO_DIR,
    RENDEZVOUS_PORT,
    RUN_DIR,
    SHARED_DIR,
    SIDECAR_SOCKET,
    TRAINER_CONTAINER,
)
from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.records import History
from omni_contract.spec import JobSpec
from omni_contract.spec_run import ResourcesSpec
from omni_operator.kinds import POD
from omni_operator.render.merge import merge, merge_container, merge_named
from omni_operator.render.names import Object, ObjectNames, is_spare, metadata, pod_annotations
from omni_operator.settings import Settings
from omni_operator.state import JobState

_TMP_DIR: Final = "/tmp"
_SHM_DIR: Final = "/dev/shm"
_USER_ID: Final = 65532
"""Any but root: pods write into their volumes only."""
_TOKEN_S: Final = 3600
_SOCKET_PERIOD_S: Final = 5
"""How often a kubelet looks for the socket of the data service."""

_STAY_PUT: Final = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Asks autoscalers not to move a pod: that costs the whole job a restart."""
_OS: Final = {"kubernetes.io/os": "linux"}
_NODE_TOLERATIONS: Final = (
    # For ever: the operator decides when a node is lost, not the taint manager.
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
)
_POD_SECURITY: Final[Mapping[str, Any]] = {
    "runAsNonRoot": True,
    "runAsUser": _USER_ID,
    "runAsGroup": _USER_ID,
    "fsGroup": _USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def render_pod(
    job: JobState,
    plan: JobPlan,
    placement: JobPlacement,
    index: int,
    settings: Settings,
    history: History,
) -> Object:
    """The pod at `index` of `placement.all_pods`, with what the user adds laid over it."""
    spec, template = plan.spec, plan.spec.pod_template
    # What the operator is told may have changed since the attempt began.
    settings = replace(
        settings,
        image=placement.image or settings.image,
        data_image=placement.data_image or settings.data_image,
    )
    name = placement.all_pods[index].name
    assert len(name) < 64, f"{name} is no host name"
    spare = is_spare(placement, index)
    beats = index == 0 or spare
    meta = metadata(job, name)
    meta["labels"] = {**template.labels, **meta["labels"]}
    meta["annotations"] = {
        **_STAY_PUT,
        **template.annotations,
        **pod_annotations(job, placement, index, settings, history),
    }
    # A plan's own hash is computed of all its text.
    config_map = ObjectNames.of(job).plan(placement.plan_hash)
    volumes = _volumes(spec, plan=config_map, with_token=beats)
    pod: Object = {
        "schedulingGates": [{"name": GATE}],
        "nodeSelector": node_selector(spec, placement.node_selector),
        "tolerations": tolerations(spec, placement.tolerations),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": template.termination_grace_seconds,
        "hostname": name,
        "subdomain": ObjectNames.of(job).service,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": merge(_POD_SECURITY, template.security_context),
        "initContainers": [_data(spec, settings, spare=spare)],
        "containers": [_trainer(job, spec, settings, beats=beats), *_added(spec)],
        "volumes": merge_named(volumes, template.volumes, "name"),
    }
    if beats:
        pod["serviceAccountName"] = ObjectNames.of(job).rank0
    if template.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in template.image_pull_secrets]
    if priority_class := priority_class_of(spec, settings):
        pod["priorityClassName"] = priority_class
    return {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": meta, "spec": pod}


def render_template(job: JobState, spec: JobSpec, settings: Settings) -> Object:
    """What a quota system has to know of the pods of a job: what each asks for, and of which nodes.

    All are alike in that.
    """
    template = spec.pod_template
    sidecar, trainer = _data(spec, settings, spare=True), _trainer(job, spec, settings, beats=False)
    pod: Object = {
        "restartPolicy": "Never",
        "nodeSelector": node_selector(spec, {}),
        "tolerations": tolerations(spec),
        "initContainers": [_brief(sidecar)],
        "containers": [_brief(container) for container in (trainer, *_added(spec))],
    }
    if priority_class := priority_class_of(spec, settings):
        pod["priorityClassName"] = priority_class
    return {"metadata": {"labels": dict(template.labels)}, "spec": pod}


def priority_class_of(spec: JobSpec, settings: Settings) -> str | None:
    """Name of the priority class of a job's pods."""
    return spec.pod_template.priority_class_name or settings.priority_class


def has_gpus(resources: ResourcesSpec) -> bool:
    """Whether pods ask for GPUs. With device auto they do: a cluster's nodes differ."""
    return resources.device != "cpu"


def tolerations(spec: JobSpec, queue: Iterable[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """Taints that the pods of a job tolerate; `queue`: those of the nodes that it gives."""
    gpu = {"key": spec.resources.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    return [
        *_NODE_TOLERATIONS,
        *([gpu] if has_gpus(spec.resources) else []),
        *spec.pod_template.tolerations,
        *queue,
    ]


def node_selector(spec: JobSpec, queue: Mapping[str, str]) -> dict[str, str]:
    """Labels that the nodes of a job must have; `queue`: those that its queue asks for.

    Never empty: the patch that lifts the gate adds to it.
    """
    return {**_OS, **spec.pod_template.node_selector, **queue}


def _data(spec: JobSpec, settings: Settings, *, spare: bool) -> Object:
    """The data service, a native sidecar. It is ready, no more than that, once it has its socket:
    were the trainer to start only then, the supervisor could not tell it whom to serve."""
    container = _container(spec, DATA_CONTAINER, "omni_dataloader.pod") | {
        "image": spec.pod_template.data_image or settings.data_image or settings.image,
        "imagePullPolicy": settings.data_image_pull_policy or settings.image_pull_policy,
        "restartPolicy": "Always",
        "ports": [{"name": "data", "containerPort": DATA_PORT}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "readinessProbe": {
            "exec": {"command": ["test", "-S", SIDECAR_SOCKET]},
            "periodSeconds": _SOCKET_PERIOD_S,
            "failureThreshold": 1,
        },
    }
    container = _overridden(container, spec)
    if spare:  # without a rank it has no socket, and is as ready as it will be
        container.pop("readinessProbe", None)
    return container


def _trainer(job: JobState, spec: JobSpec, settings: Settings, *, beats: bool) -> Object:
    resources = spec.resources
    container = _container(spec, TRAINER_CONTAINER, "omni_trainer.pod")
    container["image"] = spec.pod_template.image or settings.image
    container["imagePullPolicy"] = settings.image_pull_policy
    container["ports"] = [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}]
    container["env"].append({"name": ENV_JOB_UID, "value": job.uid})
    # Little, so that any GPU node has it; not nothing, or the data service would starve the ranks.
    container["resources"] = {
        "requests": {
            "cpu": f"{500 * resources.ranks_per_node}m",
            "memory": f"{resources.ranks_per_node}Gi",
        }
    }
    if has_gpus(resources):
        container["volumeMounts"].append({"name": "shm", "mountPath": _SHM_DIR})
    if beats:
        lease = f"{job.key.namespace}/{ObjectNames.of(job).progress_lease}"
        container["env"].append({"name": ENV_LEASE, "value": lease})
        token = {"name": "token", "mountPath": LEASE_TOKEN_DIR, "readOnly": True}
        container["volumeMounts"].append(token)
    env = [{"name": name, "value": value} for name, value in spec.pod_template.env.items()]
    mounts = spec.pod_template.volume_mounts
    container = merge_container(container, {"env": env, "volumeMounts": mounts})
    container = _overridden(container, spec)
    if has_gpus(resources):
        # After the user's: a rank without its GPU cannot start.
        gpus = {resources.gpu_resource: str(resources.ranks_per_node)}
        container = merge(container, {"resources": {"limits": gpus}})
    return container


def _container(spec: JobSpec, name: str, module: str) -> Object:
    """What both containers have."""
    container: Object = {
        "name": name,
        "command": ["python", "-m", module],
        "env": [
            # The user id has no entry in passwd, and libraries ask for a home and a name.
            {"name": "HOME", "value": _TMP_DIR},
            {"name": "USER", "value": "omni"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_DIR, "readOnly": True},
            {"name": "pod", "mountPath": POD_INFO_DIR, "readOnly": True},
            {"name": "shared", "mountPath": SHARED_DIR},
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "tmp", "mountPath": _TMP_DIR},
        ],
        "securityContext": dict(_CONTAINER_SECURITY),
        # The API server's default is to say nothing where a container wrote nothing itself.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if spec.storage.credentials_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": spec.storage.credentials_secret}}]
    return container


def _added(spec: JobSpec) -> list[Object]:
    """Containers of the user's own."""
    ours = (TRAINER_CONTAINER, DATA_CONTAINER)
    return [c for c in spec.pod_template.containers if c["name"] not in ours]


def _brief(container: Object) -> Object:
    kept = ("name", "image", "resources", "restartPolicy")
    return {key: container[key] for key in kept if key in container}


def _overridden(container: Object, spec: JobSpec) -> Object:
    """One of our containers with what the user says of it."""
    for theirs in spec.pod_template.containers:
        if theirs["name"] == container["name"]:
            container = merge_container(container, theirs)
    return container


def _volumes(spec: JobSpec, *, plan: str, with_token: bool) -> list[Object]:
    annotations = {"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}
    volumes: list[Object] = [
        {"name": "plan", "configMap": {"name": plan}},
        {"name": "pod", "downwardAPI": {"items": [annotations]}},
        {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if has_gpus(spec.resources):
        # NCCL passes data between the GPUs of a node here; a container's own has 64 MiB.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}})
    if with_token:
        volumes.append({"name": "token", "projected": {"sources": _token_sources()}})
    return volumes


def _token_sources() -> list[Object]:
    """What a client in a pod needs, as an automounted token has it."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    certificate = {"key": "ca.crt", "path": "ca.crt"}
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [certificate]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
