"""Writes what is generated from the contract: CRD, JSON schema, reference, table of faults."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from omni_contract.crd_docs import job_schema, reference
from omni_contract.crd_schema import Schema, structural
from omni_contract.faults_docs import with_fault_table
from omni_contract.names import GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION
from omni_contract.spec import JOB_NAME_PATTERN, JobSpec
from omni_contract.status import JobStatus

_COLUMNS = (
    ("Phase", "string", ".status.phase", "The conditions in one word.", 0),
    ("Reason", "string", ".status.reason", "What explains the phase.", 0),
    ("Step", "integer", ".status.progress.step", "Optimizer steps finished.", 0),
    ("Of", "integer", ".status.progress.numSteps", "Steps of the whole job.", 0),
    ("Loss", "number", ".status.progress.loss", "Loss of the last step.", 0),
    ("Attempt", "integer", ".status.attempt", "Placements so far.", 0),
    ("Restarts", "integer", ".status.restarts", "Restarts in all.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since it was created.", 0),
    ("Nodes", "integer", ".spec.resources.nodes", "Pods asked for.", 1),
    ("Queue", "string", ".spec.queueName", "Queue of the quota system.", 1),
)
_ROOT = Path(__file__).resolve().parents[2]
_HEADER = "# Written by `make manifests` from contract/omni_contract; edit there.\n"


def crd() -> Schema:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, description: str, priority: int) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


def _root() -> Schema:
    name = {"type": "string", "maxLength": 40, "pattern": JOB_NAME_PATTERN}
    return {
        "type": "object",
        "description": "A training job over text, pictures and speech.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": structural(JobSpec),
            "status": structural(JobStatus),
        },
    }


def generated(root: Path = _ROOT) -> dict[str, str]:
    """Path within the repository and text of every generated file; of the page about faults only
    the table is generated, the rest is as it is there."""
    faults = root / "docs" / "faults.md"
    manifest = _HEADER + yaml.dump(crd(), sort_keys=False, width=100, Dumper=_Dumper)
    schema = json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"
    return {
        "manifests/crd.yaml": manifest,
        "charts/megascale-omni/crds/crd.yaml": manifest,
        "manifests/job.schema.json": schema,
        "docs/job.md": reference(),
        "docs/faults.md": with_fault_table(faults.read_text() if faults.exists() else ""),
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Blocks that occur twice are written twice: kubectl shows anchors to nobody's joy."""
        return True


def main(arguments: list[str] | None = None) -> int:
    """Write the generated files, or say which of them differ. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m omni_contract.crd", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument(
        "--root",
        type=Path,
        default=_ROOT,
        help="the repository (default: the one this module lies in)",
    )
    options = parser.parse_args(arguments)
    different = []
    for name, text in generated(options.root).items():
        path = options.root / name
        if path.exists() and path.read_text() == text:
            continue
        different.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if options.check and different:
        print(f"{', '.join(different)}: not what the contract says; run make manifests")
        return 1
    for name in different:
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
