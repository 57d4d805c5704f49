"""Logs of a job: of pods that are there through kubectl, of those that are gone from its store.

The store is read in the cluster, by a pod of the job or, where none runs, by one made for it:
whoever asks needs no keys and no way to the store.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from omni_cli.job_log_reader import read_log_reader
from omni_cli.job_read import JobRecord, PodRecord, read_pods
from omni_cli.kubectl import Kubectl, KubectlError, NotReachedError
from omni_contract import names
from omni_contract.errors import OmniError
from omni_contract.names import Exit

_START_S: Final = 120.0
"""How long a pod made for reading may take to start."""
_POLL_S: Final = 0.5
_HOPELESS: Final = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError",
)  # fmt: skip


_NOT_STARTED: Final = ("gated", "pending", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which log is asked for."""

    node: int
    container: str
    attempt: int | None
    """None: the newest."""
    rank: int | None
    """The log of a rank instead of a container."""
    follow: bool
    tail: int | None


def show_all(kubectl: Kubectl, job: JobRecord, request: Request) -> int:
    """The log of every pod there is, each line with its pod's name."""
    pods = read_pods(kubectl, job)
    if not pods:
        raise OmniError(
            f"job {job.name} has no pods now; without --all the logs that are stored are shown"
        )
    # With a selector kubectl shows ten lines of each unless told otherwise.
    tail = -1 if request.tail is None else request.tail
    return _show_there(
        kubectl,
        request,
        f"--selector={names.LABEL_JOB_UID}={job.uid}",
        "--prefix",
        f"--max-log-requests={len(pods)}",
        f"--tail={tail}",
    )


def show(kubectl: Kubectl, job: JobRecord, request: Request) -> int:
    """The log asked for, wherever it is."""
    pods = read_pods(kubectl, job)
    pod = choose_pod(pods, request)
    if pod is not None:
        tail = [] if request.tail is None else [f"--tail={request.tail}"]
        code = _show_there(kubectl, request, pod.name, *tail)
        if not code or pod.word in _NOT_STARTED:
            return code
        print(
            f"kubectl cannot show the log of pod {pod.name}; this is what is stored of it",
            file=sys.stderr,
        )
        request = replace(request, attempt=request.attempt or pod.attempt)
    if not job.status.attempt and not pods:
        raise OmniError(f"job {job.name} has no pods yet; see why: kubectl mmtj status {job.name}")
    _show_stored(kubectl, job, pods, request)
    return Exit.OK


def choose_pod(pods: Sequence[PodRecord], request: Request) -> PodRecord | None:
    """The pod whose log this is; None: it is in the store only. A pod that went on into another
    attempt has one log for all of them, and the store has them apart."""
    if request.rank is not None:
        return None
    there = [pod for pod in pods if pod.index == request.node]
    if request.attempt is not None:
        there = [pod for pod in there if pod.attempt == request.attempt == _born(pod)]
    return max(there, key=lambda pod: pod.attempt, default=None)


def _born(pod: PodRecord) -> int | None:
    """The attempt that a pod was made for, which its name ends with, before its index."""
    found = re.fullmatch(r".*-(\d+)-\d+", pod.name)
    return None if found is None else int(found[1])


def _show_there(kubectl: Kubectl, request: Request, *arguments: str) -> int:
    follow = ["--follow"] if request.follow else []
    container = f"--container={request.container}"
    code = kubectl.pass_on("logs", *arguments, container, *follow)
    return Exit.USER if code else Exit.OK


def _show_stored(
    kubectl: Kubectl, job: JobRecord, pods: Sequence[PodRecord], request: Request
) -> None:
    if request.attempt not in (None, job.status.attempt):
        request = replace(request, follow=False)  # nobody writes there any more
    command = reader_command(job, request)
    running = [pod for pod in pods if pod.word == "running"]
    for pod in sorted(running, key=lambda pod: pod.index != request.node)[:2]:
        try:
            kubectl.exec(pod.name, names.DATA_CONTAINER, *command, holds_stdin=request.follow)
        except NotReachedError:
            continue  # it is just ending, or on a lost node
        else:
            return
    with _reader_pod(kubectl, job) as name:
        kubectl.exec(name, names.DATA_CONTAINER, *command)


def reader_command(job: JobRecord, request: Request) -> list[str]:
    """What prints it in a pod that has the keys of the store."""
    given = {"attempt": request.attempt, "rank": request.rank, "tail": request.tail}
    return [
        "python",
        "-m",
        "omni_dataloader.read_logs",
        f"--job={names.base_name(job.name, job.uid)}",
        f"--node={request.node}",
        f"--container={request.container}",
        *(f"--{option}={value}" for option, value in given.items() if value is not None),
        *(["--follow"] if request.follow else []),
    ]


@contextmanager
def _reader_pod(kubectl: Kubectl, job: JobRecord) -> Iterator[str]:
    """A pod that can read the store of the job, for as long as it is needed."""
    manifest = read_log_reader(kubectl, job)
    label = f"--selector={names.LABEL_LOG_READER}={job.uid}"
    # Left by somebody whose machine went away: it has ended by itself.
    kubectl.run("delete", "pods", label, "--field-selector=status.phase=Succeeded", "--wait=false")
    print(f"no pod of job {job.name} runs: one is made to read its logs", file=sys.stderr)
    name = kubectl.run("create", "--filename=-", "--output=name", stdin=json.dumps(manifest))
    name = name.strip().removeprefix("pod/")
    try:
        _wait_until_running(kubectl, name)
        yield name
    finally:
        kubectl.run("delete", "pod", name, "--wait=false", "--ignore-not-found")


def _wait_until_running(kubectl: Kubectl, name: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        raw = kubectl.get("pod", name)
        pod = PodRecord.of(raw)
        if pod.word == "running":
            return
        why = _why_it_waits(raw) or pod.word
        is_hopeless = pod.word in ("failed", "succeeded") or pod.detail in _HOPELESS
        if is_hopeless or time.monotonic() > deadline:
            raise KubectlError(f"pod {name}, made to read the logs, does not start: {why}")
        time.sleep(_POLL_S)


def _why_it_waits(raw: dict[str, Any]) -> str:
    status = raw.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("message"):
            return f"{waiting.get('reason')}: {waiting['message']}"
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason"))
    return str(status.get("message") or "")
