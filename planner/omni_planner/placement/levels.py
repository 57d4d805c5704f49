"""Labels to levels: the families of topology labels in use, and the words users have for them.

| family | levels, widest first | the word rack means |
|---|---|---|
| megascale-omni | block, rack | rack |
| topograph | tier-3, tier-2, tier-1, tier-0 | tier-0 |
| topograph-0.x | core, spine, leaf | leaf |
| topograph-0.x-block | datacenter, spine, block | block |
| topograph-alpha | datacenter, spine, block | block |
| gke | block, subblock, host | subblock |
| aws | layer-1, layer-2, layer-3, layer-4 | the last of them that most nodes carry |
| oci | island, network-block, local-block | local-block |

Around the family stand the levels that every cluster may have: region and zone above it; nvlink (an
NVLink domain, also `accelerator` or `clique`) and node below it. A level written as a label key,
with a slash, is that label.
"""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omni_contract.names import GROUP
from omni_planner.placement.types import NoPlacement

NodeLabels = Mapping[str, str]
"""Labels of a Kubernetes node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level: its name, and where a node says which domain of it it is in."""

    name: str
    keys: tuple[str, ...]
    """Label keys; the first that a node carries counts."""
    words: tuple[str, ...] = ()
    """Other words for it. Of two levels that share one, the one that more nodes carry, and then the
    narrower one, is meant."""

    def domain(self, labels: NodeLabels) -> str:
        """Domain of a node with these labels; "" where it carries none of the keys."""
        return next((labels[key] for key in self.keys if labels.get(key)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFamily:
    """Labels that one source writes together."""

    name: str
    levels: tuple[Level, ...]
    """Widest first."""


def _family(name: str, prefix: str, *levels: tuple[str, ...]) -> LabelFamily:
    """Levels as (name, rest of the label key, other words...), widest first."""
    return LabelFamily(
        name=name,
        levels=tuple(
            Level(name=level, keys=(prefix + key,), words=tuple(words))
            for level, key, *words in levels
        ),
    )


FAMILIES: tuple[LabelFamily, ...] = (
    _family("megascale-omni", f"{GROUP}/", ("block", "block"), ("rack", "rack")),
    _family(
        "topograph",
        "fabric.topograph.run/",
        ("tier-3", "tier-3"),
        ("tier-2", "tier-2", "core"),
        ("tier-1", "tier-1", "spine"),
        ("tier-0", "tier-0", "leaf", "rack"),
    ),
    _family(
        "topograph-0.x",
        "network.topology.nvidia.com/",
        ("core", "core"),
        ("spine", "spine"),
        ("leaf", "leaf", "rack"),
    ),
    _family(
        "topograph-0.x-block",
        "network.topology.nvidia.com/",
        ("datacenter", "datacenter"),
        ("spine", "spine"),
        ("block", "block", "leaf", "rack"),
    ),
    _family(
        "topograph-alpha",
        "network.topology.kubernetes.io/",
        ("datacenter", "datacenter"),
        ("spine", "spine"),
        ("block", "block", "leaf", "rack"),
    ),
    _family(
        "gke",
        "cloud.google.com/gce-topology-",
        ("block", "block"),
        ("subblock", "subblock", "rack"),
        ("host", "host"),
    ),
    _family(
        "aws",
        "topology.k8s.aws/network-node-",
        ("layer-1", "layer-1"),
        ("layer-2", "layer-2"),
        ("layer-3", "layer-3", "leaf", "rack"),
        ("layer-4", "layer-4", "leaf", "rack"),  # on newer instance types only
    ),
    _family(
        "oci",
        "oci.oraclecloud.com/rdma.",
        ("island", "hpc_island_id"),
        ("network-block", "network_block_id", "block"),
        ("local-block", "local_block_id", "rack"),
    ),
)
"""Families known by name. A cluster is taken to use one: the first that has the wanted levels, and
of several the one with most labels on the nodes."""

_ABOVE = (
    Level(name="region", keys=("topology.kubernetes.io/region",)),
    Level(name="zone", keys=("topology.kubernetes.io/zone",)),
)
_NVLINK = Level(
    name="nvlink",
    keys=(
        "accelerator.topograph.run/domain",
        "network.topology.nvidia.com/accelerator",
        "network.topology.kubernetes.io/accelerator",
        "topology.k8s.aws/ultraserver-id",
        "nvidia.com/gpu.clique",
    ),
    words=("accelerator", "clique"),
)
_NODE = Level(name="node", keys=("kubernetes.io/hostname",), words=("hostname",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The levels of a cluster, and where each node is."""

    names: tuple[str, ...]
    """Widest first."""
    keys: tuple[str, ...]
    """Label key of each level; that of most nodes where several are in use."""
    paths: tuple[tuple[str, ...], ...]
    """Path of each node, in the order the nodes were given; "" where a label is missing."""
    meant: Mapping[str, str] = field(default_factory=dict)
    """Name of the level by the word that was asked for."""

    def level(self, word: str | None) -> str | None:
        """Name of the level that a wanted word means."""
        return None if word is None else self.meant[word]


def detect(nodes: Sequence[NodeLabels], wanted: Sequence[str]) -> Levels | NoPlacement:
    """Find the label family in use and the place of every node in it.

    `wanted` are the levels a job asks for, as typed: names, other words for them, or label keys.
    A word that means no level is `UnknownTopologyLevel`, one whose labels no node carries is
    `TopologyLabelsMissing`.
    """
    if not nodes:
        return NoPlacement(
            reason="NotEnoughNodes",
            message="there is no node that this job may use; add nodes, or change "
            "podTemplate.nodeSelector, podTemplate.tolerations or resources.gpuResource",
        )
    words = list(dict.fromkeys(wanted))
    use = _Use(nodes)
    chains = [_chain(use, family, words) for family in (*FAMILIES, None)]
    chain = max(
        chains,
        key=lambda chain: (
            sum(_meaning(chain, word) is not None for word in words),
            -sum("/" in level.name for level, _ in chain),  # a family knows the place of its labels
            sum(count for _, count in chain),
        ),
    )
    meant = {}
    for word in words:
        level = _meaning(chain, word)
        if level is None:
            return _no_level(word, chain)
        meant[word] = level.name
    levels = [level for level, _ in chain]
    return Levels(
        names=tuple(level.name for level in levels),
        keys=tuple(max(level.keys, key=lambda key: use.carried[key]) for level in levels),
        paths=tuple(zip(*(use.domains(level) for level in levels), strict=True)),
        meant=meant,
    )


class _Use:
    """Which labels the nodes carry. Nodes are many and families name dozens of keys, so they are
    gone through once."""

    def __init__(self, nodes: Sequence[NodeLabels]) -> None:
        self._nodes = nodes
        self.carried = Counter(key for labels in nodes for key, value in labels.items() if value)
        """Nodes that carry each key with a value."""

    def count(self, level: Level) -> int:
        """Nodes that say in which domain of a level they are."""
        keys = [key for key in level.keys if self.carried[key]]
        if len(keys) < 2:
            return sum(self.carried[key] for key in keys)
        return sum(1 for labels in self._nodes if level.domain(labels))

    def domains(self, level: Level) -> list[str]:
        """The domain of each node; "" where it carries none of the keys."""
        keys = [key for key in level.keys if self.carried[key]]
        if len(keys) == 1:
            return [labels.get(keys[0], "") for labels in self._nodes]
        return [level.domain(labels) for labels in self._nodes]


_Chain = list[tuple[Level, int]]
"""Levels that some node carries, widest first, each with the number of nodes that do."""


def _chain(use: _Use, family: LabelFamily | None, words: Sequence[str]) -> _Chain:
    known = [*_ABOVE, *(family.levels if family else ()), _NVLINK]
    chain = [(level, count) for level in known if (count := use.count(level))]
    for key in words:
        if "/" in key and all(key not in level.keys for level in (*known, _NODE)):
            custom = Level(name=key, keys=(key,))
            if count := use.count(custom):
                at = _place_of(custom, [level for level, _ in chain], use)
                chain.insert(at, (custom, count))
    if count := use.count(_NODE):
        chain.append((_NODE, count))
    return chain


def _place_of(custom: Level, chain: Sequence[Level], use: _Use) -> int:
    """Above the first level with more domains than the label has: wide domains are few."""
    num_domains = len(set(use.domains(custom)))
    for at, level in enumerate(chain):
        if len(set(use.domains(level))) > num_domains:
            return at
    return len(chain)


def _means(level: Level, word: str) -> bool:
    return word == level.name or word in level.words or word in level.keys


def _meaning(chain: _Chain, word: str) -> Level | None:
    fits = [entry for entry in chain if _means(entry[0], word)]
    # Reversed, because max takes the first of equals and the narrowest is meant.
    return max(reversed(fits), key=lambda entry: entry[1])[0] if fits else None


def _no_level(word: str, chain: _Chain) -> NoPlacement:
    levels = [level for level, _ in chain]
    here = ", ".join(_shown(level) for level in levels) or "none"
    known = [*_ABOVE, *(level for family in FAMILIES for level in family.levels), _NVLINK, _NODE]
    keys = dict.fromkeys(key for level in known if _means(level, word) for key in level.keys)
    if keys or "/" in word:
        looked = ", ".join(keys or (word,))
        return NoPlacement(
            reason="TopologyLabelsMissing",
            message=f"topology level {word!r}: no node carries a label of it (looked for "
            f"{looked}); label the nodes, or use a level that they have: {here}",
        )
    spoken = {name for level in known for name in (level.name, *level.words)}
    near = difflib.get_close_matches(word, sorted(spoken), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return NoPlacement(
        reason="UnknownTopologyLevel",
        message=f"topology level {word!r} is unknown; {hint}the levels of this cluster are {here}; "
        "any other label works by its key, such as example.com/rack",
    )


def _shown(level: Level) -> str:
    return f"{level.name} (also {', '.join(level.words)})" if level.words else level.name
