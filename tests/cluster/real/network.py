"""Addresses of one cluster of real nodes, and the bridge that they meet on.

The host is the gateway of the bridge: there listen API server and DNS. It forwards nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

from tests.cluster.processes import Processes
from tests.cluster.real.command import run

_NUMBERS: Final = range(160, 224)
"""Second byte of the addresses of a cluster. Services have 10.96.0.0/16, which only pods see."""
MAX_NODES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Addresses and names of links. Nodes are counted from 1."""

    number: int
    """Tells clusters on one machine apart."""
    num_nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise ValueError(f"num_nodes: {self.num_nodes}; use 1 to {MAX_NODES}")

    @property
    def bridge(self) -> str:
        """Name of the link that connects the nodes."""
        return f"omni{self.number}"

    @property
    def gateway(self) -> str:
        """The host on the bridge."""
        return f"10.{self.number}.0.1"

    @property
    def all_pods(self) -> str:
        """Subnet of the pods of all nodes."""
        return f"10.{self.number}.128.0/17"

    def link(self, node: int) -> str:
        """The host's end of a node's cable."""
        return f"{self.bridge}n{node}"

    def address(self, node: int) -> str:
        """Of a node on the bridge."""
        return f"10.{self.number}.0.{node + 10}"

    def pods(self, node: int) -> str:
        """Subnet of the pods of one node."""
        return f"10.{self.number}.{node + 128}.0/24"

    def routes(self, node: int | None = None) -> list[tuple[str, str]]:
        """How a node, or else the host, reaches the pods of the others: subnet and next address."""
        others = [other for other in range(1, self.num_nodes + 1) if other != node]
        return [(self.pods(other), self.address(other)) for other in others]


def free_numbers(routes: Iterable[str]) -> list[int]:
    """Numbers whose addresses lead nowhere yet; `routes`: destinations, as `ip` prints them."""
    taken = [IPv4Network(route, strict=False) for route in routes if route != "default"]
    return [
        number
        for number in _NUMBERS
        if not any(IPv4Network(f"10.{number}.0.0/16").overlaps(other) for other in taken)
    ]


def build_bridge(processes: Processes, num_nodes: int) -> Network:
    """Claim a free network and make its bridge, with routes to the pods; gone with `processes`."""
    routes = json.loads(run(["ip", "-json", "-4", "route", "show"]))
    network = _claim(processes, free_numbers(route["dst"] for route in routes), num_nodes)
    run(["ip", "address", "add", f"{network.gateway}/24", "dev", network.bridge])
    run(["ip", "link", "set", network.bridge, "up"])
    for subnet, address in network.routes():
        run(["ip", "route", "add", subnet, "via", address])
    return network


def _claim(processes: Processes, numbers: Iterable[int], num_nodes: int) -> Network:
    refusal = f"no addresses 10.{_NUMBERS.start}.0.0/16 to 10.{_NUMBERS.stop - 1}.0.0/16 are free"
    for number in numbers:
        network = Network(number=number, num_nodes=num_nodes)
        try:
            run(["ip", "link", "add", network.bridge, "type", "bridge"])
        except RuntimeError as exc:
            if "File exists" not in str(exc):
                raise
            refusal = str(exc)  # another cluster was faster
        else:
            processes.run_at_end("ip", "link", "delete", network.bridge)
            return network
    raise RuntimeError(f"no network for real nodes: {refusal}")
