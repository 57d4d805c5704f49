"""What the ends of a pod's containers say: exit code, reason, `PodEnd`. Pure; never reads logs."""

import signal
from typing import Final

from pydantic import ValidationError

from omni_contract.names import Exit
from omni_contract.records import PodEnd
from omni_contract.spec_run import FaultClass
from omni_operator.state import ContainerState

_MESSAGE_CHARACTERS: Final = 1000
_SIGNALS: Final = {128 + number: number.name for number in signal.Signals}


def read_end(container: ContainerState) -> PodEnd | None:
    """What a supervisor said when it ended; None: it said nothing that can be trusted.

    Kubernetes puts the last lines of the log where a container left no message: no `PodEnd`. One
    with another exit code is older than what ended the container.
    """
    try:
        end = PodEnd.model_validate_json(container.message)
    except ValidationError:
        return None
    return end if end.exit_code == container.exit_code else None


def class_of_exit(container: ContainerState, *, attempt: int) -> FaultClass:
    """Class of a container that ended with an exit code of its own or was killed."""
    code, end = container.exit_code, read_end(container)
    if container.reason == "OOMKilled":
        return FaultClass.OOM
    if code == Exit.USER:
        return FaultClass.START_ERROR
    if code == Exit.STALE:
        # Of this attempt it means that another job took the run over; else it was only left behind.
        is_now = end is not None and end.attempt == attempt
        return FaultClass.START_ERROR if is_now else FaultClass.RENDEZVOUS
    if end is not None and end.fault is not None:
        return end.fault
    if code == Exit.PEER_LOST:
        return FaultClass.RENDEZVOUS
    if code is None or code == Exit.GAVE_UP or code >= 128:
        # From 128 on: killed by a signal, or never started by the container runtime.
        return FaultClass.UNKNOWN
    return FaultClass.APP_ERROR


def describe_exit(container: ContainerState) -> str:
    """How a container ended, with its own words."""
    end = read_end(container)
    known = container.reason if container.reason != "Error" else None
    why = ", ".join(filter(None, (known, _SIGNALS.get(container.exit_code or 0))))
    head = f"exit code {container.exit_code}" + (f" ({why})" if why else "")
    return with_words(head, container.message if end is None else end.message)


def with_words(head: str, words: str) -> str:
    """A sentence's head with somebody's words on one line; of many words the last say most."""
    words = " ".join(words.split())
    if len(words) > _MESSAGE_CHARACTERS:
        words = f"...{words[-_MESSAGE_CHARACTERS:]}"
    return f"{head}: {words}" if words else head
