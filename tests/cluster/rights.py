"""What an account may do, by its roles, and what it did, by the API server's audit log."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.api import Object


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Right:
    """One verb on one kind of object."""

    group: str
    resource: str
    """With its subresource, as in a role: pods/status."""
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def rights_granted(roles: Iterable[Object]) -> frozenset[Right]:
    """All rights in these roles and cluster roles."""
    return frozenset(
        Right(group=group, resource=resource, verb=verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def rights_used(audit_log: Path, user: str) -> frozenset[Right]:
    """Rights that allowed requests of a user took."""
    return frozenset(
        right
        for event in _events(audit_log, user)
        if not _is_refused(event)
        for right in _rights_for(event)
    )


def refusals(audit_log: Path, user: str) -> list[str]:
    """Requests of a user that it had no right to, in order."""
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in _events(audit_log, user)
        if _is_refused(event)
    ]


def _events(audit_log: Path, user: str) -> Iterator[Mapping[str, Any]]:
    with audit_log.open() as lines:
        for line in lines:
            if user in line and line.endswith("\n"):  # the last one may be half written
                event = json.loads(line)
                if event["user"]["username"] == user:
                    yield event


def _is_refused(event: Mapping[str, Any]) -> bool:
    # Server-side apply asks for a further right while it handles the request: that one shows in
    # the answer only. A quota and admission answer 403, too.
    status = event.get("responseStatus", {})
    decision = event.get("annotations", {}).get("authorization.k8s.io/decision")
    return decision == "forbid" or "cannot create resource" in status.get("message", "")


def _rights_for(event: Mapping[str, Any]) -> Iterator[Right]:
    what = event.get("objectRef", {})
    if "resource" not in what:
        return  # discovery, which everybody may read
    group = what.get("apiGroup", "")
    resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
    yield Right(group=group, resource=resource, verb=event["verb"])
    if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
        yield Right(group=group, resource=resource, verb="create")
