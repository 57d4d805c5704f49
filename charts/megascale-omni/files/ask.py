"""Asks URLs, for so many seconds each, until it is answered well. Run by `helm test`."""

import sys
import time
import urllib.request

patience_s, urls = float(sys.argv[1]), sys.argv[2:]
for url in urls:
    until_s = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as page:
                print(url, page.status, page.read().decode().strip(), flush=True)
            break
        except OSError as exc:
            if time.monotonic() > until_s:
                sys.exit(f"{url}: {exc}")
        time.sleep(1)
