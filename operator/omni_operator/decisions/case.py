"""One look at one job: what is observed, the spec it asks for now and the status as it would be
written. Decisions pass it along. Pure."""

from dataclasses import dataclass, replace
from typing import Final

from pydantic.alias_generators import to_camel

from omni_contract.errors import SpecError
from omni_contract.names import API_VERSION, KIND
from omni_contract.plan import JobPlan
from omni_contract.spec import Job, JobSpec
from omni_contract.status import JobStatus
from omni_operator.decisions.steps import Step
from omni_operator.settings import Settings
from omni_operator.state import JobState, Observed, PodFault
from omni_operator.status.live import refresh
from omni_planner.compile import compile_plan

_OF_PODS: Final = ("storage", "resources", "pod_template", "topology", "restart")
"""Fields that may be edited and that the pods, or their places, go by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a decision starts from."""

    observed: Observed
    settings: Settings
    spec: JobSpec
    """As it is now; restarts, deadlines and ends go by it. Pods go by the plan of their attempt."""
    file: Job | None
    """The job file of now; None: it is invalid and `spec` is that of the plan."""
    faults: tuple[PodFault, ...] = ()
    """All that is wrong with the pods of the attempt."""

    @property
    def status(self) -> JobStatus:
        """The status so far."""
        return self.observed.job.status

    def tell(self, status: JobStatus) -> "Case":
        """The same case with more in its status."""
        job = replace(self.observed.job, status=status)
        return replace(self, observed=replace(self.observed, job=job))

    def look(self) -> JobStatus:
        """The status with all that a look at the pods tells."""
        return refresh(self.status, self.observed, self.spec, self.faults)

    def transition(self, status: JobStatus, plan: JobPlan | None = None) -> Step:
        """A step that only writes a status, after which everything is looked at anew."""
        return Step(status=status, plan=plan, is_transition=True, requeue_after_s=0)

    def new_plan(self) -> JobPlan | None:
        """The plan of the spec of now; that of the attempt while the spec is invalid."""
        return self.observed.plan if self.file is None else compile_plan(self.file)

    def plan(self) -> JobPlan | None:
        """The plan of the attempt; None where it is lost and the spec gives another one by now."""
        if self.observed.plan is not None or self.file is None:
            return self.observed.plan
        nodes = self.status.num_nodes or self.spec.resources.nodes
        plan = plan_on(self.file, nodes)
        return plan if plan.hash == self.status.plan_hash else None


def edited_fields(spec: JobSpec, planned: JobSpec) -> list[str]:
    """Fields of the spec of now that differ from those that the pods go by, as the user types them.
    What only the operator goes by counts at once and is left out."""
    on_as_many = spec.resources.model_copy(update={"nodes": planned.resources.nodes})
    spec = spec.model_copy(update={"resources": on_as_many})  # Shrunk, it runs on fewer.
    pairs = {name: (getattr(spec, name), getattr(planned, name)) for name in _OF_PODS}
    return [f"spec.{to_camel(name)}" for name, (now, then) in pairs.items() if now != then]


def read_file(job: JobState) -> Job:
    """The job file that a job object holds. Raises SpecError."""
    return Job.read(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": job.key.name, "namespace": job.key.namespace},
            "spec": job.raw_spec,
        }
    )


def is_valid(job: JobState) -> bool:
    """Whether a job object holds a job file."""
    try:
        read_file(job)
    except SpecError:
        return False
    return True


def plan_on(file: Job, nodes: int) -> JobPlan:
    """The plan of a job on so many nodes, with the same global batch."""
    if nodes == file.spec.resources.nodes:
        return compile_plan(file)
    document = file.model_dump(by_alias=True, mode="json")
    document["spec"]["resources"]["nodes"] = nodes
    return compile_plan(Job.read(document))
