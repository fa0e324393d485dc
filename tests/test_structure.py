"""The shape of the package: imports go one way, every folder says what lives there, registries refuse duplicates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import greedy_gnorm
from greedy_gnorm.registry import Registry

PACKAGE = Path(greedy_gnorm.__file__).parent
TESTS = Path(__file__).parent

ORDER = [
    "errors", "phases", "registry", "settings", "shown", "units", "model", "data", "tasks", "passes", "scores",
    "recovery", "pruning", "records", "comparison", "report", "deployment", "runs", "progress", "trackers", "api",
    "demo", "cli",
]  # fmt: skip
"""A folder or file may import itself and what stands before it, never what stands behind."""
FOLDERS = [name for name in ORDER if (PACKAGE / name).is_dir()]


def imports(path):
    """The package's own modules that a file imports, such as `model.sites`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "greedy_gnorm":
            inside = node.module.partition(".")[2]
            yield from [inside] if inside else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("greedy_gnorm."))


def home(module):
    return module.split(".")[0]


def test_imports_go_one_way():
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        seen.add(own)
        for imported in imports(path):
            assert ORDER.index(home(imported)) <= ORDER.index(own), f"{path.relative_to(PACKAGE)} imports {imported}"
    assert seen == set(ORDER)


def test_only_results_that_are_shown_reach_up():
    """By name, unseen by the test above: public names, results that `report` draws, code of commands, packages."""
    users = {path.stem for path in PACKAGE.rglob("*.py") if "import_module" in path.read_text(encoding="utf-8")}
    assert users == {"__init__", "loading", "shown", "trackers"}
    assert 'import_module(f"greedy_gnorm.report.{module}")' in (PACKAGE / "shown.py").read_text(encoding="utf-8")


def test_there_is_no_circle_inside_a_folder():
    graph = {}
    for folder in FOLDERS:
        for path in (PACKAGE / folder).glob("*.py"):
            if path.stem != "__init__":
                inside = {name for name in imports(path) if name.startswith(f"{folder}.")}
                graph[f"{folder}.{path.stem}"] = inside
    while graph:
        free = [name for name, needed in graph.items() if not needed & set(graph)]
        assert free, f"these import one another: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_there_and_what_must_not(folder):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")))
    assert text
    assert 2 <= len([line for line in text.splitlines() if line]) <= 4


def test_tests_lie_in_the_same_folders():
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders - {"conformance"} == set(FOLDERS)


def test_the_nouns_need_no_torch():
    for name in ("errors", "phases", "registry", "settings", "shown", "units"):
        assert "torch" not in set(imported_libraries(PACKAGE / f"{name}.py"))


def test_libraries_that_few_calls_need_are_imported_by_those():
    """They take half a second or more; with them at the top of a module, `import greedy_gnorm.api` would pay."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert not {"scipy", "sklearn", "datasets"} & set(libraries_of(node)), (
                f"{path.relative_to(PACKAGE)}:{node.lineno}"
            )


def imported_libraries(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield from libraries_of(node)


def libraries_of(node):
    """What a node imports itself, not what stands inside of it."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]


def test_scores_never_cut_surgery_never_ranks_and_the_loop_touches_no_module():
    assert "model.surgery" not in {name for path in (PACKAGE / "scores").glob("*.py") for name in imports(path)}
    assert "torch" not in set(imported_libraries(PACKAGE / "pruning" / "loop.py"))


def test_only_surgery_cuts():
    """Parameters are made in the mechanism of `modeling_pruned`, and it is used for cutting by `surgery` alone."""
    makers = {path.stem for path in PACKAGE.rglob("*.py") if "out_features" in path.read_text(encoding="utf-8")}
    assert makers == {"modeling_pruned", "sites"}, "sites reads widths"
    users = {path.stem for path in PACKAGE.rglob("*.py") if "keep_units" in path.read_text(encoding="utf-8")}
    assert users == {"modeling_pruned", "surgery"}


def test_no_task_is_asked_for_by_name_outside_of_tasks():
    names = ("single_label_classification", "multi_label_classification", '"regression"')
    for path in PACKAGE.rglob("*.py"):
        if "tasks" not in path.parts:
            text = path.read_text(encoding="utf-8")
            assert not any(name in text for name in names), path


def test_public_names_are_there():
    assert all(hasattr(greedy_gnorm, name) for name in greedy_gnorm.__all__)
    assert set(greedy_gnorm.__all__) <= {*dir(greedy_gnorm), "Head", "HeadScores"}
    assert callable(greedy_gnorm.prune)
    assert callable(greedy_gnorm.score)


def test_a_registry_refuses_duplicates_and_lists_its_choices():
    registry: Registry[int] = Registry("thing")
    registry.add("one", 1)
    with pytest.raises(ValueError, match="already registered"):
        registry.add("one", 2)
    with pytest.raises(greedy_gnorm.GnormError, match=r"Unknown thing 'ones'. Did you mean 'one'\? Choose from: one"):
        registry["ones"]
