"""`JobPlacement`: where the pods of one attempt run. Kept in an immutable ConfigMap per attempt."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from omni_contract.spec_run import RestartAction


class PlacedPod(BaseModel):
    """One pod of an attempt. A pod that lives on from an earlier attempt keeps its name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    node: str
    """Kubernetes node."""
    born: int
    """Attempt in which it was created."""
    path: tuple[str, ...] = ()
    """Domains of its node, widest first, one per entry of `JobPlacement.levels`."""


class JobPlacement(BaseModel):
    """The rank map of an attempt: pod i hosts the ranks of node i of the plan."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    attempt: int
    plan_hash: str
    image: str | None = None
    """Of trainers where the job names none; None: in a record of before, whose operator knew."""
    data_image: str | None = None
    """Of data services where the job names none."""
    opened_by: RestartAction | None = None
    """What was done about the attempt before; None at a start or a resume."""
    pods: tuple[PlacedPod, ...]
    """In node order of the plan."""
    spares: tuple[PlacedPod, ...] = ()
    units: tuple[tuple[int, ...], ...] = ()
    """Nodes of the plan that hold the same reorder groups and must be close to each other."""
    levels: tuple[str, ...] = ()
    """Topology levels of the paths, widest first."""
    group_within: str | None = None
    spans: tuple[int, ...] = ()
    """Per unit, domains of level `group_within` that it touches; 1 is what was asked."""
    job_domain: str | None = None
    satisfied: bool = True
    """Whether all that topology asks for holds."""
    node_selector: dict[str, str] = {}
    """Labels asked of the nodes by the queue that admitted the job."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """What the pods tolerate on those nodes, beside what the job says."""

    @property
    def all_pods(self) -> tuple[PlacedPod, ...]:
        """Ranked pods, then spares."""
        return self.pods + self.spares
