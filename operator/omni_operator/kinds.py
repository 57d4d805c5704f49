"""The kinds of object the operator reads and writes, and their place in the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_contract.names import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in an object's apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Address of one object, of all in a namespace or, without one, of all."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        room = f"/namespaces/{namespace}" if self.is_namespaced and namespace else ""
        return f"{root}{room}/{self.plural}" + (f"/{name}" if name else "")


POD: Final = Kind(group="", version="v1", plural="pods", kind="Pod")
NODE: Final = Kind(group="", version="v1", plural="nodes", kind="Node", is_namespaced=False)
CONFIG_MAP: Final = Kind(group="", version="v1", plural="configmaps", kind="ConfigMap")
SERVICE: Final = Kind(group="", version="v1", plural="services", kind="Service")
SERVICE_ACCOUNT: Final = Kind(
    group="", version="v1", plural="serviceaccounts", kind="ServiceAccount"
)
EVENT: Final = Kind(group="", version="v1", plural="events", kind="Event")
LEASE: Final = Kind(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease")
ROLE: Final = Kind(
    group="rbac.authorization.k8s.io", version="v1", plural="roles", kind="Role"
)  # fmt: skip
ROLE_BINDING: Final = Kind(
    group="rbac.authorization.k8s.io", version="v1", plural="rolebindings", kind="RoleBinding"
)
JOB: Final = Kind(group=GROUP, version=VERSION, plural=PLURAL, kind=KIND)
WORKLOAD: Final = Kind(
    group="kueue.x-k8s.io", version="v1beta2", plural="workloads", kind="Workload"
)
RESOURCE_FLAVOR: Final = Kind(
    group="kueue.x-k8s.io",
    version="v1beta2",
    plural="resourceflavors",
    kind="ResourceFlavor",
    is_namespaced=False,
)
PRIORITY_CLASS: Final = Kind(
    group="scheduling.k8s.io",
    version="v1",
    plural="priorityclasses",
    kind="PriorityClass",
    is_namespaced=False,
)

KINDS: Final[tuple[Kind, ...]] = (
    POD, NODE, CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, EVENT, LEASE, ROLE, ROLE_BINDING, JOB,
    WORKLOAD, RESOURCE_FLAVOR, PRIORITY_CLASS,
)  # fmt: skip


def kind_of(body: Mapping[str, Any]) -> Kind:
    """Kind of a whole object, from its apiVersion and kind."""
    for kind in KINDS:
        if kind.api_version == body["apiVersion"] and kind.kind == body["kind"]:
            return kind
    raise KeyError(f"{body['apiVersion']} {body['kind']} is no kind that the operator handles")
