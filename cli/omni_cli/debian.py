"""Fetch Debian packages with the system's own package client, without installing anything.

apt works in folders of our own, so the system's lists, cache and packages stay as they are.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omni_contract.errors import DataError
from omni_dataloader.bible import BIBLE_FILE
from omni_dataloader.stamps import STAMPS_FOLDER

TIMEOUT_S = 900
PACKAGES = ("tuxpaint-stamps-default", "bible-kjv-text")
WANTED = (STAMPS_FOLDER, BIBLE_FILE)
"""What the unpacked packages hold."""

_WAY_OUT = (
    "unpack the Debian packages "
    + " and ".join(PACKAGES)
    + " into a folder, so that it holds "
    + " and ".join(str(path) for path in WANTED)
    + ", and say `--from FOLDER`"
)


def check_folder(folder: Path) -> None:
    """Raise DataError unless the folder has the shape of the unpacked packages."""
    for path in WANTED:
        if not (folder / path).exists():
            raise DataError(f"{folder}: has no {path}; {_WAY_OUT}")


def fetch_packages(folder: Path) -> None:
    """Download and unpack the packages into `folder`, which exists afterwards or not at all."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise DataError(
                f"{program}: not on this system, so the demo data cannot be fetched; {_WAY_OUT}"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # apt reads a relative folder against one of its own.
    with tempfile.TemporaryDirectory(dir=folder.parent.absolute(), prefix="fetch-") as scratch:
        work = Path(scratch)
        debs = _download(work)
        unpacked = work / "unpacked"
        for deb in debs:
            _run(["dpkg-deb", "-x", str(deb), str(unpacked)], cwd=work)
        check_folder(unpacked)
        unpacked.replace(folder)


def apt_options(work: Path, *, is_root: bool) -> list[str]:
    """Options that keep apt's state and cache in `work`; sources and keys are the system's."""
    options: dict[str, object] = {
        "Dir::State": work / "state",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Get::List-Cleanup": "false",
        "Acquire::Retries": 3,
        "Acquire::Languages": "none",
    }
    if is_root:
        # Otherwise apt drops to the user _apt, who may not write here.
        options["APT::Sandbox::User"] = "root"
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _download(work: Path) -> list[Path]:
    for name in ("state", "lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    options = apt_options(work, is_root=os.geteuid() == 0)
    # A broken third-party source makes update fail though Debian's own lists came; the download
    # tells.
    updated = _apt(["apt-get", *options, "-q", "update"], work)
    fetched = _apt(["apt-get", *options, "-q", "download", *PACKAGES], work)
    debs = sorted(work.glob("*.deb"))
    if fetched.returncode or len(debs) != len(PACKAGES):
        said = _last_error(fetched) or _last_error(updated) or "it said nothing"
        raise DataError(
            f"apt-get could not download {' and '.join(PACKAGES)}: {said}; check the network and "
            f"the apt sources, or {_WAY_OUT}"
        )
    return debs


def _apt(command: Sequence[str], work: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f"apt-get took over {TIMEOUT_S} s; check the network, or {_WAY_OUT}"
        ) from None


def _run(command: Sequence[str], *, cwd: Path) -> None:
    done = _apt(command, cwd)
    if done.returncode:
        raise DataError(f"{' '.join(command[:2])} failed: {_last_error(done) or 'no reason given'}")


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")]
    return (errors or lines or [""])[-1]
