"""The command line becomes settings, and a mistake in it is told with the rule."""

import pytest

from omni_operator.options import parse
from omni_operator.settings import Settings

NEEDED = ["--image=trainer:1", "--lease=system/omni"]


def test_what_is_left_out_has_the_settings_defaults() -> None:
    options = parse(NEEDED)
    assert options.settings == Settings(image="trainer:1")
    assert (options.lease_namespace, options.lease_name) == ("system", "omni")
    assert (options.port, options.log_level) == (8080, "INFO")


def test_every_option_reaches_its_setting() -> None:
    options = parse(
        [
            *NEEDED,
            "--image-pull-policy=Always",
            "--data-image=data:1",
            "--data-image-pull-policy=Never",
            "--priority-class=high",
            "--watched-namespace=team",
            "--cluster-domain=corp",
            "--with-kueue",
            "--max-concurrent-writes=7",
            "--resync-seconds=60",
            "--port=0",
            "--log-level=DEBUG",
        ]
    )
    assert options.settings == Settings(
        image="trainer:1",
        image_pull_policy="Always",
        data_image="data:1",
        data_image_pull_policy="Never",
        priority_class="high",
        watched_namespace="team",
        cluster_domain="corp",
        with_kueue=True,
        max_concurrent_writes=7,
        resync_s=60,
    )
    assert (options.port, options.log_level) == (0, "DEBUG")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--lease=omni"], "'omni' is not of the form NAMESPACE/NAME"),
        (["--lease=a/b/c"], "'a/b/c' is not of the form NAMESPACE/NAME"),
        (["--max-concurrent-writes=0"], "'0' is not a whole number from 1 on"),
        (["--resync-seconds=soon"], "'soon' is not a whole number from 1 on"),
        (["--image-pull-policy=Sometimes"], "Always"),
        (["--data-image-pull-policy=Sometimes"], "Always"),
    ],
)
def test_a_mistake_is_told_with_the_rule(
    wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*NEEDED, *wrong])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_the_help_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "KUBECONFIG" in capsys.readouterr().out
