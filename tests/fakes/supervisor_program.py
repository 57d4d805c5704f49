"""A supervisor that only ends, as `supervisor.json` in the run folder says.

The file maps NODE to [seconds, exit code].
"""

import argparse
import json
import sys
import time
from pathlib import Path


def main() -> int:
    """Wait, say a sentence, end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    args, _ = parser.parse_known_args()
    wait_s, code = json.loads((args.run_dir / "supervisor.json").read_text())[args.node]
    time.sleep(wait_s)
    print(f"node {args.node} ends with {code}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
