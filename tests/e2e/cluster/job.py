"""The demo's job as `make e2e` runs it: for this store, on these nodes, with a spare."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from tests.cluster.chart import ROOT

DEMO: Final = ROOT / "manifests" / "examples" / "demo.yaml"
NUM_STEPS: Final = 200
"""The last fault strikes before the end where a step takes a second, as on two cores."""
SAVE_EVERY: Final = 10

_STEP_TOKENS: Final = 16 * 512


def demo_job(
    name: str,
    *,
    bucket: str,
    endpoint: str,
    secret: str,
    nodes: Mapping[str, str],
    spares: int,
    steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """The job as a manifest. `nodes`: labels that its nodes must have."""
    job: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    spec = job["spec"]
    job["metadata"]["name"] = name
    spec["storage"] = {"endpoint": endpoint, "credentialsSecret": secret}
    spec["train"]["tokens"] = steps * _STEP_TOKENS
    spec["checkpoint"] = {
        "uri": f"{bucket}/runs/{name}",
        "every": f"{SAVE_EVERY} steps",
        "keep": 3,
        # Saves are waited for, so that one can be stopped in its middle.
        "async": False,
    }
    spec["resources"]["spares"] = spares
    spec["restart"] = {
        "limit": 3,
        "noProgressLimit": 3,
        "nodeLostAfterSeconds": 10,
        "hangAfterSeconds": 90,  # two cores carry four ranks and a cluster
    }
    # Ranks that cannot save any more, as a peer is gone, are waited for as long.
    spec["podTemplate"] = {"nodeSelector": dict(nodes), "terminationGraceSeconds": 25}
    return job
