"""A kubectl that serves the objects of a file instead of a cluster, and writes down its calls.

The folder named by FAKE_KUBECTL holds `objects.json` (a list), and after every call `calls.jsonl`
(its arguments). `refusal.txt` there is said on stderr instead, with exit code 1, `refusal-VERB.txt`
for one verb. Files `objects.json.1`, `.2`, ... take the place of `objects.json` one by one, a call
each. A pod that is created has the status in `status.json`, or runs. With `notice.txt` a program
that is executed says that on stderr, and goes on until its stdin ends.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = "FAKE_KUBECTL"


def main() -> int:
    folder = Path(os.environ[FOLDER])
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    refusal = folder / "refusal.txt"
    if refusal.exists():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    following = sorted(folder.glob("objects.json.*"))
    objects = json.loads((folder / "objects.json").read_text())
    if following:
        following[0].replace(folder / "objects.json")
    parser = argparse.ArgumentParser()
    for flag in ("--namespace", "--context", "--kubeconfig", "--request-timeout"):
        parser.add_argument(flag)
    verbs = parser.add_subparsers(dest="verb", required=True)
    get = verbs.add_parser("get")
    get.add_argument("kind")
    get.add_argument("name", nargs="?")
    get.add_argument("--selector")
    get.add_argument("--field-selector")
    get.add_argument("-o", choices=["json"], required=True)
    for verb in ("annotate", "patch"):
        change = verbs.add_parser(verb)
        change.add_argument("kind")
        change.add_argument("name")
        change.add_argument("value", nargs="?")
        change.add_argument("--type")
        change.add_argument("--patch")
        change.add_argument("--overwrite", action="store_true")
    logs = verbs.add_parser("logs")
    logs.add_argument("name", nargs="?")
    logs.add_argument("--container")
    logs.add_argument("--selector")
    logs.add_argument("--prefix", action="store_true")
    logs.add_argument("--follow", action="store_true")
    logs.add_argument("--tail")
    logs.add_argument("--max-log-requests")
    execute = verbs.add_parser("exec")
    execute.add_argument("name")
    execute.add_argument("--container")
    execute.add_argument("--stdin", action="store_true")
    execute.add_argument("command", nargs="+")
    create = verbs.add_parser("create")
    create.add_argument("--filename", choices=["-"], required=True)
    create.add_argument("--output", choices=["name"], required=True)
    delete = verbs.add_parser("delete")
    delete.add_argument("kind")
    delete.add_argument("name", nargs="?")
    for flag in ("--selector", "--field-selector", "--wait"):
        delete.add_argument(flag)
    delete.add_argument("--ignore-not-found", action="store_true")
    options = parser.parse_args()
    refusal = folder / f"refusal-{options.verb}.txt"
    if refusal.exists():
        print(refusal.read_text(), file=sys.stderr)
        return 1
    if options.verb == "get":
        return _get(objects, options)
    if options.verb == "logs":
        print(f"the log of {options.name or options.selector} {options.container}")
        return 0
    if options.verb == "exec":
        print(f"stored, read in {options.name}")
        if (folder / "notice.txt").exists():
            print((folder / "notice.txt").read_text(), file=sys.stderr, flush=True)
            sys.stdin.read()
        return 0
    if options.verb == "create":
        return _create(folder, objects)
    print(f"{options.kind}/{options.name} changed")
    return 0


def _create(folder: Path, objects: list[dict[str, Any]]) -> int:
    pod = json.load(sys.stdin)
    name = pod["metadata"].pop("generateName") + "x7k2p"
    pod["metadata"]["name"] = name
    status = folder / "status.json"
    pod["status"] = json.loads(status.read_text()) if status.exists() else {"phase": "Running"}
    (folder / "objects.json").write_text(json.dumps([*objects, pod]))
    print(f"pod/{name}")
    return 0


def _get(objects: list[dict[str, Any]], options: argparse.Namespace) -> int:
    kinds = {
        "multimodaltrainingjobs.megascale-omni.dev": "MultimodalTrainingJob",
        "pods": "Pod",
        "pod": "Pod",
        "configmap": "ConfigMap",
        "configmaps": "ConfigMap",
        "events": "Event",
    }
    found = [o for o in objects if o["kind"] == kinds[options.kind]]
    if options.name:
        for one in found:
            if one["metadata"]["name"] == options.name:
                print(json.dumps(one))
                return 0
        print(
            f'Error from server (NotFound): {options.kind} "{options.name}" not found',
            file=sys.stderr,
        )
        return 1
    if options.selector:
        key, _, value = options.selector.partition("=")
        found = [o for o in found if o["metadata"].get("labels", {}).get(key) == value]
    if options.field_selector:
        _, _, uid = options.field_selector.partition("=")
        found = [o for o in found if o["involvedObject"]["uid"] == uid]
    print(json.dumps({"kind": "List", "items": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
