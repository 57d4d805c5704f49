"""The objects of an attempt other than its pods, and how its ConfigMaps are read again."""

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from omni_contract.names import (
    DATA_PORT,
    LABEL_JOB_UID,
    PLACEMENT_FILE,
    PLAN_FILE,
    RENDEZVOUS_PORT,
)
from omni_contract.packed import pack, unpack
from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_operator.kinds import CONFIG_MAP, LEASE, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT
from omni_operator.render.names import Object, ObjectNames, metadata
from omni_operator.state import JobState

D = TypeVar("D")

_WAY_OUT: Final = (
    "run the version of the operator that wrote it, or delete the ConfigMap and restart the job"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedObjects:
    """All that the pods of an attempt need to be there."""

    plan: Object
    """ConfigMap, immutable: created, never applied."""
    lease: Object
    """Created, never applied: what rank 0 writes into it stays."""
    service: Object
    service_account: Object
    role: Object
    role_binding: Object
    """Applied after its role: nobody may bind what cannot be shown to be theirs to give."""

    @property
    def applied(self) -> tuple[Object, ...]:
        """Those that server-side apply keeps as they are here, in any order."""
        return (self.service, self.service_account, self.role)

    @property
    def created(self) -> tuple[Object, ...]:
        """Those that are made once."""
        return (self.plan, self.lease)


def render_objects(job: JobState, plan: JobPlan) -> RenderedObjects:
    """The objects of an attempt that runs this plan."""
    return RenderedObjects(
        plan=render_plan(job, plan),
        lease=_lease(job),
        service=_service(job),
        service_account=_service_account(job),
        role=_role(job),
        role_binding=_role_binding(job),
    )


def render_plan(job: JobState, plan: JobPlan) -> Object:
    """The ConfigMap of a plan, which pods mount."""
    return _config_map(job, ObjectNames.of(job).plan(plan.hash), PLAN_FILE, plan.to_json())


def render_placement(job: JobState, placement: JobPlacement) -> Object:
    """The ConfigMap of the placement of an attempt."""
    name = ObjectNames.of(job).placement(placement.attempt)
    return _config_map(job, name, PLACEMENT_FILE, placement.model_dump_json())


def read_plan(raw: Mapping[str, Any]) -> JobPlan:
    """The plan in a ConfigMap. Raises ValueError where it is none of this version."""
    return _read(JobPlan.parse, PLAN_FILE, raw)


def read_placement(raw: Mapping[str, Any]) -> JobPlacement:
    """The placement in a ConfigMap. Raises ValueError where it is none of this version."""
    return _read(JobPlacement.model_validate_json, PLACEMENT_FILE, raw)


def _config_map(job: JobState, name: str, document: str, text: str) -> Object:
    pieces = pack(document, text)
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": metadata(job, name),
        "immutable": True,
        "binaryData": {key: base64.b64encode(piece).decode() for key, piece in pieces.items()},
    }


def _read(parse: Callable[[str], D], document: str, raw: Mapping[str, Any]) -> D:
    name = raw["metadata"]["name"]
    try:
        pieces = {key: base64.b64decode(text) for key, text in raw.get("binaryData", {}).items()}
        return parse(unpack(document, pieces))
    except KeyError:
        raise ValueError(
            f"ConfigMap {name}: no key of binaryData begins with {document}.gz; {_WAY_OUT}"
        ) from None
    except (OSError, EOFError, ValueError, zlib.error) as exc:  # all but ValueError: gzip's
        raise ValueError(
            f"ConfigMap {name}: {document} cannot be read: {exc}; {_WAY_OUT}"
        ) from None


def _service(job: JobState) -> Object:
    return {
        "apiVersion": SERVICE.api_version,
        "kind": SERVICE.kind,
        "metadata": metadata(job, ObjectNames.of(job).service),
        "spec": {
            "clusterIP": "None",
            # Pods find each other while they start, long before they are ready.
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB_UID: job.uid},
            "ports": [
                {"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP"},
                {"name": "data", "port": DATA_PORT, "protocol": "TCP"},
            ],
        },
    }


def _lease(job: JobState) -> Object:
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": metadata(job, ObjectNames.of(job).progress_lease),
        "spec": {},
    }


def _service_account(job: JobState) -> Object:
    return {
        "apiVersion": SERVICE_ACCOUNT.api_version,
        "kind": SERVICE_ACCOUNT.kind,
        "metadata": metadata(job, ObjectNames.of(job).rank0),
        "automountServiceAccountToken": False,
    }


def _role(job: JobState) -> Object:
    names = ObjectNames.of(job)
    return {
        "apiVersion": ROLE.api_version,
        "kind": ROLE.kind,
        "metadata": metadata(job, names.rank0),
        "rules": [
            {
                "apiGroups": [LEASE.group],
                "resources": [LEASE.plural],
                "resourceNames": [names.progress_lease],
                "verbs": ["get", "patch"],
            }
        ],
    }


def _role_binding(job: JobState) -> Object:
    name = ObjectNames.of(job).rank0
    return {
        "apiVersion": ROLE_BINDING.api_version,
        "kind": ROLE_BINDING.kind,
        "metadata": metadata(job, name),
        "roleRef": {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": name},
        "subjects": [{"kind": SERVICE_ACCOUNT.kind, "name": name, "namespace": job.key.namespace}],
    }
