"""Images without a registry: a tiny one of our own, and archives laid into the nodes' containerd.

An image with torch takes 5 GB unpacked, so it is unpacked once and all nodes share the files: the
layers of an image are only ever read.
"""

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.cluster.real.command import run

TINY_IMAGE: Final = "localhost/tiny:1"
"""BusyBox alone; it sleeps unless told otherwise."""
PAUSE_IMAGE: Final = TINY_IMAGE
"""What holds a pod's network."""

_PROGRAMS: Final = ("cat", "httpd", "id", "sh", "sleep", "timeout", "touch", "wget")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_OCI: Final = "application/vnd.oci.image"


def write_tiny_image(archive: Path, busybox: Path) -> Path:
    """Write the image as an OCI archive; `busybox` must be linked statically."""
    layer = _layer(busybox)
    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["sleep", "infinity"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = {_digest(layer): layer}

    def added(kind: str, content: bytes) -> dict[str, Any]:
        blobs[_digest(content)] = content
        return {"mediaType": f"{_OCI}.{kind}", "digest": _digest(content), "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": added("config.v1+json", json.dumps(config).encode()),
        "layers": [added("layer.v1.tar", layer)],
    }
    named = {"annotations": {"io.containerd.image.name": TINY_IMAGE}}
    listed = added("manifest.v1+json", json.dumps(manifest).encode()) | named
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [listed]}).encode())
        for digest, content in blobs.items():
            _add(tar, f"blobs/{digest.replace(':', '/')}", content)
    return archive


def share_images(root: Path, others: Sequence[Path]) -> None:
    """Give other containerds what one has imported. None of them may run meanwhile.

    Files are hard links, but for the databases, which each writes for itself.
    """
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        run(["cp", "--archive", "--link", root, other], timeout_s=600)
        for database in other.rglob("*.db"):
            relative = database.relative_to(other)
            database.unlink()
            shutil.copy2(root / relative, database)


def _layer(busybox: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ("bin", "tmp"):
            _add(tar, folder, kind=tarfile.DIRTYPE)
        _add(tar, "bin/busybox", busybox.read_bytes())
        for program in _PROGRAMS:
            _add(tar, f"bin/{program}", kind=tarfile.SYMTYPE, target="busybox")
    return packed.getvalue()


def _add(
    tar: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.type, member.linkname = len(content), 0o755, kind, target
    tar.addfile(member, io.BytesIO(content))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
