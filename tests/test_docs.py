"""The documentation: its links lead somewhere, its commands and numbers exist, and the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from greedy_gnorm.cli.app import app
from greedy_gnorm.model.families import FAMILIES
from greedy_gnorm.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OUTSIDE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "experiments/README.md")]
PAGES = sorted([*OUTSIDE, *DOCS.rglob("*.md")])
GENERATED = {"index.md", "changelog.md", "contributing.md", "experiments.md"}
GENERATED |= {f"reference/{name}.md" for name in ("command-line", "settings", "methods")}
FENCED = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)


def text_of(path):
    return path.read_text(encoding="utf-8")


def anchors(path):
    """The anchors of a page's headings, as forges and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(path)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text_of(path))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        made = target.is_relative_to(DOCS) and target.relative_to(DOCS).as_posix() in GENERATED
        assert made or target.is_file(), link
        assert not anchor or anchor in anchors(target), link


GNORM = typer.main.get_command(app).commands
COMMAND = re.compile(rf"(?:^|\s)(?:gnorm|-m greedy_gnorm) ((?:{'|'.join(GNORM)})\b.*)")


def commands(text):
    """The gnorm commands in blocks of code, without what stands before them."""
    text = re.sub(r"\\\n\s*", "", text)
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    indented = re.findall(r"^    (.+)$", FENCED.sub("", text), flags=re.MULTILINE)
    return [found[1] for line in [*blocks.splitlines(), *indented] if (found := COMMAND.search(line))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_have_the_options_that_they_are_shown_with(path):
    for line in commands(text_of(path)):
        name, *arguments = shlex.split(line, comments=True)
        known = {option for each in GNORM[name].params for option in (*each.opts, *each.secondary_opts)}
        used = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        assert used <= known, line


def test_commands_are_found():
    assert len([line for path in PAGES for line in commands(text_of(path))]) > 40


def test_the_first_screen_has_commands_a_number_and_a_picture():
    first = README.partition("\n## ")[0]
    assert first.index("make demo") < first.index("make test") < first.index("gnorm compress") < first.index("![")
    assert len(first.splitlines()) < 30


def test_the_numbers_of_the_readme_were_measured():
    """Every decimal number in the first screen and in the tables of gains is in the results or the measured speeds."""
    first, _, rest = README.partition("\n## ")
    gains = rest.partition("## What to expect\n")[2].partition("\n## ")[0]
    measured = re.findall(r"\d*\.\d+", text_of(DOCS / "results.md") + text_of(DOCS / "deployment.md"))
    known = {round(float(number) * factor, 4) for number in measured for factor in (1, 100)}
    numbers = re.findall(r"\d+\.\d+", first + gains)
    assert len(numbers) > 30
    assert {float(number) for number in numbers} <= known


def test_the_readme_lists_every_family_and_task():
    supported = README.partition("## What is supported\n\n")[2].partition("\n## ")[0]
    tables = [block for block in supported.split("\n\n") if block.startswith("|")]
    tasks, families = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]] for table in tables
    )
    assert {row[0].lower() for row in families} == set(FAMILIES)
    assert {row[0]: row[1].split(",")[0].strip("`") for row in tasks} == {
        name: TASKS[name].auto_class for name in TASKS
    }


def entries(nav):
    for entry in nav:
        for value in entry.values():
            yield from entries(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_once():
    nav = list(entries(yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["nav"]))
    assert len(nav) == len(set(nav))
    assert set(nav) == GENERATED | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//", text_of(page)), (
            page.name
        )
    reference = text_of(tmp_path / "site" / "reference" / "python.html")
    for name in ("compress", "prune", "score", "compare", "take_step", "load", "Run", "Step", "Scores"):
        assert f'id="greedy_gnorm.{name}"' in reference, name
    assert "--calibration-tokens" in text_of(tmp_path / "site" / "reference" / "command-line.html")


@pytest.mark.draws
def test_the_first_picture_is_drawn_from_the_results(tmp_path):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    pictures = module_from_spec(spec)
    spec.loader.exec_module(pictures)
    pictures.draw_gains(text_of(DOCS / "results.md"), "joint-financial", "MiniLM", tmp_path / "gains.png")
    assert (tmp_path / "gains.png").stat().st_size > 20_000
