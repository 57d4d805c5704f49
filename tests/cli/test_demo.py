"""What the demo refuses before it deletes or builds anything."""

from pathlib import Path

import pytest

from omni_cli.main import main
from omni_contract.names import Exit


def test_a_folder_of_the_user_is_refused_and_not_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "home"
    (out / "run").mkdir(parents=True)
    (out / "thesis.tex").write_text("years of work")
    assert main(["demo", "--out", str(out), "--cache", str(tmp_path / "cache")]) == Exit.USER
    said = capsys.readouterr().err
    assert said.startswith(f"omni: --out {out}: 'thesis.tex' lies there and comes from no demo")
    assert (out / "thesis.tex").read_text() == "years of work"
    assert (out / "run").is_dir()


def test_a_wrong_fault_is_refused_before_the_data_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    arguments = ["demo", "--out", str(tmp_path / "out"), "--cache", str(cache)]
    assert main([*arguments, "--fault", "kill-rank:9@66"]) == Exit.USER
    assert "the job has 4 ranks" in capsys.readouterr().err
    assert not cache.exists()
