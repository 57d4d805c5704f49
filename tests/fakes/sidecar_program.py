"""A data service that serves nothing: it waits, or ends as `sidecar.json` in the run folder says.

The file maps "NODE" to {"exit", "times"}: so often it ends at its start with this code.
"""

import json
import sys
import time
from pathlib import Path


def main() -> int:
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    run_dir, node = Path(arguments["run-dir"]), arguments["node"]
    starts = run_dir / f"starts-{node}"
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    script = run_dir / "sidecar.json"
    part = json.loads(script.read_text()).get(node) if script.exists() else None
    if part is not None and count < part["times"]:
        print("error: s3://omni/pictures: the bucket 'omni' does not exist; create it")
        return int(part["exit"])
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
