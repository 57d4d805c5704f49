"""A real Kubernetes control plane: etcd, API server, controllers, scheduler, and by default KWOK.

Everything is per instance, ports and folder, so that several stand side by side on one machine.
"""

import json
import signal
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.cluster import binaries, kwok
from tests.cluster.api import wait_for
from tests.cluster.certificates import Certificate, CertificateAuthority
from tests.cluster.cluster import Cluster, embedded, write_kubeconfig
from tests.cluster.processes import Processes, free_port

START_S: Final = 60.0

_LOOPBACK: Final = "127.0.0.1"
_ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
_CLIENTS: Final = {
    "admin": "/O=system:masters/CN=admin",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kube-scheduler": "/CN=system:kube-scheduler",
}
_AUDIT_POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a test may want other than usual."""

    heartbeat_s: float = 2.0
    """How often a node renews its Lease. A thousand nodes want 10 s, the kubelet's own default."""
    node_monitor_grace_s: float = 6.0
    """A node whose Lease is older is NotReady; Kubernetes' default is 50."""
    kube_api_qps: int | None = None
    """Request rate and burst of controller manager and scheduler; none: their defaults."""
    audit: bool = True
    """Whether each request is logged, with user, verb, object and decision."""
    patience_s: float = 0
    """How long the test's own requests are made again while the API server is away."""
    address: str = _LOOPBACK
    """Where the API server listens. Pods of real nodes need another than loopback."""
    kwok: bool = True
    """Whether KWOK plays the kubelets."""
    state_dir: Path | None = None
    """That the folder with its state, etcd's too, is made in; None: where temporary files go."""

    def __post_init__(self) -> None:
        if self.node_monitor_grace_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"node_monitor_grace_s: {self.node_monitor_grace_s} is less than two heartbeats of "
                f"{self.heartbeat_s} s, so nodes would flap; use at least {2 * self.heartbeat_s}"
            )


class ControlPlane(Cluster):
    """Context manager around the running control plane. All attributes are valid inside it."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        """As given, or the usual ones."""
        self.processes = Processes(self.options.state_dir)
        """What runs; `start` others here that must end with the control plane."""

    @property
    def audit_log(self) -> Path:
        """One JSON event a line."""
        return self.processes.folder / "audit.log"

    def __enter__(self) -> Self:
        self.processes.__enter__()
        try:
            self._start()
        except BaseException:
            self.processes.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, exc, trace)
        self.processes.__exit__(kind, exc, trace)

    def restart_api_server(
        self, *, down_s: float = 0, with_signal: signal.Signals = signal.SIGTERM
    ) -> None:
        """End the API server, keep it away for a time, start it at its port, wait until ready."""
        # It drains and keeps its port for seconds; a start before its end would meet the old one.
        self.processes.stop("kube-apiserver", with_signal=with_signal)
        time.sleep(down_s)
        self.processes.start_again("kube-apiserver")
        self._wait_until_ready()
        # They give up when it goes away while they start; a kubelet would start them again.
        for name in self._controllers:
            if self.processes.has_ended(name):
                self.processes.stop(name)
                self.processes.start_again(name)

    @property
    def port(self) -> int:
        """Of the API server, at the address in `options`."""
        return self._port

    @property
    def _url(self) -> str:
        return f"https://{self.options.address}:{self._port}"

    def issue_kubeconfig(self, name: str, subject: str) -> Path:
        """A kubeconfig with a certificate for a user such as /O=group/CN=user."""
        issued = self._authority.issue(name, subject)
        cluster = {
            "server": self._url,
            "certificate-authority-data": embedded(self.ca_certificate),
        }
        user = {
            "client-certificate-data": embedded(issued.certificate),
            "client-key-data": embedded(issued.key),
        }
        return write_kubeconfig(self._kubeconfig(name), cluster, user)

    def issue_certificate(self, name: str, *, hosts: tuple[str, ...]) -> Certificate:
        """A serving certificate, as for webhooks; clients trust `ca_certificate`."""
        return self._authority.issue(name, f"/CN={name}", hosts=hosts)

    @property
    def ca_certificate(self) -> Path:
        """What signs every certificate here."""
        return self._authority.certificate

    def _start(self) -> None:
        folder = self.processes.folder
        self._authority = CertificateAuthority(folder)
        self._port = free_port()
        self._start_api_server(self._start_etcd())
        for name, subject in _CLIENTS.items():
            self.issue_kubeconfig(name, subject)
        self._wait_until_ready()
        super().__init__(
            self._kubeconfig("admin"),
            binaries.path("kubectl"),
            folder,
            patience_s=self.options.patience_s,
        )
        # Before the API server is ready the RBAC bootstrap is missing, and the controllers give up.
        self._start_controllers()
        if self.options.kwok:
            self._start_kwok()
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_for(lambda: self.api.exists(account), "a service account of pods", START_S, 0.05)
        for name in self._controllers:
            self.processes.check(name)

    @property
    def _controllers(self) -> tuple[str, ...]:
        simulated = ("kwok",) if self.options.kwok else ()
        return ("kube-controller-manager", "kube-scheduler", *simulated)

    def _kubeconfig(self, name: str) -> Path:
        return self.processes.folder / f"{name}.kubeconfig"

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.processes.start(
            "etcd",
            [
                binaries.path("etcd"),
                f"--data-dir={self.processes.folder / 'etcd'}",
                "--unsafe-no-fsync",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--log-level=warn",
            ],
        )
        return client

    def _start_api_server(self, etcd_url: str) -> None:
        folder, address = self.processes.folder, self.options.address
        # The second is the address of the service `kubernetes`, by which pods find it.
        hosts = (f"IP:{address}", "IP:10.96.0.1", "DNS:localhost", "DNS:kubernetes.default.svc")
        serving = self._authority.issue("kube-apiserver", "/CN=kube-apiserver", hosts=hosts)
        kubelets = self._authority.issue("kubelet-client", "/O=system:masters/CN=kube-apiserver")
        signing = self._authority.issue("service-accounts", "/CN=service-accounts")
        command: list[str | Path] = [
            binaries.path("kube-apiserver"),
            f"--etcd-servers={etcd_url}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.ca_certificate}",
            f"--service-account-issuer={_ISSUER}",
            f"--service-account-key-file={signing.certificate}",
            f"--service-account-signing-key-file={signing.key}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-certificate-authority={self.ca_certificate}",
            f"--kubelet-client-certificate={kubelets.certificate}",
            f"--kubelet-client-key={kubelets.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.96.0.0/16",
            # Without it open watches hold its end for 60 s.
            "--shutdown-watch-termination-grace-period=1s",
        ]
        if address == _LOOPBACK:  # the other kinds refuse it, and no pod could go there
            command.append("--endpoint-reconciler-type=none")
        if self.options.audit:
            policy = folder / "audit-policy.json"
            policy.write_text(json.dumps(_AUDIT_POLICY))
            command += [f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}"]
        self.processes.start("kube-apiserver", command)

    def _wait_until_ready(self) -> None:
        context = ssl.create_default_context(cafile=str(self.ca_certificate))
        admin = self.processes.folder / "admin"
        context.load_cert_chain(admin.with_suffix(".crt"), admin.with_suffix(".key"))
        deadline = time.monotonic() + START_S
        answer = "nothing"
        while time.monotonic() < deadline:
            self.processes.check("etcd")
            self.processes.check("kube-apiserver")
            try:
                with urllib.request.urlopen(f"{self._url}/readyz", context=context, timeout=5):
                    return
            except urllib.error.HTTPError as exc:
                with exc:
                    answer = exc.read().decode()
            except OSError as exc:
                answer = str(exc)
            time.sleep(0.05)
        raise RuntimeError(f"the API server is not ready after {START_S:.0f} s; it said: {answer}")

    def _start_controllers(self) -> None:
        folder, options = self.processes.folder, self.options
        # One of each, and nobody scrapes them: no election, no port.
        usual = ["--leader-elect=false", "--secure-port=0"]
        if options.kube_api_qps is not None:
            usual += [
                f"--kube-api-qps={options.kube_api_qps}",
                f"--kube-api-burst={options.kube_api_qps}",
            ]
        for name, arguments in {
            "kube-controller-manager": [
                f"--root-ca-file={self.ca_certificate}",
                f"--service-account-private-key-file={folder / 'service-accounts.key'}",
                "--use-service-account-credentials",
                "--node-monitor-period=1s",
                f"--node-monitor-grace-period={options.node_monitor_grace_s}s",
            ],
            "kube-scheduler": [],
        }.items():
            kubeconfig = f"--kubeconfig={self._kubeconfig(name)}"
            self.processes.start(name, [binaries.path(name), kubeconfig, *usual, *arguments])

    def _start_kwok(self) -> None:
        folder = self.processes.folder
        config = kwok.write_config(
            folder / "kwok.yaml",
            binaries.module_dir("kwok", "sigs.k8s.io/kwok"),
            heartbeat_s=self.options.heartbeat_s,
            port=free_port(),
            serving=self.issue_certificate("kubelet", hosts=("IP:127.0.0.1",)),
            log=self._write_pod_log(),
        )
        kubeconfig = self.issue_kubeconfig("kwok", "/O=system:masters/CN=kwok")
        options = (f"--kubeconfig={kubeconfig}", f"--config={config}")
        self.processes.start("kwok", [binaries.path("kwok"), *options])

    def _write_pod_log(self) -> Path:
        log = self.processes.folder / "pods.log"
        text = "This pod is simulated: it has a status, but nothing runs in it."
        log.write_text(f"{datetime.now(UTC).isoformat()} stdout F {text}\n")  # as runtimes write it
        return log
