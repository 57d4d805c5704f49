"""Fetching packages: with the system's client when it is there, else a way out in words."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from omni_cli.debian import PACKAGES, apt_options, fetch_packages
from omni_contract.errors import DataError
from tests.fakes.bible import bible, verses
from tests.fakes.stamps import make_stamps

_APT = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in *" update"*) exit {update} ;; esac
[ {download} = 0 ] || {{ echo "W: noise" >&2; echo "E: Unable to locate package" >&2; exit 100; }}
for name in {packages}; do echo deb > "$name"_1_all.deb; done
"""
_DPKG = """#!/bin/sh
mkdir -p "$3" && cp -r "{content}"/. "$3"
"""


def fake_tools(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, update: int = 0, download: int = 0
) -> Path:
    """apt-get and dpkg-deb on PATH that fetch a small folder; returns the log of apt's calls."""
    content = folder / "content"
    make_stamps(content, num_stamps=4, bible=bible(verses()))
    tools, log = folder / "bin", folder / "apt.log"
    tools.mkdir()
    scripts = {
        "apt-get": _APT.format(
            log=log, update=update, download=download, packages=" ".join(PACKAGES)
        ),
        "dpkg-deb": _DPKG.format(content=content),
    }
    for name, script in scripts.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize("update", [0, 100], ids=["all lists came", "a foreign source is broken"])
def test_packages_are_unpacked_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    log = fake_tools(tmp_path, monkeypatch, update=update)
    monkeypatch.chdir(tmp_path)
    fetch_packages(Path("cache/packages"))
    assert (tmp_path / "cache" / "packages" / "usr/lib/bible.data").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["packages"]
    update_call, download_call = log.read_text().splitlines()
    assert update_call.endswith("update") and download_call.endswith(" ".join(PACKAGES))
    assert "install" not in log.read_text()
    folders = [word.partition("=")[2] for word in update_call.split() if word.startswith("Dir::")]
    assert len(folders) == 3  # apt reads a relative folder against one of its own
    assert all(Path(folder).is_absolute() for folder in folders)


def test_what_apt_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools(tmp_path, monkeypatch, download=1)
    with pytest.raises(DataError, match="E: Unable to locate package.*--from FOLDER"):
        fetch_packages(tmp_path / "cache" / "packages")
    assert not list((tmp_path / "cache").iterdir())


def test_a_system_without_apt_is_told_the_shape_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="not on this system.*tuxpaint.*bible.data.*--from FOLDER"):
        fetch_packages(tmp_path / "packages")


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="needs apt")
@pytest.mark.parametrize("is_root", [True, False])
def test_apt_writes_only_into_our_folder(tmp_path: Path, is_root: bool) -> None:
    """Asked of apt itself: where would it keep lists, packages and caches?"""
    options = apt_options(tmp_path, is_root=is_root)
    names = {
        "lists": "Dir::State::lists/d",
        "archives": "Dir::Cache::archives/d",
        "srcpkgcache": "Dir::Cache::srcpkgcache/f",
        "pkgcache": "Dir::Cache::pkgcache/f",
        "user": "APT::Sandbox::User",
    }
    pairs = [word for key, name in names.items() for word in (key, name)]
    said = subprocess.run(
        ["apt-config", *options, "shell", *pairs], capture_output=True, text=True, timeout=30
    ).stdout
    values = dict(line.split("=", 1) for line in said.splitlines())
    for key in ("lists", "archives", "srcpkgcache", "pkgcache"):
        is_off = key.endswith("pkgcache") and values[key] == "''"
        assert is_off or str(tmp_path) in values[key], said
    assert (values["user"] == "'root'") == is_root
