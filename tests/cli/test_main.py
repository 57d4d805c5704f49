"""The command line teaches, starts fast, and answers mistakes in a sentence with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from omni_cli.main import COMMANDS, main


def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name, what in COMMANDS.items():
        assert f"{name} {what}" in said
    assert "Exit codes" in said


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from omni_cli.main import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'boto3', 'matplotlib', 'pydantic'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy - {'pydantic'} else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"omni {command}" in capsys.readouterr().out


def test_an_error_of_the_user_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "job.yaml")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"omni: {tmp_path}/job.yaml: there is no such file; give the path of a job YAML\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plann"], "No such command 'plann'"),
        (["plan"], "Missing argument 'JOB'"),
        (["plan", "--jsn", "x"], "No such option '--jsn'"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import omni_cli.plan

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(omni_cli.plan, "read_job", interrupted)
    assert main(["plan", "job.yaml"]) == 130
    assert "interrupted" in capsys.readouterr().err
