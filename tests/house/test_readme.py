"""What README and docs tell people to type exists, and what is cheap is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from omni_cli.main import main
from omni_contract.spec import Job, JobSpec
from tests.contract.jobs import changed

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CHEAP = ("make help", "omni --help", "omni plan manifests/examples/demo.yaml")
"""Commands that are run when a document names them."""


def blocks(path: Path, *languages: str) -> list[str]:
    """The code blocks of a document in one of the languages; "" is a block without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [text for language, text in found if language in languages]


def commands() -> list[tuple[str, str]]:
    """(document, command line) of every `make` and `omni` line in a code block."""
    found = []
    for path in DOCUMENTS:
        for text in blocks(path, "", "sh"):
            for line in text.splitlines():
                command = line.split(" #")[0].strip()
                if command.split(" ")[0] in ("make", "omni"):
                    found.append((path.name, command))
    return found


def test_the_readme_shows_commands() -> None:
    assert ("README.md", "make demo") in commands()


@pytest.mark.parametrize(("document", "command"), commands())
def test_a_command_in_a_document_exists(
    document: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        done = subprocess.run(
            ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, command
        return
    names = [word for word in words if not word.startswith("-")]
    asked = [names[0], names[1]] if names[:1] == ["data"] else names[:1]
    assert main([*asked, "--help"]) == 0, command
    said = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert option.split("=")[0] in said, f"{document}: {command}"


@pytest.mark.parametrize("command", [c for _, c in commands() if c in CHEAP])
def test_a_cheap_command_in_a_document_runs(command: str) -> None:
    program, *words = shlex.split(command)
    start = ["make"] if program == "make" else [sys.executable, "-m", "omni_cli.main"]
    done = subprocess.run(
        [*start, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yaml_in_a_document_is_right(path: Path) -> None:
    """A whole job must be valid; a part of one must be a valid change of the demo's."""
    for text in blocks(path, "yaml"):
        document = yaml.safe_load(text)
        if "kind" in document and document.get("spec"):
            Job.read(document)
        elif set(document) == {"spec"}:
            job = changed("metadata.name", "readme")
            job["spec"].update(document["spec"])
            Job.read(job)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_named_in_a_document_exist(path: Path) -> None:
    text = path.read_text()
    links = re.findall(r"\]\(([^):#]+)(?:#[\w-]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    files = re.findall(r"`((?:manifests|docs|charts|contract|tests)/[\w./-]+)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_fields_named_in_a_document_exist(path: Path) -> None:
    """`spec.restart.limit` in prose is checked against the model."""
    if path.name == "job.md":
        return  # written from the model
    for name in re.findall(r"`spec\.([\w.]+)`", path.read_text()):
        node = JobSpec.model_json_schema(by_alias=True)
        definitions = node["$defs"]
        for step in name.split("."):
            assert step in node["properties"], f"{path.name}: spec.{name}"
            field = node["properties"][step]
            reference = field.get("$ref") or str(field.get("anyOf", [{}])[0].get("$ref", ""))
            node = definitions.get(reference.rsplit("/", 1)[-1], {"properties": {}})


def test_values_of_the_chart_named_on_the_install_page_exist() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    table = page.partition("| value | when |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.M)
    named = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    assert "kueue.enabled" in named
    values = yaml.safe_load((ROOT / "charts" / "megascale-omni" / "values.yaml").read_text())
    for name in named:
        here = values
        for step in name.split("."):
            assert step in here, name
            here = here[step]


def test_every_page_of_docs_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in DOCUMENTS[1:] if f"docs/{p.name}" not in readme] == []
