"""An API server that knows one Lease: TLS, a bearer token, merge patches with a resourceVersion."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cluster.certificates import Certificate, CertificateAuthority

PATH = "/apis/coordination.k8s.io/v1/namespaces/team/leases/tiny-progress"


class LeaseServer:
    """The Lease and what was asked."""

    def __init__(self, certificate: Certificate) -> None:
        self.lease: dict[str, Any] = {"metadata": {"resourceVersion": "1"}, "spec": {}}
        self.token = "first"
        self.refuses = False
        self.requests: list[tuple[str, int]] = []
        """(method, status) in order."""
        self.patches: list[dict[str, Any]] = []
        handler = type("Handler", (_Handler,), {"lease_server": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def change(self, annotations: dict[str, str]) -> None:
        """Another writer comes in between."""
        self._merge({"metadata": {"annotations": annotations}})

    @contextmanager
    def serving(self) -> Iterator["LeaseServer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def answer(self, method: str, token: str, path: str, body: dict[str, Any]) -> int:
        if token != self.token:
            return 401
        if path != PATH or self.refuses:
            return 403
        if method == "PATCH":
            version = body["metadata"].pop("resourceVersion", None)
            if version not in (None, self.lease["metadata"]["resourceVersion"]):
                return 409
            self._merge(body)
            self.patches.append(body)
        return 200

    def _merge(self, body: dict[str, Any]) -> None:
        metadata = self.lease["metadata"]
        metadata.setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        self.lease["spec"] |= body.get("spec", {})


class _Handler(BaseHTTPRequestHandler):
    lease_server: LeaseServer

    def do_GET(self) -> None:
        self._answer("GET", {})

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self._answer("PATCH", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, method: str, body: dict[str, Any]) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status = self.lease_server.answer(method, token, self.path, body)
        self.lease_server.requests.append((method, status))
        data = json.dumps(self.lease_server.lease if status == 200 else {"code": status}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def make_certificate(folder: Path, token_dir: Path) -> Certificate:
    """A certificate for loopback; its authority goes where a pod finds it."""
    authority = CertificateAuthority(folder)
    (token_dir / "ca.crt").write_bytes(authority.certificate.read_bytes())
    return authority.issue("server", "/CN=api", hosts=("IP:127.0.0.1",))
