"""Whether a node is lost, or wants its pods off. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from omni_contract.spec import JobSpec
from omni_operator.render.pod import tolerations
from omni_operator.state import NodeState, Observed, Taint

OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Taint by which people say that a node is off."""
_HEALTH_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_TAINTS_GO_S: Final = 60.0
"""The node controller takes them away at a limited rate."""


def is_in_doubt(node: NodeState, now_s: float) -> bool:
    """Whether a node is not Ready, or was not just now: the taints that say so go later than the
    condition, and until then nothing is scheduled there."""
    if node.ready != "True":
        return True
    is_new = now_s - node.ready_since_s < _TAINTS_GO_S
    return is_new and any(taint.key in _HEALTH_TAINTS for taint in node.taints)


def is_node_lost(name: str, observed: Observed, spec: JobSpec) -> bool:
    """Whether nothing on a node runs any more, as far as can be told from outside.

    Not Ready (or gone from the API) for nodeLostAfterSeconds while the job made no step; at once
    where it has the out-of-service taint. Never while the operator's own watch is unhealthy.
    """
    left_s = lost_in_s(name, observed, spec)
    return left_s is not None and left_s <= 0


def is_silent(name: str, observed: Observed) -> bool:
    """Whether nobody on a node will carry out a deletion: it is gone or unreachable, or people say
    that it is off. A kubelet that says of itself that it is not Ready still ends its pods."""
    node = observed.nodes.get(name)
    return node is None or node.ready == "Unknown" or _out_of_service(node) is not None


def lost_in_s(name: str, observed: Observed, spec: JobSpec) -> float | None:
    """Seconds until a node counts as lost if nothing changes; None: it is well, or who knows."""
    if not observed.watch_is_healthy:
        return None
    node, now_s = observed.nodes.get(name), observed.now_s
    limit_s = spec.restart.node_lost_after_seconds
    if node is not None and _out_of_service(node) is not None:
        return 0
    if node is not None and node.ready == "True":
        return None
    since_s = now_s - limit_s if node is None else node.ready_since_s
    left_s = since_s + limit_s - now_s
    progress = observed.progress
    if progress is None or observed.placement is None:
        return left_s
    if progress.heartbeat.attempt == observed.placement.attempt:
        # A step seen after the node was said to be down shows that its pods live, so the next one
        # gets the time that steps take. Heartbeats are read late: that alone proves nothing.
        proved = node is not None and progress.step_since_s > since_s
        step_s = 2 * (progress.heartbeat.step_s or 0) if proved else 0
        left_s = max(left_s, progress.step_since_s + max(limit_s, step_s) - now_s)
    return left_s


def describe_loss(name: str, observed: Observed) -> tuple[str, float]:
    """What a lost node looks like, as the end of a sentence, and since when."""
    node, now_s = observed.nodes.get(name), observed.now_s
    if node is None:
        return "is gone from the API", now_s
    if (taint := _out_of_service(node)) is not None:
        return f"has the taint {_taint_text(taint)}", taint.since_s or now_s
    stood_s = now_s - node.ready_since_s
    return f"has Ready={node.ready} for {stood_s:.0f} s", node.ready_since_s


def wants_pods_off(name: str, observed: Observed, spec: JobSpec) -> str | None:
    """Why the job should leave a node that is alive, as the end of a sentence; None: it may
    stay."""
    node = observed.nodes.get(name)
    if node is None:
        return None
    if node.is_deleting:
        return "is being deleted"
    if node.is_cordoned:
        return "is cordoned"
    taint = next(_untolerated(node, spec), None)
    return None if taint is None else f"has the taint {_taint_text(taint)}"


def unwanted_since_s(node: NodeState, now_s: float) -> float:
    """Since when a node wants its pods off. A cordon is a taint, too: the node lifecycle controller
    writes when it came."""
    times = [
        taint.since_s
        for taint in node.taints
        if taint.since_s is not None
        and (taint.effect == "NoExecute" or taint.key == "node.kubernetes.io/unschedulable")
    ]
    return max(times, default=now_s)


def tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Whether a pod with this toleration may stay where the taint is."""
    exists = toleration.get("operator") == "Exists"
    key, effect = toleration.get("key") or "", toleration.get("effect") or ""
    if effect not in ("", taint.effect) or (key != taint.key and not (exists and not key)):
        return False
    return exists or (toleration.get("value") or "") == taint.value


def _out_of_service(node: NodeState) -> Taint | None:
    return next((taint for taint in node.taints if taint.key == OUT_OF_SERVICE), None)


def _untolerated(node: NodeState, spec: JobSpec) -> Iterator[Taint]:
    for taint in node.taints:
        if taint.effect == "NoExecute" and not any(tolerates(t, taint) for t in tolerations(spec)):
            yield taint


def _taint_text(taint: Taint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"{taint.key}{value}:{taint.effect}"
