"""Three minutes of chaos: whatever befalls jobs, nodes, the API server and the operators, every job
completes and no law is broken on the way."""

from pathlib import Path
from typing import Final

import pytest

from tests.cluster.chaos import NUM_AT_ONCE, run

MINUTES: Final = 3.0
SEED: Final = 4


@pytest.mark.timeout(900)
def test_every_job_completes_whatever_befalls_it(tmp_path: Path) -> None:
    report = run(seed=SEED, minutes=MINUTES, out=tmp_path, say=print)
    told = "\n".join([str(report), *(report.story(b.name) for b in report.breaches[:2])])
    assert not report.breaches, told
    assert len(report.jobs) >= NUM_AT_ONCE, told
    assert report.longest_gap_s < 20, told
