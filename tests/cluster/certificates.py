"""Keys and certificates of a test cluster, made by the openssl program.

One authority per cluster; its certificates serve and identify alike: nothing outlives a run.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30")
_CONFIG = """
[req]
distinguished_name = dn
x509_extensions = extensions
[dn]
[extensions]
{extensions}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Paths of a certificate and its private key, both PEM."""

    certificate: Path
    key: Path


class CertificateAuthority:
    """An authority that lives in `folder` and issues certificates into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        extensions = "basicConstraints = critical,CA:TRUE\nkeyUsage = critical,keyCertSign"
        own = self._request("ca", "/CN=omni-test-cluster", extensions)
        self.certificate: Path = own.certificate
        """What a client must trust."""
        self._key = own.key

    def issue(self, name: str, subject: str, *, hosts: tuple[str, ...] = ()) -> Certificate:
        """A certificate for a subject such as /O=group/CN=user; hosts are DNS:name, IP:address."""
        extensions = (
            "basicConstraints = critical,CA:FALSE\nextendedKeyUsage = clientAuth,serverAuth"
        )
        if hosts:
            extensions += f"\nsubjectAltName = {','.join(hosts)}"
        return self._request(
            name, subject, extensions, "-CA", str(self.certificate), "-CAkey", str(self._key)
        )

    def _request(self, name: str, subject: str, extensions: str, *signer: str) -> Certificate:
        made = Certificate(
            certificate=self._folder / f"{name}.crt", key=self._folder / f"{name}.key"
        )
        config = self._folder / f"{name}.cnf"
        config.write_text(_CONFIG.format(extensions=extensions))
        files = ("-config", str(config), "-keyout", str(made.key), "-out", str(made.certificate))
        _run_openssl("req", "-x509", *_KEY, "-subj", subject, *files, *signer)
        return made


def _run_openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
