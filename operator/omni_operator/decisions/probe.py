"""Asks the API server whether it would take the pods of a spec, before any is made: a mistake that
an edit mends must not end a job."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from omni_contract.errors import SpecError
from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER
from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.plan import JobPlan
from omni_contract.records import History
from omni_contract.spec import JobSpec
from omni_operator.api import AlreadyExists, Api, QuotaExceeded, Refused
from omni_operator.decisions.case import edited_fields, read_file
from omni_operator.decisions.steps import Step
from omni_operator.kinds import POD
from omni_operator.render.names import Object, ObjectNames
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from omni_operator.state import JobState, Observed
from omni_operator.status.life import refuse
from omni_planner.compile import compile_plan

_PATH: Final = re.compile(r"(?:metadata|spec)\.[A-Za-z]+(?:\[[^\]]*\]|\.[A-Za-z]+)*")
"""Fields of a pod in the API server's words."""
_IN_CONTAINER: Final = re.compile(
    r"spec\.(?P<kind>containers|initContainers)\[(?P<at>\d+)\]"
    r"(?:\.(?P<field>[A-Za-z]+)(?:\[(?P<item>\d+)\])?(?P<rest>.*))?"
)
_TYPED: Final[Mapping[str, str]] = {
    "metadata.labels": "labels",
    "metadata.annotations": "annotations",
    "spec.nodeSelector": "nodeSelector",
    "spec.tolerations": "tolerations",
    "spec.volumes": "volumes",
    "spec.containers": "containers",
    "spec.imagePullSecrets": "imagePullSecrets",
    "spec.priorityClassName": "priorityClassName",
    "spec.securityContext": "securityContext",
    "spec.terminationGracePeriodSeconds": "terminationGraceSeconds",
}
"""Fields of a pod and where they come from in podTemplate."""
_NOT_THE_POD: Final = (
    "cannot create resource",  # a right that the operator lacks
    "is being terminated",
    "error looking up service account",  # of a namespace that is new
    "does not support dry run",  # a webhook
)


def is_about_the_pod(refusal: Refused) -> bool:
    """Whether a pod is refused for what it is, and not for what is around it."""
    return not any(words in refusal.message for words in _NOT_THE_POD)


async def find_refusal(
    job: JobState, plan: JobPlan | None, settings: Settings, cluster: Api
) -> str:
    """Why the API server takes no pod of the spec of now; empty: it does, or cannot tell.

    `plan` is that of the job's attempt. Pods of a spec that does not differ from it are there.
    """
    try:
        file = read_file(job)
        if plan is not None and not edited_fields(file.spec, plan.spec):
            return ""
        asked = compile_plan(file)
    except SpecError:
        return ""  # That is told without anybody's help.
    pod = probe_pod(job, asked, settings)
    try:
        await cluster.create(POD, pod, dry_run=True)
    except (AlreadyExists, QuotaExceeded):
        return ""
    except Refused as exc:
        if not is_about_the_pod(exc):
            return ""
        fields = dict.fromkeys(typed_fields(exc.message, pod, asked.spec))
        where = ", ".join(fields) or "spec.podTemplate"
        return f"{where}: the API server refuses the pods that this makes: {exc.message}"
    return ""


def tell_unanswered(observed: Observed, message: str) -> Step:
    """What is told of a job that has no pods yet while the API server cannot say whether it takes
    them. It is asked again soon."""
    said = (
        "the API server cannot say now whether it takes the pods of this spec, and is asked again: "
        f"{message}"
    )
    return Step(status=refuse(observed.job.status, observed, said, reason="PodRefused"))


def probe_pod(job: JobState, plan: JobPlan, settings: Settings) -> Object:
    """A pod of the job as all are but for their places. Not the one of rank 0, which needs a
    service account that is made later."""
    name = f"{ObjectNames.of(job).base}-check"
    placed = PlacedPod(name=name, node="", born=job.status.attempt + 1)
    placement = JobPlacement(
        attempt=job.status.attempt + 1, plan_hash=plan.hash, pods=(placed, placed)
    )
    return render_pod(job, plan, placement, 1, settings, History())


def typed_fields(message: str, pod: Object, spec: JobSpec) -> Iterator[str]:
    """The fields that a refusal names, as the user typed them; those that are not theirs are left
    out."""
    for found in _PATH.finditer(message):
        if (typed := _typed(found[0], pod, spec)) is not None:
            yield typed


def _typed(path: str, pod: Object, spec: JobSpec) -> str | None:
    template = "spec.podTemplate"
    inside = _IN_CONTAINER.fullmatch(path)
    if inside is not None:
        return _typed_in_container(inside, pod, spec)
    for ours, theirs in _TYPED.items():
        rest = path.removeprefix(ours)
        if rest == path or rest[:1] not in ("", ".", "["):
            continue
        if ours in ("spec.volumes", "spec.tolerations", "spec.containers"):
            rest = ""  # Ours stand before theirs, so the number is another one.
        return f"{template}.{theirs}{rest}"
    return None


def _typed_in_container(inside: re.Match[str], pod: Object, spec: JobSpec) -> str | None:
    template = spec.pod_template
    containers = pod["spec"][inside["kind"]]
    if int(inside["at"]) >= len(containers):
        return None
    container = containers[int(inside["at"])]
    name, field = container.get("name"), inside["field"]
    is_ours = name in (TRAINER_CONTAINER, DATA_CONTAINER)
    if is_ours and field == "image":
        return f"spec.podTemplate.{'image' if name == TRAINER_CONTAINER else 'dataImage'}"
    item = _item(container, field, inside["item"])
    if name == TRAINER_CONTAINER and field == "env" and item.get("name") in template.env:
        return f"spec.podTemplate.env.{item['name']}"
    if name == TRAINER_CONTAINER and field == "volumeMounts":
        for at, mount in enumerate(template.volume_mounts):
            if mount.get("mountPath") == item.get("mountPath"):
                return f"spec.podTemplate.volumeMounts[{at}]"
    for at, theirs in enumerate(template.containers):
        if theirs.get("name") != name or (field is not None and field not in theirs):
            continue
        steps = "" if field is None else f".{field}"
        if inside["item"] is None or not is_ours:
            number = "" if inside["item"] is None else f"[{inside['item']}]"
            steps += f"{number}{inside['rest'] or ''}"
        return f"spec.podTemplate.containers[{at}]{steps}"
    if field == "envFrom" and spec.storage.credentials_secret is not None:
        return "spec.storage.credentialsSecret"
    return None


def _item(container: Mapping[str, Any], field: str | None, at: str | None) -> Mapping[str, Any]:
    items = container.get(field or "")
    if at is None or not isinstance(items, list) or int(at) >= len(items):
        return {}
    item = items[int(at)]
    return item if isinstance(item, Mapping) else {}
