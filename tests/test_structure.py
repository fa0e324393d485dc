"""The shape of the package: imports go one way, registries refuse duplicates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import greedy_gnorm
from greedy_gnorm.registry import Registry

PACKAGE = Path(greedy_gnorm.__file__).parent

# From the ground up: a module may import what stands before it, never what stands behind
FLOORS = [
    "errors", "interrupts", "modeling_pruned", "registry", "heads", "savings", "config", "files", "modes", "families",
    "sites", "gates", "surgery", "labels", "sources", "batches", "distributed", "problems", "encoding", "data",
    "objectives", "passes", "evaluate", "attention", "rows", "gradients", "scores", "strategies", "rules", "measure",
    "speed", "loop", "records", "journal", "comparison", "checkpoint", "opening", "header", "tables", "figures",
    "charts", "page", "facts", "report", "export", "outcome", "hub", "run", "replay", "paper_figures", "experiment",
    "demo", "sketch", "console", "commands", "options", "cli",
]  # fmt: skip


def imports(path):
    """The package's own modules that a file imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "greedy_gnorm":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from names


def test_imports_go_one_way():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for imported in imports(path):
            assert FLOORS.index(imported) <= FLOORS.index(room), f"{path.name} imports {imported}"
            assert imported != room or room == "scores", f"{path.name} imports itself"


def test_scores_never_cut_surgery_never_ranks_and_the_loop_touches_no_module():
    assert "surgery" not in {name for path in (PACKAGE / "scores").glob("*.py") for name in imports(path)}
    assert not {"scores", "strategies"} & set(imports(PACKAGE / "surgery.py"))
    assert "torch" not in (PACKAGE / "loop.py").read_text()
    assert "import torch" not in (PACKAGE / "heads.py").read_text()


def test_public_names_are_there():
    assert all(hasattr(greedy_gnorm, name) for name in greedy_gnorm.__all__)
    assert callable(greedy_gnorm.prune)
    assert callable(greedy_gnorm.score)


def test_a_registry_refuses_duplicates_and_lists_its_choices():
    registry: Registry[int] = Registry("thing")
    registry.add("one", 1)
    with pytest.raises(ValueError, match="registered already"):
        registry.add("one", 2)
    with pytest.raises(greedy_gnorm.GnormError, match=r"Unknown thing 'ones'. Did you mean 'one'\? Choose from: one"):
        registry["ones"]
