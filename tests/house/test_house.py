"""The repository's own rules that no linter knows."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("cli", "contract", "dataloader", "operator", "planner", "trainer")
MAX_MODULE_LINES = 500
VAGUE_NAMES = {"common.py", "helpers.py", "misc.py", "util.py", "utils.py"}


def modules() -> list[Path]:
    roots = [ROOT / project / f"omni_{project}" for project in PROJECTS] + [ROOT / "tests"]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    outer_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    env = {key: value for key, value in os.environ.items() if key not in outer_make} | environ
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_folder_is_not_a_package(project: str) -> None:
    """`operator/__init__.py` would stop Python from starting in the repository root."""
    assert not (ROOT / project / "__init__.py").exists()
    package = ROOT / project / f"omni_{project}"
    assert (package / "__init__.py").is_file()
    assert (package / "py.typed").is_file()


def test_operator_is_the_standard_library_in_the_repository_root() -> None:
    code = "import sys; sys.path.insert(0, ''); import operator; print(operator.__file__)"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "operator")


def test_every_module_is_short_and_named_for_its_idea() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in modules()}
    assert sizes
    assert {path: size for path, size in sizes.items() if size > MAX_MODULE_LINES} == {}
    assert [path for path in sizes if path.name in VAGUE_NAMES] == []


def test_every_folder_with_code_is_a_package() -> None:
    """Ranks that a test starts import it by name, so tests are packages all the way down."""
    folders = {path.parent for path in modules()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_second_setup_has_nothing_to_do() -> None:
    done = run("make", "-q", "setup")
    assert done.returncode == 0, "make setup is not up to date: a pyproject or constraints changed"


def test_make_alone_prints_every_target() -> None:
    listed = re.findall(r"^  make ([a-z0-9-]+) ", run("make").stdout, re.M)
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed == phony[0].split()
    assert {"setup", "demo", "test", "test-cluster", "dev-cluster", "lint"} < set(listed)


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-cluster", "dev-cluster", "lint", "verify", "manifests"]
)
def test_a_target_installs_first(target: str) -> None:
    """`make test` on a bare machine must be enough."""
    done = run("make", "--dry-run", "--always-make", target)
    assert done.returncode == 0, done.stderr
    assert "uv pip install" in done.stdout


def test_setup_without_python_311_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "make"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for project in PROJECTS:
        (tmp_path / project).mkdir()
        (tmp_path / project / "pyproject.toml").touch()
    done = run("make", "-C", str(tmp_path), "setup", PATH=str(tmp_path / "bin"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1 and "Python 3.11 is needed" in said[0]


def test_every_dependency_is_pinned() -> None:
    pinned = set(re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    for path in [ROOT / "pyproject.toml"] + [ROOT / name / "pyproject.toml" for name in PROJECTS]:
        document = tomllib.loads(path.read_text())
        project = document.get("project", {})
        groups = [
            *project.get("optional-dependencies", {}).values(),
            *document.get("dependency-groups", {}).values(),
        ]
        wanted = [*project.get("dependencies", []), *(one for group in groups for one in group)]
        names = {re.split(r"[\[<>=!~ ]", one)[0].lower() for one in wanted}
        missing = {name for name in names if not name.startswith("omni-")} - pinned
        assert missing == set(), f"{path}: add them to constraints.txt"


def test_readme_names_two_commands_that_exist() -> None:
    """Continuous integration takes the second one from there."""
    assert readme_commands() == ["make demo", "make test"]
    for command in readme_commands():
        assert run(*command.split(), "--dry-run").returncode == 0


def test_readme_and_layout_point_at_what_exists() -> None:
    for document in (ROOT / "README.md", ROOT / "docs" / "layout.md"):
        text = document.read_text()
        folders = re.findall(r"^\| `([\w/]+/)` \|", text, re.M)
        links = re.findall(r"\]\(([^):#]+)\)", text)
        missing = [name for name in folders + links if not (document.parent / name).exists()]
        assert missing == [], document
