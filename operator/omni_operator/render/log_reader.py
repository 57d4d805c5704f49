"""The pod in which somebody reads the stored logs of a job that has no pods left.

The operator never makes it: it stands in the ConfigMap of the placement for whoever may.
"""

import json
from typing import Final

from omni_contract.log_store import LOG_READER_FILE
from omni_contract.names import LABEL_JOB, LABEL_LOG_READER
from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.records import History
from omni_operator.kinds import POD
from omni_operator.render.names import Object, ObjectNames, metadata
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from omni_operator.state import JobState

_LIFE_S: Final = 600
_KEPT: Final = (
    "nodeSelector", "tolerations", "securityContext", "imagePullSecrets", "enableServiceLinks",
    "automountServiceAccountToken",
)  # fmt: skip
_KEPT_OF_CONTAINER: Final = (
    "name", "image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "securityContext",
)  # fmt: skip
_VOLUMES_OF_RANKS: Final = ("pod", "shared", "run")


def with_log_reader(
    config_map: Object,
    job: JobState,
    plan: JobPlan,
    placement: JobPlacement,
    settings: Settings,
) -> Object:
    """The ConfigMap of a placement with the pod in it."""
    pod = render_log_reader(job, plan, placement, settings)
    return config_map | {"data": {LOG_READER_FILE: json.dumps(pod, sort_keys=True)}}


def render_log_reader(
    job: JobState, plan: JobPlan, placement: JobPlacement, settings: Settings
) -> Object:
    """A pod with the data service's image, storage keys and volumes that does nothing for a while.

    It counts as no pod of the job: the job owns it, and does not control it.
    """
    spec = render_pod(job, plan, placement, 0, settings, History())["spec"]
    (data,) = spec["initContainers"]
    mounts = [m for m in data["volumeMounts"] if m["name"] not in _VOLUMES_OF_RANKS]
    container = {key: data[key] for key in _KEPT_OF_CONTAINER if key in data} | {
        "volumeMounts": mounts,
        "command": ["sleep", str(_LIFE_S)],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    }
    names = {mount["name"] for mount in mounts}
    meta = metadata(job, "")
    (owner,) = meta["ownerReferences"]
    return {
        "apiVersion": POD.api_version,
        "kind": POD.kind,
        "metadata": {
            "generateName": f"{ObjectNames.of(job).base}-logs-",
            "namespace": job.key.namespace,
            "labels": {LABEL_JOB: job.key.name, LABEL_LOG_READER: job.uid},
            "ownerReferences": [owner | {"controller": False}],
        },
        "spec": {key: spec[key] for key in _KEPT if key in spec}
        | {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_S + 60,
            "terminationGracePeriodSeconds": 1,  # what it runs heeds no signal
            "containers": [container],
            "volumes": [volume for volume in spec["volumes"] if volume["name"] in names],
        },
    }
