"""`omni data`: the demo's sources are built once; one's own shards are indexed where they are."""

import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from omni_cli.data import data
from omni_cli.demo_data import build_demo
from omni_contract.errors import DataError
from omni_contract.spec_model import Modality
from omni_dataloader.build import write_shards
from omni_dataloader.index import SourceIndex
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer
from tests.fakes.bible import bible, verses
from tests.fakes.sources import PICTURE, fake_samples, fake_tokenizer
from tests.fakes.stamps import make_stamps


def omni_data(*arguments: str) -> Result:
    return CliRunner().invoke(data, list(arguments), catch_exceptions=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    make_stamps(folder, num_stamps=10, bible=bible(verses()))
    return folder


def test_the_demo_is_built_and_uploaded_once(
    packages: Path, s3: Store, bucket: str, tmp_path: Path
) -> None:
    lines: list[str] = []

    def run(uri: str = bucket) -> tuple[bool, bool]:
        done = build_demo(s3, uri, cache=tmp_path, from_folder=packages, say=lines.append)
        assert [source.num_samples for source in done.sources] == [20, 20, 20, 6]
        return done.built, done.uploaded

    assert run() == (True, True)
    assert run() == (False, False)
    assert run(f"{bucket}/elsewhere") == (False, True)
    tokenizer = TextTokenizer(s3.read(f"{bucket}/tokenizer.json"))
    for name in ("pictures", "drawings", "speech", "books"):
        index = SourceIndex.load(s3, f"{bucket}/{name}")
        index.check_tokenizer(tokenizer.hash)
        index.check_shards(s3)
    assert index.part("txt", Modality.TEXT).text_tokens.max() > 2000, "books fill sequences"
    s3.write(f"{bucket}/tokenizer.json", b"damaged")
    assert run() == (False, True)
    assert any("Training the tokenizer" in line for line in lines)


def test_another_choice_is_another_build(packages: Path, tmp_path: Path) -> None:
    few = build_demo(None, None, cache=tmp_path, from_folder=packages, captions_per_picture=1)
    assert (few.built, few.uploaded, few.sources[0].num_samples) == (True, False, 5)
    more = build_demo(None, None, cache=tmp_path, from_folder=packages)
    assert more.built and more.sources[0].num_samples == 20
    assert len(list((tmp_path / "sources").iterdir())) == 1, "older builds make room"


def test_what_was_left_out_is_told_again(packages: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = build_demo(None, None, cache=tmp_path, from_folder=packages)
        assert done.sources[2].skipped == {"without a caption in the language spoken": 1}


def test_a_build_that_was_interrupted_starts_afresh(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "sources" / "partial" / "pictures").mkdir(parents=True)
    (tmp_path / "sources" / "partial" / "pictures" / "shard-000007.tar").write_bytes(b"half")
    done = build_demo(None, None, cache=tmp_path, from_folder=packages)
    assert done.sources[0].num_shards == 1


def test_ctrl_c_does_not_wait_for_what_is_left_to_build(packages: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("Building"):
            time.sleep(0.3)  # the main thread waits by then
            if line == "Building speech":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)  # and has heard

    with pytest.raises(KeyboardInterrupt):
        build_demo(None, None, cache=tmp_path, from_folder=packages, say=say)
    assert {"Building pictures", "Building books"}.isdisjoint(lines)
    assert not list(tmp_path.rglob("*.tar"))


def test_a_folder_of_another_shape_is_refused(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    result = omni_data("build", "--cache", str(tmp_path / "c"), "--from", str(tmp_path / "from"))
    assert isinstance(result.exception, DataError)
    assert "has no usr/share/tuxpaint/stamps; unpack" in str(result.exception)


def test_build_prints_what_there_is(packages: Path, tmp_path: Path) -> None:
    arguments = ("build", "--cache", str(tmp_path), "--from", str(packages))
    result = omni_data(*arguments)
    assert result.exit_code == 0, result.output
    assert "pictures" in result.output and "left out" in result.output
    assert "Everything was there already" in omni_data(*arguments).output


def test_uploading_needs_an_address(tmp_path: Path) -> None:
    result = omni_data("build", "--local-s3", str(tmp_path))
    assert result.exit_code == 2 and "--to S3_URI" in result.output


def test_own_shards_are_indexed_in_a_folder_and_in_s3(
    s3: Store, bucket: str, tmp_path: Path
) -> None:
    [shard] = write_shards(fake_samples(PICTURE, num_samples=6, seed=0), tmp_path / "mine")
    (tmp_path / "tokenizer.json").write_bytes(fake_tokenizer())
    s3.write_file(f"{bucket}/mine/{shard.name}", shard)
    s3.write(f"{bucket}/tokenizer.json", fake_tokenizer())
    for place, tokenizer in (
        (str(tmp_path / "mine"), str(tmp_path / "tokenizer.json")),
        (f"{bucket}/mine/", f"{bucket}/tokenizer.json"),
    ):
        result = omni_data(
            "index", place, "--parts", "image=png,text=txt", "--tokenizer", tokenizer
        )
        assert result.exit_code == 0, result.output + str(result.exception)
        assert "6 samples in 1 shards indexed" in result.output
    index = SourceIndex.load(s3, f"{bucket}/mine")
    assert (tmp_path / "mine" / "index.npy").read_bytes() == s3.read(f"{index.uri}/index.npy")


def test_c20_bad_samples_are_counted_only_when_asked(tmp_path: Path) -> None:
    shards = write_shards(fake_samples(PICTURE, num_samples=6, seed=0), tmp_path / "mine")
    shards[0].write_bytes(shards[0].read_bytes()[:-12_000])
    (tmp_path / "t.json").write_bytes(fake_tokenizer())
    arguments = ["index", str(tmp_path / "mine"), "--parts", "image=png,text=txt",
                 "--tokenizer", str(tmp_path / "t.json")]  # fmt: skip
    refused = omni_data(*arguments)
    assert isinstance(refused.exception, DataError)
    assert "shard-000000.tar" in str(refused.exception)
    assert not (tmp_path / "mine" / "index.json").exists()
    skipped = omni_data(*arguments, "--skip-bad")
    assert skipped.exit_code == 0 and "left out: 1 in a truncated" in skipped.output


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("picture=png,text=txt", "'picture=png' is refused"),
        ("image,text=txt", "'image' is refused"),
        ("image=txt,text=txt", "'text=txt' is refused"),
        ("image=png", "text is missing"),
    ],
)
def test_parts_that_make_no_sense(tmp_path: Path, parts: str, says: str) -> None:
    (tmp_path / "t.json").write_bytes(fake_tokenizer())
    result = omni_data(
        "index", str(tmp_path), "--parts", parts, "--tokenizer", str(tmp_path / "t.json")
    )
    assert isinstance(result.exception, DataError) and says in str(result.exception)


def test_a_cache_that_is_deleted_is_no_harm(packages: Path, tmp_path: Path) -> None:
    build_demo(None, None, cache=tmp_path, from_folder=packages)
    shutil.rmtree(tmp_path / "sources")
    assert build_demo(None, None, cache=tmp_path, from_folder=packages).built
