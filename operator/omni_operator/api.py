"""What the API server can be asked for and how it says no. `cluster` asks a real one."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from omni_operator.kinds import Kind

Raw = Mapping[str, Any]
"""An object as the API server says it."""


class ApiError(Exception):
    """The API server did not do what it was asked."""

    def __init__(self, *, reason: str, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        """A constant word."""
        self.message = message
        """The API server's own words."""
        self.code = code
        """HTTP status; None where there was no answer."""


class ApiUnavailable(ApiError):
    """No answer, or one that may change by itself, also after retries. Whether a write was done is
    not known."""

    def __init__(
        self, *, reason: str, message: str, code: int | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(reason=reason, message=message, code=code)
        self.retry_after_s = retry_after_s
        """How long the API server asks to be left alone."""


class NotFound(ApiError):
    """There is no such object."""


class AlreadyExists(ApiError):
    """There is an object of this name already."""


class Conflict(ApiError):
    """The object is not as it was when it was read: another version, another uid, a JSON patch
    that does not fit it."""


class QuotaExceeded(ApiError):
    """A ResourceQuota of the namespace has no room for it."""


class Refused(ApiError):
    """Asking again is of no use: invalid, not admitted, not allowed."""


class Api(Protocol):
    """The API server. Everything may raise ApiUnavailable and Refused."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Raw | None:
        """One object; None where it does not exist."""

    async def list(
        self, kind: Kind, namespace: str | None = None, *, label_selector: str | None = None
    ) -> Sequence[Raw]:
        """All objects of a kind, of one namespace or of all."""

    async def create(self, kind: Kind, body: Raw, *, dry_run: bool = False) -> Raw:
        """POST one object. Raises AlreadyExists and QuotaExceeded. With `dry_run` it is judged and
        not made."""

    async def apply(self, body: Raw) -> Raw:
        """Make an object hold what `body` says (server-side apply), taking over fields of others.
        Repeating it changes nothing."""

    async def json_patch(
        self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Raw]
    ) -> Raw:
        """Change one object. Raises NotFound, and Conflict where a test fails or a path is gone."""

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        """Ask for the end of one object. Nothing is done, and nothing raised, where it is gone or
        has another uid."""

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, status: Raw, *, resource_version: str
    ) -> Raw:
        """Merge into an object's status; a field that is None is taken out, lists are replaced.
        Raises NotFound, and Conflict where the object changed since `resource_version`."""

    async def replace(self, kind: Kind, body: Raw) -> Raw:
        """PUT one object in place of the version that `body` holds. Raises NotFound, and Conflict
        where there is a newer one."""
