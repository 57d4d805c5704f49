"""Where the logs of a job's pods are: in a pod as files, in the job's store as objects.

A file is LOG_FOLDER/NAME.log of the run folder. In the store, beside the checkpoints, lies

    logs/JOB/attempt-0002/node-0003/POD.BEGUN/STREAM/OFFSET

with JOB as `names.base_name`, `spare` for a pod without a node of the plan, and in each object the
bytes of the file from that offset on. What lies between two objects was dropped. BEGUN, such as
20261130T150251Z, tells pods apart that had one name after each other.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, Self

LOG_FOLDER: Final = "logs"
LOG_READER_FILE: Final = "log-reader.json"
"""In the ConfigMap of a placement: a pod that can read the job's logs in its store."""

NOTICE: Final = "note: "
"""What a reader of stored logs says on stderr begins with it where it does not end the reader."""

Kind = Literal["trainer", "data", "nursery", "rank"]

_FILE = re.compile(r"(trainer|data|nursery|rank)-(\d+|spare)\.(\d+)(?:\.(\d+))?\.log")
_OBJECT = re.compile(
    r"attempt-(\d+)/(?:node-(\d+)|spare)/([^/]+?)(?:\.(\d{8}T\d{6}Z))?/([^/]+)/(\d+)"
)
_ATTEMPT = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One output of a pod, in one attempt."""

    kind: Kind
    """trainer and data: what these containers say. nursery: what the ranks' parent says."""
    number: int | None
    """The rank, of the others the node of the plan; None: the pod is a spare."""
    attempt: int
    generation: int | None = None
    """Of ranks only: each generation has its own."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a file's name; None: this is no log that is stored."""
        found = _FILE.fullmatch(name)
        if found is None:
            return None
        kind, number, attempt, generation = found.groups()
        if (kind == "rank") == (generation is None):
            return None
        return cls(
            kind=kind,  # type: ignore[arg-type]
            number=None if number == "spare" else int(number),
            attempt=int(attempt),
            generation=None if generation is None else int(generation),
        )

    @property
    def name(self) -> str:
        """The file's name."""
        number = "spare" if self.number is None else self.number
        generation = "" if self.generation is None else f".{self.generation}"
        return f"{self.kind}-{number}.{self.attempt}{generation}.log"

    @property
    def stream(self) -> str:
        """Its name below its pod's in the store."""
        return f"rank-{self.number}.{self.generation}" if self.kind == "rank" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where the logs of one pod and attempt are stored."""

    job: str
    attempt: int
    node: int | None
    """Of the plan; None: a spare."""
    pod: str
    begun: str | None = None
    """When it began to store logs, as `begun` writes it; None: by a version that did not say."""

    @property
    def folder(self) -> str:
        """Relative to the folder of the checkpoints. Names in order are pods in order."""
        node = "spare" if self.node is None else f"node-{self.node:04d}"
        begun = "" if self.begun is None else f".{self.begun}"
        return f"{attempt_folder(self.job, self.attempt)}/{node}/{self.pod}{begun}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBlock:
    """An object with a part of a log."""

    place: LogPlace
    stream: str
    offset: int
    """Of its first byte in the file."""

    @classmethod
    def parse(cls, key: str, job: str) -> Self | None:
        """Read a key relative to `job_folder(job)`; None: it is no such object."""
        found = _OBJECT.fullmatch(key)
        if found is None:
            return None
        attempt, node, pod, begun, stream, offset = found.groups()
        place = LogPlace(
            job=job,
            attempt=int(attempt),
            node=None if node is None else int(node),
            pod=pod,
            begun=begun,
        )
        return cls(place=place, stream=stream, offset=int(offset))

    @property
    def key(self) -> str:
        """Relative to the folder of the checkpoints. Names in order are offsets in order."""
        return f"{self.place.folder}/{self.stream}/{self.offset:012d}"


def begun(at: float) -> str:
    """A time, in seconds since 1970, as it stands in the name of a pod's folder."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")


def job_folder(job: str) -> str:
    """All logs of a job, relative to the folder of its checkpoints."""
    return f"{LOG_FOLDER}/{job}"


def attempt_folder(job: str, attempt: int) -> str:
    """All logs of an attempt, relative to the folder of the checkpoints."""
    return f"{job_folder(job)}/attempt-{attempt:04d}"


def read_attempt(folder: str) -> int | None:
    """The attempt of a folder below `job_folder`; None: it is another folder."""
    found = _ATTEMPT.fullmatch(folder)
    return None if found is None else int(found[1])


def generation_of(stream: str) -> int | None:
    """The generation that wrote a stream; None: it goes through all of them."""
    _, dot, generation = stream.rpartition(".")
    return int(generation) if dot else None


def job_of_pod(pod: str) -> str:
    """The job's part of a pod's name, which ends with the attempt and index it was made for."""
    return pod.rsplit("-", 2)[0]
