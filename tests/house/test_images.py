"""The Containerfiles and what builds them, without building: a builder is not everywhere."""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from omni_contract.records import History
from omni_operator.render.pod import render_pod
from tests.contract.jobs import DEMO
from tests.house.test_house import ROOT
from tests.operator.rendering import SETTINGS, job_state, place_on, plan_of

IMAGES = ("operator", "dataloader", "trainer", "cli")
CONSTRAINTS = {"PIP_CONSTRAINT", "UV_CONSTRAINT", "UV_BUILD_CONSTRAINT"}
LEFT_OUT = {"cli": {"megatron-core", "tensorboard", "torch"}}
"""What an image has no use for, though its projects depend on it."""
TOOLS = ("bash", "dirname", "git", "mkdir", "rm", "sed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """(instruction, the rest of its line)."""

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def stages(image: str) -> list[Stage]:
    text = (ROOT / image / "Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    found = [Stage(name="", base="")]
    for line in filter(None, text.splitlines()):
        instruction, rest = line.split(" ", 1)
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(name=name, base=base))
        else:
            found[-1].steps.append((instruction, " ".join(rest.split())))
    return found


def copied(image: str) -> list[str]:
    """What is taken from the repository."""
    copies = [rest for stage in stages(image) for rest in stage.all("COPY")]
    return [rest.split()[0] for rest in copies if not rest.startswith("--from=")]


def projects_of(image: str) -> list[str]:
    """The projects that an image's project depends on, itself included."""
    found, left = set(), [image]
    while left:
        project = left.pop()
        document = tomllib.loads((ROOT / project / "pyproject.toml").read_text())
        needed = re.findall(r"omni-(\w+)", " ".join(document["project"]["dependencies"]))
        found.add(project)
        left += [name for name in needed if name not in found]
    return sorted(found)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_the_projects_that_it_needs(image: str) -> None:
    projects = projects_of(image)
    assert sorted(copied(image)) == sorted(
        ["constraints.txt", *projects, *(f"{project}/pyproject.toml" for project in projects)]
    )
    runs = " ".join(rest for stage in stages(image) for rest in stage.all("RUN"))
    assert sorted(re.findall(r" \./(\w+)", runs)) == projects
    assert sorted(re.findall(r" -r (\w+)/pyproject\.toml", runs)) == projects


@pytest.mark.parametrize("image", IMAGES)
def test_only_what_an_image_does_not_need_is_left_out(image: str) -> None:
    runs = " ".join(rest for stage in stages(image) for rest in stage.all("RUN"))
    (words,) = re.findall(r"printf '%s\\n' ([\w -]+) > left-out.txt", runs)
    ours = {f"omni-{project}" for project in projects_of(image) if project != image}
    assert set(words.split()) == ours | LEFT_OUT.get(image, set())


@pytest.mark.parametrize("image", IMAGES)
def test_everything_is_installed_in_the_versions_of_the_constraints_file(image: str) -> None:
    """Settings are inherited: a stage that installs must come from the one that has them."""
    by_name = {stage.name: stage for stage in stages(image)}
    for stage in stages(image):
        if not any(re.search(r"pip (install|wheel)", run) for run in stage.all("RUN")):
            continue
        root = stage
        while root.base in by_name:
            root = by_name[root.base]
        assert "constraints.txt ./" in root.all("COPY")
        settings = dict(pair.split("=") for pair in " ".join(root.all("ENV")).split())
        assert {settings[name] for name in CONSTRAINTS} == {"/src/constraints.txt"}, stage.name


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_the_user_that_pods_have_and_writes_to_tmp_only(image: str) -> None:
    last = stages(image)[-1]
    job, plan = job_state(DEMO), plan_of(DEMO)
    pod = render_pod(job, plan, place_on(job, plan), 0, SETTINGS, History())
    context = pod["spec"]["securityContext"]
    assert last.all("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert last.all("RUN") == []
    settings = dict(pair.split("=") for pair in " ".join(last.all("ENV")).split())
    assert settings["HOME"] == "/tmp"
    assert settings["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_starts_exists(image: str) -> None:
    (text,) = stages(image)[-1].all("ENTRYPOINT")
    command = json.loads(text)
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2]) is not None
    else:
        document = tomllib.loads((ROOT / image / "pyproject.toml").read_text())
        assert command[0] in document["project"]["scripts"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_comes_from_any_registry_and_index(image: str) -> None:
    """Which ones is said when it is built."""
    text = (ROOT / image / "Containerfile").read_text()
    assert re.findall(r"https?://|--index|--extra-index|--find-links", text) == []
    first = stages(image)[0]
    assert "BASE=python:3.11-slim-bookworm" in first.all("ARG")
    names = {stage.name for stage in stages(image)}
    for stage in stages(image)[1:]:
        own = re.sub(r"\$\{VARIANT\}", "cpu", stage.base)
        assert own == "${BASE}" or own in names


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_labelled(image: str) -> None:
    (labels,) = stages(image)[-1].all("LABEL")
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    assert found["title"] == f"megascale-omni/{image}"
    assert found["licenses"] == "Apache-2.0"
    assert (found["version"], found["revision"]) == ("${VERSION}", "${REVISION}")
    assert found["description"]


def test_the_context_holds_what_the_images_copy_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert let_in == {path.split("/")[0] for image in IMAGES for path in copied(image)}


def test_the_chart_runs_images_of_these_names() -> None:
    values = yaml.safe_load((ROOT / "charts" / "megascale-omni" / "values.yaml").read_text())
    named = {values[key]["repository"] for key in values if key.lower().endswith("image")}
    assert named <= {f"megascale-omni/{image}" for image in IMAGES}
    assert {"megascale-omni/operator", "megascale-omni/trainer"} <= named


class Builders:
    """A PATH with builders that write down what they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = folder / "calls"
        for tool in TOOLS:
            (folder / tool).symlink_to(shutil.which(tool) or tool)

    def add(self, name: str, *, works: bool = True) -> None:
        program = self._folder / name
        program.write_text(
            f'#!/usr/bin/env bash\n[ "$1" != info ] || exit {0 if works else 1}\n'
            f'printf "%s\\n" "{name} $*" >> {self._calls}\n'
        )
        program.chmod(0o755)

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self._folder}", **variables}
        bash = shutil.which("bash") or "bash"
        return subprocess.run(
            [bash, "images.sh"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def calls(self, **variables: str) -> list[str]:
        """What the builders are asked for."""
        self._calls.write_text("")
        done = self.run(**variables)
        assert done.returncode == 0, done.stderr
        return self._calls.read_text().splitlines()


@pytest.fixture
def builders(tmp_path: Path) -> Builders:
    return Builders(tmp_path)


def version() -> str:
    chart = yaml.safe_load((ROOT / "charts" / "megascale-omni" / "Chart.yaml").read_text())
    return str(chart["appVersion"])


def tags(calls: list[str]) -> list[str]:
    return [found for call in calls for found in re.findall(r"--tag (\S+)", call)]


def test_all_images_are_built_with_the_tag_that_the_chart_asks_for(builders: Builders) -> None:
    builders.add("docker")
    calls = builders.calls()
    assert tags(calls) == [f"megascale-omni/{image}:{version()}" for image in IMAGES]
    for image, call in zip(IMAGES, calls, strict=True):
        assert f"--file {image}/Containerfile" in call
        assert f"--build-arg VERSION={version()}" in call
        assert ("VARIANT=cpu" in call) is (image == "trainer")


def test_what_is_asked_for_reaches_the_builder(builders: Builders, tmp_path: Path) -> None:
    builders.add("buildah")
    (tmp_path / "ca.crt").touch()
    (call,) = builders.calls(
        IMAGES="trainer",
        TAG="7",
        VARIANT="gpu",
        REPOSITORY="registry.example/team",
        BASE="registry.example/python:3.11",
        CA_BUNDLE=f"{tmp_path}/ca.crt",
        NETRC=f"{tmp_path}/netrc",
        PIP_INDEX_URL="https://index.example/simple",
        BUILD_ARGS="FLASH_ATTN_CUDA_ARCHS=90 TORCH_BACKEND=cu130",
        BUILD_FLAGS="--isolation chroot",
    )
    assert call.startswith("buildah build --layers ")
    for words in (
        "--tag registry.example/team/trainer:7-gpu",
        "--build-arg VARIANT=gpu",
        "--build-arg BASE=registry.example/python:3.11",
        f"--secret id=ca,src={tmp_path}/ca.crt",
        "--build-arg SSL_CERT_FILE=/run/secrets/ca",
        f"--secret id=netrc,src={tmp_path}/netrc",
        "--build-arg PIP_INDEX_URL=https://index.example/simple",
        "--build-arg FLASH_ATTN_CUDA_ARCHS=90",
        "--build-arg TORCH_BACKEND=cu130",
        "--isolation chroot",
    ):
        assert words in call
    assert "UV_DEFAULT_INDEX" not in call


@pytest.mark.parametrize(
    ("repository", "reference"),
    [
        ("", "docker.io/megascale-omni/cli:1"),
        ("localhost/omni", "localhost/omni/cli:1"),
        ("registry.example:5000/a/b", "registry.example:5000/a/b/cli:1"),
    ],
)
def test_an_archive_has_the_name_under_which_nodes_look(
    builders: Builders, tmp_path: Path, repository: str, reference: str
) -> None:
    builders.add("podman")
    archive = tmp_path / "images"
    _, push = builders.calls(IMAGES="cli", TAG="1", REPOSITORY=repository, ARCHIVE=f"{archive}")
    assert push.split()[:2] == ["podman", "push"]
    assert push.endswith(f" oci-archive:{archive}/cli.tar:{reference}")


def test_docker_saves_an_archive_by_itself(builders: Builders, tmp_path: Path) -> None:
    builders.add("docker")
    _, save = builders.calls(IMAGES="cli", TAG="1", ARCHIVE=f"{tmp_path}/images")
    assert save == f"docker save --output {tmp_path}/images/cli.tar megascale-omni/cli:1"


def test_the_first_builder_that_works_is_taken(builders: Builders) -> None:
    builders.add("docker")
    builders.add("podman", works=False)
    assert builders.calls(IMAGES="cli")[0].startswith("docker build ")
    builders.add("podman")
    assert builders.calls(IMAGES="cli")[0].startswith("podman build ")
    assert builders.calls(IMAGES="cli", BUILDER="docker")[0].startswith("docker build ")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "neither buildah nor podman nor docker works here; install one of them"),
        ({"IMAGES": "cli loader"}, "IMAGES: there is no image 'loader'; name some of: operator"),
        ({"VARIANT": "rocm"}, "VARIANT: 'rocm' is no variant of the trainer; use cpu or gpu"),
        ({"CA_BUNDLE": "/none"}, "CA_BUNDLE: '/none' cannot be read"),
    ],
)
def test_a_mistake_is_told_before_anything_is_built(
    builders: Builders, variables: dict[str, str], told: str
) -> None:
    if variables:
        builders.add("buildah")
    else:
        builders.add("docker", works=False)
    done = builders.run(**variables)
    assert done.returncode == 1
    assert done.stderr.startswith(f"images: {told}")
    assert done.stdout == ""


def test_make_hands_on_what_it_is_told(builders: Builders, tmp_path: Path) -> None:
    builders.add("buildah")
    (tmp_path / "make").symlink_to(shutil.which("make") or "make")
    done = subprocess.run(
        ["make", "images", "IMAGES=cli", "TAG=5", "BASE=a b"],
        cwd=ROOT, env={"PATH": f"{tmp_path}"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "calls").read_text()
    assert "--tag megascale-omni/cli:5" in call and "--build-arg BASE=a b" in call
