"""The only door to S3: boto3 for control, writes and whole files, obstore for ranges of shards.

A store belongs to the process that opened it. obstore starts threads, so other processes are
spawned, never forked, and open their own.
"""

import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import obstore
import obstore.exceptions
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import S3Store

from omni_contract.errors import StorageError, UnavailableError
from omni_contract.spec_data import StorageSpec

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

COALESCE_BYTES = 128 * 1024
"""Ranges closer than this are fetched as one: a request costs about as much as these bytes."""

OUTAGE_S = 60.0
"""Training goes on after an outage of the store as long as this: the trainer's patience, too."""

_ATTEMPTS = 5  # botocore gives up on SlowDown after 2 by default
_DELETE_BATCH = 1000  # most keys of one DeleteObjects request
_SERVER_ERROR = re.compile("Server returned (error response|non-2xx status code: 5(?!01|07))")
"""As obstore says it."""
_NO_SPACE = ("no space left", "insufficient", "quota", "no free volumes", "no writable volumes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object as a listing shows it."""

    uri: str
    size_bytes: int


def split_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/a/b` -> (`bucket`, `a/b`). Raises StorageError for anything else."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise StorageError(f"{uri}: this is no S3 address; write it as s3://BUCKET/KEY")
    return bucket, key


def coalesce(
    ranges: Sequence[tuple[int, int]], *, gap_bytes: int = COALESCE_BYTES
) -> list[tuple[int, int]]:
    """Merge (offset, length) ranges that lie at most `gap_bytes` apart; ascending by offset."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and offset - sum(merged[-1]) <= gap_bytes:
            start, so_far = merged[-1]
            merged[-1] = (start, max(so_far, offset + length - start))
        else:
            merged.append((offset, length))
    return merged


class Store:
    """S3 as the rest of the service sees it: addresses in, bytes out, errors as sentences.

    `needed_bytes` and `fetched_bytes` meter range reads: their ratio is what coalescing wastes.
    Safe to use from several threads.
    """

    def __init__(
        self, client: "S3Client", session: boto3.Session, *, outage_s: float = OUTAGE_S
    ) -> None:
        self._client = client
        self._outage_s = outage_s
        self._session = session
        self._ranged: dict[str, S3Store] = {}
        self._lock = threading.Lock()
        self.needed_bytes = 0
        self.fetched_bytes = 0

    @classmethod
    def open(
        cls,
        spec: StorageSpec,
        *,
        keys: tuple[str, str] | None = None,
        outage_s: float = OUTAGE_S,
    ) -> Self:
        """Open with the job's endpoint and region; the rest is the standard AWS chain.

        `keys` (access key, secret key) stand in for the chain's credentials. Ranges of shards are
        asked for again for `outage_s` while the server is away; all else fails sooner, since it
        happens where a wrong address must be told at once.
        """
        access_key, secret_key = keys or (None, None)
        with _settings_errors(spec):
            session = boto3.Session(
                region_name=spec.region,
                aws_access_key_id=access_key,
                aws_secret_access_key=secret_key,
            )
            if session.get_credentials() is None:
                raise StorageError(
                    "S3: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                    "AWS_PROFILE with a profile of ~/.aws"
                )
            client = _open_client(session, spec.endpoint)
        return cls(client, session, outage_s=outage_s)

    @property
    def endpoint(self) -> str:
        """The server in use."""
        return self._client.meta.endpoint_url

    def read(self, uri: str) -> bytes:
        """A whole object."""
        bucket, key = split_uri(uri)
        for attempt in range(_ATTEMPTS):
            try:
                with self._errors(uri):
                    return self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
            except botocore.exceptions.IncompleteReadError:  # boto3 never retries a cut body
                if attempt == _ATTEMPTS - 1:
                    raise StorageError(
                        f"{uri}: the server cut the transfer {_ATTEMPTS} times; is it healthy?"
                    ) from None
        raise AssertionError("unreachable")

    def read_file(self, uri: str, path: Path) -> None:
        """A whole object of any size, into a file."""
        bucket, key = split_uri(uri)
        with self._errors(uri):
            self._client.download_file(bucket, key, str(path))

    def read_ranges(self, uri: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The (offset, length) ranges of an object, in the order asked for; near ones as one GET.

        A range past the end comes back short: the caller knows what the object should hold.
        """
        bucket, key = split_uri(uri)
        merged = [(o, n) for o, n in coalesce(ranges) if n]
        fetched: dict[int, memoryview] = {}
        if merged:
            with self._errors(uri):
                try:
                    parts = obstore.get_ranges(
                        self._store_of(bucket),
                        key,
                        starts=[offset for offset, _ in merged],
                        lengths=[length for _, length in merged],
                        coalesce=0,
                    )
                except FileNotFoundError as exc:  # obstore's missing object
                    raise self._translated(exc, uri) from None
                except obstore.exceptions.GenericError:
                    # Some servers answer a range past the end with an error, others with less.
                    size = self.size(uri)
                    if all(offset + length <= size for offset, length in merged):
                        raise
                    clipped = [(o, max(0, min(n, size - o))) for o, n in ranges]
                    return self.read_ranges(uri, clipped)
            fetched = {m[0]: memoryview(p) for m, p in zip(merged, parts, strict=True)}
        starts = sorted(fetched)
        with self._lock:
            self.needed_bytes += sum(length for _, length in ranges)
            self.fetched_bytes += sum(len(part) for part in fetched.values())
        return [_cut(fetched, starts, offset, length) for offset, length in ranges]

    def size(self, uri: str) -> int:
        """Bytes of an object."""
        bucket, key = split_uri(uri)
        with self._errors(uri):
            return self._client.head_object(Bucket=bucket, Key=key)["ContentLength"]

    def exists(self, uri: str) -> bool:
        """Whether the object is there; a missing bucket is an error."""
        bucket, key = split_uri(uri)
        try:
            self._client.head_object(Bucket=bucket, Key=key)
        except botocore.exceptions.ClientError as exc:
            if exc.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                self._check_bucket(bucket)
                return False
            raise self._translated(exc, uri) from None
        except botocore.exceptions.BotoCoreError as exc:
            raise self._translated(exc, uri) from None
        return True

    def list(self, uri: str) -> list[ObjectInfo]:
        """All objects under a folder, ascending by address."""
        bucket, key = split_uri(uri)
        prefix = key.rstrip("/") + "/" if key else ""
        found: list[ObjectInfo] = []
        with self._errors(uri):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix
            ):
                found += [
                    ObjectInfo(uri=f"s3://{bucket}/{item['Key']}", size_bytes=item["Size"])
                    for item in page.get("Contents", [])
                ]
        return sorted(found, key=lambda info: info.uri)

    def list_folders(self, uri: str) -> Sequence[str]:
        """Names of the folders right below a folder, in order."""
        bucket, key = split_uri(uri)
        prefix = key.rstrip("/") + "/" if key else ""
        with self._errors(uri):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix, Delimiter="/"
            )
            found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", [])]
        return sorted(folder.removeprefix(prefix).rstrip("/") for folder in found)

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace an object."""
        bucket, key = split_uri(uri)
        with self._errors(uri):
            self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def write_file(self, uri: str, path: Path) -> None:
        """Create or replace an object from a file of any size."""
        bucket, key = split_uri(uri)
        with self._errors(uri):
            try:
                self._client.upload_file(str(path), bucket, key)
            except FileNotFoundError:
                raise StorageError(f"{path}: is missing, so {uri} cannot be written") from None

    def delete(self, uri: str) -> None:
        """Delete an object; one that is not there is no error."""
        bucket, key = split_uri(uri)
        with self._errors(uri):
            self._client.delete_object(Bucket=bucket, Key=key)

    def delete_folder(self, uri: str) -> None:
        """Delete all objects under a folder."""
        bucket, _ = split_uri(uri)
        keys = [split_uri(info.uri)[1] for info in self.list(uri)]
        for begin in range(0, len(keys), _DELETE_BATCH):
            batch = keys[begin : begin + _DELETE_BATCH]
            with self._errors(uri):
                answer = self._client.delete_objects(
                    Bucket=bucket,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            for error in answer.get("Errors", []):
                raise StorageError(
                    f"s3://{bucket}/{error.get('Key')}: cannot be deleted: "
                    f"{error.get('Message') or error.get('Code')}"
                )

    def create_bucket(self, bucket: str) -> None:
        """Create a bucket unless it is there."""
        with self._errors(f"s3://{bucket}"):
            try:
                self._client.head_bucket(Bucket=bucket)
            except botocore.exceptions.ClientError as exc:
                if exc.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                region = self._client.meta.region_name
                if region == "us-east-1":  # the one region that must not be named
                    self._client.create_bucket(Bucket=bucket)
                else:
                    self._client.create_bucket(
                        Bucket=bucket,
                        CreateBucketConfiguration={"LocationConstraint": region},  # type: ignore[typeddict-item]
                    )

    def _store_of(self, bucket: str) -> S3Store:
        with self._lock:
            if bucket not in self._ranged:
                self._ranged[bucket] = self._open_ranged(bucket)
            return self._ranged[bucket]

    def _open_ranged(self, bucket: str) -> S3Store:
        # Endpoint, region and credentials as boto3 resolved them: obstore's own chain knows less.
        config: dict[str, Any] = {"region": self._client.meta.region_name}
        if not _is_aws(self.endpoint):
            config |= {"endpoint": self.endpoint, "virtual_hosted_style_request": False}
        return S3Store(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options={
                "allow_http": self.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(seconds=60),
            },
            retry_config={
                "max_retries": 10**6,  # the time alone ends it
                "retry_timeout": timedelta(seconds=self._outage_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
            credential_provider=Boto3CredentialProvider(self._session),
        )

    @contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        try:
            yield
        except botocore.exceptions.IncompleteReadError:
            raise
        except (
            botocore.exceptions.ClientError,
            botocore.exceptions.BotoCoreError,
            boto3.exceptions.Boto3Error,
            obstore.exceptions.BaseError,
        ) as exc:
            raise self._translated(exc, uri) from None

    def _check_bucket(self, bucket: str) -> None:
        try:
            self._client.head_bucket(Bucket=bucket)
        except botocore.exceptions.ClientError as exc:
            if exc.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                raise StorageError(
                    f"s3://{bucket}: there is no such bucket at {self.endpoint}; "
                    "create it or mend the address"
                ) from None
            raise self._translated(exc, f"s3://{bucket}") from None

    def _translated(self, exc: Exception, uri: str) -> StorageError:
        """The sentence for what went wrong, as far as the server's answer tells."""
        text, code, status = str(exc), "", 0
        if isinstance(exc, botocore.exceptions.ClientError):
            code = exc.response.get("Error", {}).get("Code", "")
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchBucket" or "NoSuchBucket" in text:
            return StorageError(
                f"s3://{split_uri(uri)[0]}: there is no such bucket at {self.endpoint}; "
                "create it or mend the address"
            )
        if status == 404 or isinstance(exc, obstore.exceptions.NotFoundError | FileNotFoundError):
            try:
                self._check_bucket(split_uri(uri)[0])
            except StorageError as missing:
                return missing
            return StorageError(f"{uri}: there is no such object at {self.endpoint}")
        if status in (401, 403) or isinstance(
            exc,
            obstore.exceptions.PermissionDeniedError | obstore.exceptions.UnauthenticatedError,
        ):
            return StorageError(
                f"{uri}: {self.endpoint} refuses these credentials ({code or 'no access'}); "
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the rights on the bucket"
            )
        if isinstance(
            exc,
            botocore.exceptions.NoCredentialsError | botocore.exceptions.CredentialRetrievalError,
        ):
            return StorageError(f"{uri}: no credentials found; set AWS_ACCESS_KEY_ID and the like")
        if isinstance(
            exc, botocore.exceptions.ConnectionError | botocore.exceptions.HTTPClientError
        ) or ("error sending request" in text):
            return UnavailableError(
                f"{uri}: {self.endpoint} cannot be reached; is it up, and is storage.endpoint "
                "(or AWS_ENDPOINT_URL) right?"
            )
        if status == 507 or any(words in text.lower() for words in _NO_SPACE):
            return StorageError(f"{uri}: {self.endpoint} has no space left ({text})")
        # 501: it cannot do this, now or later. Of what obstore raises only the words tell.
        if (status >= 500 and status != 501) or _SERVER_ERROR.search(text):
            # So does one that starts; SeaweedFS says no more of a full disk.
            said = code or status or "an error"
            return UnavailableError(
                f"{uri}: {self.endpoint} answers {said} however often it is asked; does it just "
                "start, or is the disk of the server full?"
            )
        first_line = (text.strip() or type(exc).__name__).splitlines()[0]
        return StorageError(f"{uri}: {self.endpoint} refused: {first_line}")


@contextmanager
def _settings_errors(spec: StorageSpec) -> Iterator[None]:
    """Settings of the job or of the AWS chain that cannot be, as sentences."""
    try:
        yield
    except botocore.exceptions.BotoCoreError as exc:
        raise StorageError(
            f"S3: {exc}; mend AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or "
            "storage.region"
        ) from None
    except ValueError as exc:
        endpoint = f"storage.endpoint: {spec.endpoint}" if spec.endpoint else "AWS_ENDPOINT_URL"
        raise StorageError(
            f"{endpoint}: this is no address of a server ({exc}); write it as http://HOST:PORT"
        ) from None


def _open_client(session: boto3.Session, endpoint: str | None) -> "S3Client":
    config = botocore.config.Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=32,
    )
    client: S3Client = session.client("s3", endpoint_url=endpoint, config=config)
    if _is_aws(client.meta.endpoint_url):
        return client
    # S3-compatible servers rarely have a DNS name per bucket.
    path_style = botocore.config.Config(s3={"addressing_style": "path"})
    return session.client(
        "s3", endpoint_url=client.meta.endpoint_url, config=config.merge(path_style)
    )


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _cut(fetched: dict[int, memoryview], starts: list[int], offset: int, length: int) -> memoryview:
    """The range out of the merged one that holds it."""
    if not length:
        return memoryview(b"")
    begin = starts[bisect_right(starts, offset) - 1]
    return fetched[begin][offset - begin : offset - begin + length]
