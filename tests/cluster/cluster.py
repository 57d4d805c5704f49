"""A Kubernetes cluster as its administrator sees it: a control plane of the tests or a real one."""

import base64
import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.cluster.api import Api, Object, wait_for

TOKEN_S: Final = 24 * 3600


class Cluster:
    """What a kubeconfig leads to."""

    def __init__(
        self, kubeconfig: Path, kubectl: Path, folder: Path, *, patience_s: float = 0
    ) -> None:
        self.admin_kubeconfig = kubeconfig
        """A kubeconfig that may do everything."""
        self.api = Api(kubeconfig, patience_s=patience_s)
        """Requests as that administrator."""
        self._kubectl = kubectl
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.api.close()

    def create_namespace(self, name: str) -> None:
        """Create a namespace and wait until pods can be created in it."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.api.create("/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        # After the API server was away, controllers may wait for a minute before they watch again.
        what = f"service account of {name}"
        wait_for(lambda: self.api.exists(account), what, timeout_s=90, every_s=0.05)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Run kubectl as the administrator and return what it printed; raises where it fails."""
        command = [str(self._kubectl), f"--kubeconfig={self.admin_kubeconfig}", *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """A kubeconfig with a token of this service account, so with its rights and no others."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        asked: Object = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_S},
        }
        token = self.api.create(path, asked)["status"]["token"]
        user = f"{namespace}.{service_account}"
        shown = self.kubectl("config", "view", "--raw", "--minify", "-o", "json")
        cluster = json.loads(shown)["clusters"][0]["cluster"]
        return write_kubeconfig(self._folder / f"{user}.kubeconfig", cluster, {"token": token})


def write_kubeconfig(path: Path, cluster: Object, user: Object) -> Path:
    """A kubeconfig with one context. JSON, which is YAML too."""
    context = {"cluster": "cluster", "user": "user", "namespace": "default"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "context",
        "contexts": [{"name": "context", "context": context}],
        "clusters": [{"name": "cluster", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=1))
    return path


def embedded(path: Path) -> str:
    """A file's content as a kubeconfig's ...-data field holds it."""
    return base64.b64encode(path.read_bytes()).decode()
