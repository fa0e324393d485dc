"""What is published: the files of the wheel, its dependencies, its version, and that it works on its own."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "greedy_gnorm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plain(name):
    """A distribution's name, as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    return {plain(re.match(r"[\w.-]+", each)[0]) for each in requirements}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "licenses", source / "licenses")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel_of(folder):
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_nothing_else(built):
    found = set(zipfile.ZipFile(wheel_of(built)).namelist())
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    assert {name for name in found if not name.startswith(f"greedy_gnorm-{PROJECT['version']}.dist-info/")} == expected
    assert {f"greedy_gnorm/{name}" for name in ("py.typed", "demo_sentences.tsv", "model/modeling_pruned.py")} < found
    assert any(name.startswith("greedy_gnorm/report/templates/") for name in found)
    assert {Path(name).name for name in found if "/licenses/" in name} == {"LICENSE", "django.txt"}


def test_there_is_an_sdist_of_the_same_version(built):
    assert [path.name for path in built.glob("*.tar.gz")] == [f"greedy_gnorm-{PROJECT['version']}.tar.gz"]


def test_everything_imported_is_declared():
    """Imports that run with a module are those of runtime dependencies; a function may import one of an extra."""
    runtime, of = names(PROJECT["dependencies"]), packages_distributions()
    extras = names(each for group in PROJECT["optional-dependencies"].values() for each in group)
    for path in PACKAGE.rglob("*.py"):
        for library, at_once in imported(path):
            found = {plain(name) for name in of.get(library, [library])}
            allowed = runtime if at_once else runtime | extras
            assert found & allowed, f"{path.relative_to(PACKAGE)} imports {library}"


def imported(path):
    """The libraries that a file imports from elsewhere, and whether it does so outside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    later = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        for library in {module.split(".")[0] for module in modules} - {"greedy_gnorm", *sys.stdlib_module_names}:
            yield library, id(node) not in later


def test_version_changelog_and_citation_agree():
    """The top of the changelog is the released version, or the one that a `.dev0` version leads to."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["version"]
    heading = f"{version.removesuffix('.dev0')} (unreleased)" if version.endswith(".dev0") else version
    assert re.search(r"^## (.+)$", changelog, flags=re.MULTILINE)[1] == heading
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version


def test_the_forge_runs_the_checks_of_the_project():
    forge = ROOT / ".github"
    workflow = yaml.safe_load((forge / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert {"run": ".ci/run"} in workflow["jobs"]["run"]["steps"]
    for path in set((forge / "ISSUE_TEMPLATE").glob("*.yml")) - {forge / "ISSUE_TEMPLATE" / "config.yml"}:
        template = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(template), path
        assert all({"type", "id", "attributes"} <= set(part) for part in template["body"]), path


def test_every_extra_that_is_named_exists():
    files = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py")]
    for path in files:
        for group in re.findall(r"(?:greedy-gnorm|'\.)\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            assert set(group.split(",")) <= set(PROJECT["optional-dependencies"]), path


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(built, tmp_path):
    """With runtime dependencies only: the demo trains, prunes and writes its page, and the model loads again."""
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    constraints = str(ROOT / "constraints.txt")
    run(str(binaries / "pip"), "install", "--quiet", "--constraint", constraints, str(wheel_of(built)))
    run(str(binaries / "pip"), "check")
    installed = {plain(each["name"]) for each in json.loads(run(str(binaries / "pip"), "list", "--format", "json"))}
    assert not installed & {"pytest", "django", "onnxruntime", "mkdocs"}, "of extras only"
    assert run(str(binaries / "gnorm"), "--version") == f"gnorm {PROJECT['version']}\n"
    run(str(binaries / "gnorm"), "demo", "--stop", "heads=2", "--quiet")
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 1_000_000
    code = "import greedy_gnorm as gg; print(gg.find_sites(gg.load('runs/demo/model'), 'heads')[0].total)"
    assert run(str(binaries / "python"), "-c", code) == "8\n"
