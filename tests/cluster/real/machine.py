"""A machine made of namespaces, with a cable to the bridge. It knows nothing of Kubernetes.

It has its own network, processes, mounts and name. When its first process is killed the kernel ends
all others of it, and with them go its mounts and links: nothing of a machine can be left behind.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.cluster.api import wait_for
from tests.cluster.processes import Processes
from tests.cluster.real import machine_init
from tests.cluster.real.command import run
from tests.cluster.real.network import Network

_BOOT_S: Final = 10.0
_END_S: Final = 10.0
_NAMESPACES: Final = ("--net", "--mount", "--pid", "--uts")
_TABLE: Final = "omni-partition"


def cut_off(address: str, *, port: int, own_port: int) -> str:
    """Rules, as nft reads them, that let no packet through between this machine, with its pods, and
    what listens at `port` of an address; nor from there to `own_port`. All else goes on."""
    to = f"ip daddr {address} tcp dport {port} drop"
    back = f"ip daddr {address} tcp sport {own_port} drop"
    chains = "\n".join(
        f"chain {hook} {{ type filter hook {hook} priority 10; {to}; {back}; }}"
        for hook in ("output", "forward")
    )
    return f"table inet {_TABLE} {{\n{chains}\n}}\n"


class Machine:
    """One machine. `folder` keeps its /var, also while it is off."""

    def __init__(
        self, processes: Processes, network: Network, index: int, name: str, folder: Path
    ) -> None:
        self.name = name
        self._processes = processes
        self._network = network
        self._index = index
        self._folder = folder
        self._pid = 0
        self._is_cut_off = False
        # Not there by itself in a new /var, and programs look for their sockets under it.
        self.var.mkdir(parents=True)
        (self.var / "run").symlink_to("/run")

    @property
    def var(self) -> Path:
        """What the machine sees as /var."""
        return self._folder / "var"

    @property
    def address(self) -> str:
        """On the bridge."""
        return self._network.address(self._index)

    @property
    def subnet(self) -> str:
        """That the others send to this machine, beside its address."""
        return self._network.pods(self._index)

    def boot(self) -> None:
        """Switch it on, and put its cable in."""
        ready = self._folder / machine_init.READY
        ready.unlink(missing_ok=True)
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        command += ["--propagation=private", sys.executable, "-I", "-S", machine_init.__file__]
        outer = self._processes.start(self.name, [*command, self.name, self._folder])

        def has_booted() -> bool:
            self._processes.check(self.name)
            return ready.exists()

        wait_for(has_booted, f"{self.name} booted", _BOOT_S, 0.02)
        (first,) = psutil.Process(outer).children()
        self._pid = first.pid
        self._put_cable_in()

    def power_off(self) -> None:
        """End it as when the power fails: all of its processes at once, and wait for that."""
        self._processes.stop(self.name, with_signal=signal.SIGKILL)
        wait_for(lambda: _has_ended(self._pid), f"{self.name} off", _END_S, 0.02)

    def start(self, service: str, command: Sequence[str | Path]) -> None:
        """Run a program on it until it is killed or the power fails."""
        # nsenter stays outside and waits for the program, which must not outlive it.
        inside = ["setpriv", "--pdeathsig=KILL", *command]
        self._processes.start(self._process(service), [*self._enter(*_NAMESPACES), *inside])

    def start_again(self, service: str) -> None:
        """Run it as it was last run."""
        self._processes.start_again(self._process(service))

    def kill(self, service: str) -> None:
        """End a program where it stands, and wait until it is gone."""
        self.check(service)
        (program,) = psutil.Process(self._processes.pid(self._process(service))).children()
        self._processes.stop(self._process(service), with_signal=signal.SIGKILL)
        wait_for(lambda: _has_ended(program.pid), f"the end of {program}", _END_S, 0.02)

    def check(self, service: str) -> None:
        """Raise where a program ended by itself, with what it said."""
        self._processes.check(self._process(service))

    def log(self, service: str) -> Path:
        """Where the program writes."""
        return self._processes.log(self._process(service))

    def run(self, *command: str | Path, timeout_s: float = 60) -> str:
        """Run a command on it to its end; returns what it printed, raises where it fails."""
        return run([*self._enter(*_NAMESPACES), *command], timeout_s=timeout_s)

    def pull_cable_out(self) -> None:
        """Nothing gets in or out any more."""
        run(["ip", "link", "set", self._link, "down"])

    def cut_off_from(self, address: str, *, port: int, own_port: int) -> None:
        """Lose what is told by `cut_off`."""
        if self._is_cut_off:
            return
        rules = cut_off(address, port=port, own_port=own_port)
        run([*self._enter("--net"), "nft", "-f", "-"], stdin=rules)
        self._is_cut_off = True

    def heal(self) -> None:
        """Undo both."""
        run(["ip", "link", "set", self._link, "up"])
        if self._is_cut_off:
            run([*self._enter("--net"), "nft", "delete", "table", "inet", _TABLE])
            self._is_cut_off = False

    @property
    def _link(self) -> str:
        return self._network.link(self._index)

    def _process(self, service: str) -> str:
        return f"{self.name}-{service}"

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self._pid}", *namespaces]

    def _put_cable_in(self) -> None:
        network, link, pid = self._network, self._link, str(self._pid)
        # Connections without a process, which nobody answers, keep a network alive for minutes.
        gone = f"ip link delete {link} || ! ip link show {link}"
        self._processes.run_at_end("sh", "-c", gone)
        run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid])
        run(["ip", "link", "set", link, "master", network.bridge, "up"])
        ip = [*self._enter("--net"), "ip"]
        run([*ip, "link", "set", "lo", "up"])
        run([*ip, "address", "add", f"{self.address}/24", "dev", "eth0"])
        run([*ip, "link", "set", "eth0", "up"])
        for subnet, address in network.routes(self._index):
            run([*ip, "route", "add", subnet, "via", address])
        # Services have addresses that lead nowhere, but are looked up before they are rewritten.
        run([*ip, "route", "add", "default", "via", network.gateway])
        # Read from the process's own network, whatever is mounted.
        forward = "/proc/sys/net/ipv4/ip_forward"
        run([*self._enter("--net"), "tee", forward], stdin="1")


def _has_ended(pid: int) -> bool:
    """Also where nobody took note of its end yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
