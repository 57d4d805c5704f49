"""The trainer's S3 door against a real server, and its errors as sentences."""

import os
from unittest import mock

import pytest

from omni_contract.errors import StorageError
from omni_contract.spec_data import StorageSpec
from omni_trainer.storage import Folder
from tests.fakes.refusing_s3 import RefusingS3


@pytest.fixture
def folder(bucket: str) -> Folder:
    return Folder(f"{bucket}/run", StorageSpec())


def test_an_object_comes_back_as_it_was_put(folder: Folder) -> None:
    folder.put("a/b", b"content")
    blob = folder.get("a/b")
    assert blob is not None and blob.data == b"content"
    assert folder.get("a") is None


def test_an_object_in_parts_comes_back_whole(bucket: str) -> None:
    folder = Folder(f"{bucket}/run", StorageSpec(), multipart_bytes=1 << 20)
    data = os.urandom(6 << 20)
    folder.put("large", data)
    blob = folder.get("large")
    assert blob is not None and blob.data == data


def test_only_the_first_of_two_puts_if_absent_counts(folder: Folder) -> None:
    assert folder.put_if_absent("once", b"first") is not None
    assert folder.put_if_absent("once", b"second") is None
    blob = folder.get("once")
    assert blob is not None and blob.data == b"first"


def test_a_put_repeated_after_a_lost_answer_is_no_lost_race(folder: Folder) -> None:
    first = folder.put_if_absent("once", b"mine")
    assert folder.put_if_absent("once", b"mine") == first


def test_a_moved_etag_loses(folder: Folder) -> None:
    first = folder.put_if_absent("pointer", b"1")
    assert first is not None
    second = folder.put_if_match("pointer", b"2", first)
    assert second is not None
    assert folder.put_if_match("pointer", b"3", first) is None
    assert folder.put_if_match("pointer", b"3", second) is not None


def test_list_and_delete_stay_inside_the_folder(bucket: str) -> None:
    inside, beside = Folder(f"{bucket}/run", StorageSpec()), Folder(f"{bucket}/run2", StorageSpec())
    inside.put("step-1/a", b"12")
    inside.put("step-2/a", b"123")
    beside.put("step-1/a", b"1")
    assert inside.list("step-") == {"step-1/a": 2, "step-2/a": 3}
    inside.delete(["step-1/a", "step-1/never-there"])
    assert inside.list("") == {"step-2/a": 3}
    assert beside.list("") == {"step-1/a": 1}


def test_a_missing_bucket_is_named(s3_env: dict[str, str]) -> None:
    folder = Folder("s3://no-such-bucket/run", StorageSpec())
    for act in (folder.check_bucket, lambda: folder.put("a", b"1"), lambda: folder.list("")):
        with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist; create"):
            act()


def test_wrong_keys_are_said_to_be_wrong(bucket: str) -> None:
    with mock.patch.dict(os.environ, {"AWS_SECRET_ACCESS_KEY": "wrong"}):
        folder = Folder(f"{bucket}/run", StorageSpec())
        with pytest.raises(StorageError, match=r"refuses these credentials .*AWS_ACCESS_KEY_ID"):
            folder.put("a", b"1")


def test_missing_keys_are_said_to_be_missing() -> None:
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}
    with mock.patch.dict(os.environ, nowhere, clear=True):
        folder = Folder("s3://bucket/run", StorageSpec(endpoint="http://127.0.0.1:9"))
        with pytest.raises(StorageError, match=r"no AWS credentials.*set AWS_ACCESS_KEY_ID"):
            folder.get("a")


def test_an_unreachable_server_is_named() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with mock.patch.dict(os.environ, keys):
        folder = Folder("s3://bucket/run", StorageSpec(endpoint="http://127.0.0.1:9"), attempts=1)
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:9 cannot be reached.*endpoint"):
            folder.get("a")


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (507, "XMinioStorageFull", "is full .*lower checkpoint.keep"),
        (500, "InternalError", "may be out of space"),
        (403, "AccessDenied", "refuses these credentials"),
    ],
)
def test_a_refused_put_is_one_sentence(status: int, code: str, says: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with mock.patch.dict(os.environ, keys), RefusingS3(status=status, code=code) as server:
        folder = Folder("s3://bucket/run", StorageSpec(endpoint=server.endpoint), attempts=1)
        with pytest.raises(StorageError, match=says) as info:
            folder.put("a", b"1")
    assert "\n" not in str(info.value)
