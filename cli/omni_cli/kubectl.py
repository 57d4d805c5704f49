"""The door to kubectl: whose cluster, user and rights a command has is kubectl's business alone."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_contract.errors import OmniError
from omni_contract.log_store import NOTICE
from omni_contract.names import KIND, PLURAL

REQUEST_TIMEOUT_S: Final = 20
"""A server that answers later than this does not answer a person."""


class KubectlError(OmniError):
    """kubectl could not do what it was asked; the message says why and what would help."""


class NotFoundError(KubectlError):
    """There is no object of this name."""


class NotReachedError(KubectlError):
    """The container that should run a command does not run, or nobody gets to its node."""


class UnreachableError(KubectlError):
    """The API server does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl with the flags that say which cluster and which namespace."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def get(self, *arguments: str) -> dict[str, Any]:
        """`kubectl get ... -o json`, parsed. Raises KubectlError."""
        text = self.run("get", *arguments, "-o", "json")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            raise KubectlError(f"kubectl get answered no JSON but {text[:80]!r}") from None
        return found

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return what it printed. Raises KubectlError where it fails."""
        command = self._command(f"--request-timeout={REQUEST_TIMEOUT_S}s", *arguments)
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        except OSError as exc:
            raise _cannot_start(exc) from None
        if done.returncode:
            raise error_of(done.stderr)
        return done.stdout

    def pass_on(self, *arguments: str) -> int:
        """Run kubectl on this terminal, its words and all, and return its exit code."""
        try:
            return subprocess.run(self._command(*arguments), check=False).returncode
        except OSError as exc:
            raise _cannot_start(exc) from None

    def exec(self, pod: str, container: str, *command: str, holds_stdin: bool = False) -> None:
        """Run a program in a container, its output on this terminal, and its notices at once.
        Raises KubectlError with what else it said where it fails.

        `holds_stdin`: its stdin is open for as long as somebody waits for it here.
        """
        flags = [f"--container={container}", *(["--stdin"] if holds_stdin else [])]
        stdin = subprocess.PIPE if holds_stdin else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self._command("exec", pod, *flags, "--", *command),
                stdin=stdin,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as exc:
            raise _cannot_start(exc) from None
        with process:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                if line.startswith(NOTICE):
                    print(line, end="", file=sys.stderr, flush=True)
                else:
                    said.append(line)
        if process.returncode:
            raise exec_error_of("".join(said))

    def _command(self, *arguments: str) -> list[str]:
        flags: Mapping[str, str | None] = {
            "namespace": self.namespace,
            "context": self.context,
            "kubeconfig": self.kubeconfig,
        }
        given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        return ["kubectl", *given, *arguments]


def _cannot_start(exc: OSError) -> KubectlError:
    if isinstance(exc, FileNotFoundError):
        return KubectlError(
            "there is no kubectl on PATH, and every command here speaks to the cluster through it; "
            "install it (https://kubernetes.io/docs/tasks/tools) or mend PATH"
        )
    return KubectlError(f"kubectl cannot be started: {exc}")


def error_of(stderr: str) -> KubectlError:
    """What kubectl's last words mean here. Its own sentence stays where it is the better one."""
    said = _last_words(stderr)
    if PLURAL in said and re.search(r"doesn't have a resource type|could not find", said):
        return KubectlError(
            f"this cluster knows no {KIND}: the operator is not installed there. Install it "
            "(helm install omni charts/megascale-omni --namespace omni-system --create-namespace), "
            "or choose another cluster with --context"
        )
    if "(NotFound)" in said:
        return NotFoundError(said)
    if "(Forbidden)" in said:
        return KubectlError(f"{said}. Ask who runs the cluster for this right, or choose -n")
    if re.search(r"Unable to connect|was refused|no such host|i/o timeout|deadline exceeded", said):
        return UnreachableError(
            "the cluster does not answer. Is it up, and is it the one you mean (kubectl config "
            f"current-context)? kubectl says: {said}"
        )
    return KubectlError(said or "kubectl failed without a word")


def exec_error_of(stderr: str) -> KubectlError:
    """What the last words of `kubectl exec` mean: those of the program, if it got as far."""
    ended = re.compile(r"^(error: )?command terminated with exit code \d+$")
    lines = stderr.splitlines()
    if any(ended.match(line) for line in lines):
        return KubectlError("\n".join(line for line in lines if not ended.match(line)))
    if re.search(r"container not found|completed pod|error dialing backend", stderr):
        return NotReachedError(_last_words(stderr))
    return error_of(stderr)


def _last_words(stderr: str) -> str:
    """Its error without the log lines of its libraries, such as `E1130 07:52:29 ...`."""
    lines = [line.strip() for line in stderr.splitlines()]
    told = [line for line in lines if line and not re.match(r"[IWEF]\d{4} \d\d:", line)]
    return re.sub(r"^error: ", "", " ".join(told)).rstrip(".")
