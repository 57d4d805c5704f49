"""The trainer's only door to boto3: one s3:// folder, read and written whole objects at a time.

Knows nothing of checkpoints. Whatever the store answers becomes a value, or a StorageError that
reads as one sentence; a lost race is a value, never an error.
"""

import base64
import copy
import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)

from omni_contract.errors import StorageError, UnavailableError
from omni_contract.spec_data import StorageSpec

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MULTIPART_BYTES = 256 << 20
"""Objects above this go up in parts; a single put ends at 5 GiB."""

_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_RACE_LOST = frozenset({"412", "PreconditionFailed"})
_FORBIDDEN = frozenset(
    {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken",
     "InvalidToken"}
)  # fmt: skip
_FULL = frozenset({"507", "InsufficientStorage", "XMinioStorageFull", "QuotaExceeded"})
_DELETE_BATCH = 1000  # most keys of one DeleteObjects request
_BODY_TRIES = 3  # boto3 retries a request, but never a body that broke off


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """An object's content and the ETag of exactly this content."""

    data: bytes
    etag: str


class Folder:
    """An s3:// folder. Keys are relative to it. Safe to use from several threads."""

    def __init__(
        self,
        uri: str,
        storage: StorageSpec,
        *,
        attempts: int = 4,
        multipart_bytes: int = MULTIPART_BYTES,
    ) -> None:
        self._go_to(uri)
        self._multipart_bytes = multipart_bytes
        self._transfer = TransferConfig(
            multipart_threshold=multipart_bytes,
            multipart_chunksize=max(multipart_bytes // 4, 5 << 20),
            preferred_transfer_client="classic",  # the crt client ignores endpoint_url
        )
        with self._translated(""):
            self._client: S3Client = boto3.session.Session().client(
                "s3",
                endpoint_url=storage.endpoint,
                region_name=storage.region,
                config=Config(
                    connect_timeout=5,
                    read_timeout=60,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                ),
            )

    def _go_to(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def beside(self, uri: str) -> "Folder":
        """Another folder of the same store, over the same connections."""
        other = copy.copy(self)
        other._go_to(uri)
        return other

    def check_bucket(self) -> None:
        """Raise StorageError unless the bucket is there: some servers create it on a put."""
        try:
            with self._translated(""):
                self._client.head_bucket(Bucket=self._bucket)
        except _Absent:
            raise StorageError(
                f"{self.uri}: the bucket {self._bucket!r} does not exist; create it or correct "
                "the name"
            ) from None

    def get(self, key: str) -> Blob | None:
        """Read an object; None where there is none."""
        try:
            with self._translated(key):
                return self._get(key)
        except _Absent:
            return None

    def _get(self, key: str) -> Blob:
        for tries_left in reversed(range(_BODY_TRIES)):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            try:
                return Blob(data=answer["Body"].read(), etag=answer["ETag"])
            except (IncompleteReadError, ResponseStreamingError):
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def put(self, key: str, data: bytes) -> None:
        """Write an object, then ask the store what it holds. Raises unless it holds `data`."""
        with self._translated(key):
            if len(data) > self._multipart_bytes:
                self._client.upload_fileobj(
                    io.BytesIO(data), self._bucket, self._prefix + key, Config=self._transfer
                )
            else:  # the store itself refuses a body that does not match
                self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._prefix + key,
                    Body=data,
                    ChecksumSHA256=_sha256_base64(data),
                )
            head = self._client.head_object(
                Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED"
            )
        if head["ContentLength"] != len(data):
            raise StorageError(
                f"{self._url(key)}: the store holds {head['ContentLength']} bytes of the "
                f"{len(data)} written; look at the store's own log"
            )
        checksum = head.get("ChecksumSHA256", "")
        if checksum and "-" not in checksum and checksum != _sha256_base64(data):
            raise StorageError(
                f"{self._url(key)}: the store holds other bytes than those written; look at the "
                "store's own log"
            )

    def put_if_absent(self, key: str, data: bytes) -> str | None:
        """Write a small object that must not be there yet. Its ETag; None: it was there."""
        return self._put_conditional(key, data, IfNoneMatch="*")

    def put_if_match(self, key: str, data: bytes, etag: str) -> str | None:
        """Replace a small object whose ETag must still be `etag`. The new ETag; None: it is not."""
        return self._put_conditional(key, data, IfMatch=etag)

    def _put_conditional(self, key: str, data: bytes, **condition: str) -> str | None:
        try:
            with self._translated(key):
                answer: Any = self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._prefix + key,
                    Body=data,
                    ChecksumSHA256=_sha256_base64(data),
                    **condition,  # type: ignore[arg-type]
                )
                return str(answer["ETag"])
        except _RaceLost:
            # A retry after a lost answer meets the object that the first try wrote.
            found = self.get(key)
            return found.etag if found is not None and found.data == data else None

    def list(self, prefix: str) -> dict[str, int]:
        """Size in bytes of every object whose key begins with `prefix`."""
        with self._translated(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return {
                entry["Key"][len(self._prefix) :]: entry["Size"]
                for page in pages
                for entry in page.get("Contents", [])
            }

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        for begin in range(0, len(keys), _DELETE_BATCH):
            batch = keys[begin : begin + _DELETE_BATCH]
            with self._translated(batch[0]):
                answer = self._client.delete_objects(
                    Bucket=self._bucket,
                    Delete={"Objects": [{"Key": self._prefix + k} for k in batch], "Quiet": True},
                )
            for error in answer.get("Errors", []):
                raise StorageError(
                    f"s3://{self._bucket}/{error.get('Key')}: cannot be deleted: "
                    f"{error.get('Message') or error.get('Code')}"
                )

    def _url(self, key: str) -> str:
        return f"{self.uri}/{key}" if key else self.uri

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as exc:
            raise StorageError(
                f"{self._url(key)}: no AWS credentials ({exc}); set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a profile"
            ) from None
        except ClientError as exc:
            raise self._refusal(key, exc) from None
        except (ConnectionError, HTTPClientError) as exc:
            endpoint = self._client.meta.endpoint_url
            raise UnavailableError(
                f"{self._url(key)}: the object store at {endpoint} cannot be reached "
                f"({type(exc).__name__}); check storage.endpoint or AWS_ENDPOINT_URL and that the "
                "server runs"
            ) from None
        except (BotoCoreError, ValueError) as exc:  # a bad endpoint URL is a ValueError
            raise StorageError(f"{self._url(key)}: {exc}") from None

    def _refusal(self, key: str, exc: ClientError) -> Exception:
        code = exc.response.get("Error", {}).get("Code", "")
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        message = exc.response.get("Error", {}).get("Message", "")
        if code in _RACE_LOST:
            return _RaceLost()
        if code in _ABSENT:
            return _Absent()
        if code == "NoSuchBucket":
            return StorageError(
                f"{self._url(key)}: the bucket {self._bucket!r} does not exist; create it or "
                "correct the name"
            )
        if code in _FORBIDDEN:
            return StorageError(
                f"{self._url(key)}: the object store refuses these credentials ({code}); check "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their rights on the bucket"
            )
        if code in _FULL or "no space" in message.lower() or "no free" in message.lower():
            return StorageError(
                f"{self._url(key)}: the object store is full ({code}); free space there or lower "
                "checkpoint.keep"
            )
        kind = UnavailableError if status >= 500 else StorageError
        hint = "; it may be out of space: its own log says why" if status >= 500 else ""
        return kind(f"{self._url(key)}: the object store says {status} {code}: {message}{hint}")


class _Absent(Exception):
    """No such object or bucket."""


class _RaceLost(Exception):
    """A precondition did not hold."""


def _sha256_base64(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
