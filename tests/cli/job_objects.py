"""Objects of a cluster as kubectl shows them, and a PATH with a kubectl that serves them."""

import base64
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from omni_contract import names
from omni_contract.packed import pack
from omni_contract.placement import JobPlacement, PlacedPod
from omni_operator.render.log_reader import with_log_reader
from omni_operator.render.objects import render_placement
from tests.contract.jobs import DEMO
from tests.operator.rendering import SETTINGS, job_state, place_on, plan_of

Object = dict[str, Any]
UID = "5d1ce0a2-0000-4000-8000-000000000001"
T0 = "2026-01-01T08:00:00Z"


def condition(kind: str, status: str, reason: str, message: str = "as it should") -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": T0,
    }


def a_job(name: str = "stamps", *, status: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": name,
            "namespace": "train",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": T0,
        },
        "spec": DEMO["spec"] | spec,
        "status": status if status is not None else {},
    }


def running_status(**changes: Any) -> Object:
    status: Object = {
        "observedGeneration": 1,
        "phase": "Running",
        "conditions": [
            condition("Running", "True", "AllPodsRun", "2 of 2 pods run"),
            condition("Accepted", "True", "Accepted"),
            condition("Placed", "True", "Placed"),
            condition("Failed", "False", "Lives"),
        ],
        "attempt": 2,
        "generation": 1,
        "restarts": 2,
        "budget": {"user": 1, "infrastructure": 1, "withoutProgress": 0, "highestStep": 40},
        "progress": {
            "step": 60,
            "numSteps": 120,
            "tokens": 600_000,
            "tokensPerSecond": 5000.0,
            "loss": 4.5,
            "checkpointStep": 40,
        },
        "goodput": 0.913,
        "planHash": "0123456789abcdef",
        "numNodes": 2,
        "openedBy": "ReplacePod",
        "openedAt": "2026-01-01T08:10:00Z",
        "startTime": "2026-01-01T08:01:00Z",
        "incidents": [an_incident("2026-01-01T08:09:00Z")],
        "placement": {
            "configMap": "stamps-5d1ce-placement-2",
            "nodes": 2,
            "spares": 1,
            "level": "rack",
            "jobDomain": "zone-a",
            "groupsInOneDomain": 1,
            "numGroups": 2,
        },
    }
    return status | changes


def an_incident(time: str, **changes: Any) -> Object:
    incident: Object = {
        "time": time,
        "fault": "NodeLost",
        "action": "ReplacePod",
        "attempt": 1,
        "generation": 0,
        "message": "node n7 is not Ready for 30 s",
        "kubernetesNode": "n7",
        "seconds": {"detect": 30.0, "decide": 0.5, "terminate": 1.5, "schedule": 4.0, "start": 4.0},
    }
    return incident | changes


def a_pod(
    name: str, index: int | None, *, attempt: int = 2, phase: str = "Running", **spec: Any
) -> Object:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {names.LABEL_JOB_UID: UID},
            "annotations": {
                names.ANNOTATION_ATTEMPT: str(attempt),
                names.ANNOTATION_INDEX: "" if index is None else str(index),
            },
        },
        "spec": {"nodeName": "n1"} | spec,
        "status": {"phase": phase},
    }


def an_event(time: str, reason: str, message: str, **changes: Any) -> Object:
    event: Object = {
        "kind": "Event",
        "metadata": {"name": f"stamps.{reason}", "creationTimestamp": time},
        "involvedObject": {"uid": UID},
        "type": "Normal",
        "reason": reason,
        "message": message,
        "eventTime": time,
        "lastTimestamp": None,
    }
    return event | changes


PLACEMENT = JobPlacement(
    attempt=2,
    plan_hash="0123456789abcdef",
    pods=(
        PlacedPod(name="stamps-5d1ce-1-0", node="n1", born=1, path=("zone-a", "r1", "n1")),
        PlacedPod(name="stamps-5d1ce-2-1", node="n12", born=2, path=("zone-a", "r10", "n12")),
    ),
    spares=(PlacedPod(name="stamps-5d1ce-1-2", node="n2", born=1, path=("zone-a", "r2", "n2")),),
    units=((0, 1),),
    levels=("topology.kubernetes.io/zone", "rack", "node"),
    group_within="rack",
    spans=(2,),
    job_domain="zone-a",
    satisfied=False,
)


def placement_map(placement: JobPlacement = PLACEMENT) -> Object:
    pieces = pack("placement.json", placement.model_dump_json())
    return {
        "kind": "ConfigMap",
        "metadata": {
            "name": f"stamps-5d1ce-placement-{placement.attempt}",
            "labels": {names.LABEL_JOB_UID: UID},
            "creationTimestamp": T0,
        },
        "binaryData": {key: base64.b64encode(piece).decode() for key, piece in pieces.items()},
    }


def log_reader_map(raw: Object = DEMO, *, attempt: int = 2) -> Object:
    """The ConfigMap of a placement as the operator writes it for a job, with its log reader."""
    job, plan = job_state(raw, namespace="train", uid=UID), plan_of(raw)
    placement = place_on(job, plan, attempt=attempt)
    return with_log_reader(render_placement(job, placement), job, plan, placement, SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeKubectl:
    """The folder of `tests.fakes.kubectl_program`."""

    folder: Path

    @classmethod
    def install(cls, folder: Path) -> Self:
        """Make it; the folder `bin` in it belongs first on PATH."""
        program = folder / "bin" / "kubectl"
        program.parent.mkdir()
        root = Path(__file__).resolve().parents[2]
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" '
            '-m tests.fakes.kubectl_program "$@"\n'
        )
        program.chmod(0o755)
        return cls(folder=folder)

    @property
    def environ(self) -> dict[str, str]:
        """What a program needs to find it."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "FAKE_KUBECTL": str(self.folder)}

    def serve(self, *objects: Object, then: tuple[Object, ...] = ()) -> None:
        """Hold these objects. Each of `then` stands alone after one more call."""
        (self.folder / "objects.json").write_text(json.dumps(objects))
        for number, one in enumerate(then, 1):
            (self.folder / f"objects.json.{number}").write_text(json.dumps([one]))

    def refuse(self, stderr: str, verb: str = "") -> None:
        """Fail every call, or those with a verb, with these words."""
        (self.folder / f"refusal{verb and '-'}{verb}.txt").write_text(stderr)

    def notify(self, words: str) -> None:
        """Let programs in pods say this on stderr, and go on."""
        (self.folder / "notice.txt").write_text(words)

    @property
    def pods(self) -> list[Object]:
        """The pods that are there."""
        objects = json.loads((self.folder / "objects.json").read_text())
        return [one for one in objects if one["kind"] == "Pod"]

    def start_pods_as(self, status: Object) -> None:
        """What becomes of a pod that is created; without it it runs."""
        (self.folder / "status.json").write_text(json.dumps(status))

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of every call so far."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
