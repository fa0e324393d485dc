"""Pages of the site that are made when it is built: from files of the project, the command line and the registries."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from greedy_gnorm.cli.app import app, main
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SCORING, SETTINGS, Settings

ROOT = Path(__file__).resolve().parents[1]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
}
"""Pages whose source is outside of docs."""
COMMANDS = {"prune": PRUNING, "compress": COMPRESSING, "score": SCORING, "compare": COMPARING}
SHIM = "https://unpkg.com/iframe-worker/shim"
"""The script by which search works in pages that are opened from disk; the theme would load it from the network."""
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {page: moved(name) for name, page in MOVED.items()}
    pages["index.md"] = "---\nhide: [navigation]\n---\n" + pages["index.md"]
    pages["reference/command-line.md"] = command_line()
    pages["reference/settings.md"] = settings()
    pages["reference/methods.md"] = methods()
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load every script from the site itself."""
    return output.replace(SHIM, get_relative_url("iframe-worker.js", page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page that says that there is none."""
    return output_content.replace(SHIM, "iframe-worker.js")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page that lead out of docs."""
    return markdown if page.file.src_uri in MOVED.values() else for_site(markdown, f"docs/{page.file.src_uri}")


def moved(name: str) -> str:
    """A file of the project as a page."""
    return for_site((ROOT / name).read_text(encoding="utf-8"), name)


def for_site(text: str, name: str) -> str:
    """The text of a file whose links lead to pages of the site; what is not on the site is named without a link."""

    def replace(link: re.Match[str]) -> str:
        words, target, anchor = link.groups(default="")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if place in MOVED or place.startswith("docs/"):
            here = posixpath.dirname(MOVED.get(name, name.removeprefix("docs/")))
            page = MOVED.get(place, place.removeprefix("docs/"))
            return f"[{words}]({posixpath.relpath(page, here)}{anchor})"
        return words

    return LINK.sub(replace, text)


def command_line() -> str:
    """Every command with its arguments and options, as `--help` shows them."""
    parts = ["# Command line\n", "`python -m greedy_gnorm` is the same as `gnorm`, for torchrun and accelerate.\n"]
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        context = command.make_context(f"gnorm {name}", [], resilient_parsing=True)
        usage = command.get_usage(context).removeprefix("Usage: ")
        records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
        cells = [[f"`{option}`", literal(about)] for option, about in records]
        parts += [f"## gnorm {name}\n", f"{command.help}\n", f"    {usage}\n", table(["option", "meaning"], cells)]
    return "\n".join(parts)


def settings() -> str:
    """Every setting: its default, its meaning and the functions that take it."""
    cells = []
    for name in SETTINGS:
        field = Settings.model_fields[name]
        used = ", ".join(command for command, names in COMMANDS.items() if name in names)
        cells.append([f"`{name}`", f"`{field.default!r}`", literal(str(field.description)), used])
    return "\n".join(
        [
            "# Settings\n",
            "Keywords of the functions in Python. On the command line, `min_heads` is `--min-heads`; a YAML file for",
            "`--config` takes both spellings. `compress` has the method `joint-refit` by default.\n",
            table(["setting", "default", "meaning", "used by"], cells),
        ]
    )


def methods() -> str:
    """Methods, scores, objectives and rules, as `gnorm methods` lists them."""
    with redirect_stdout(StringIO()) as printed:
        if main(["methods", "--json"]) != 0:
            raise PluginError("gnorm methods --json failed.")
    others = json.loads(printed.getvalue())
    rows = others.pop("methods")
    parts = ["# Methods, scores, objectives, rules\n", "What `gnorm methods` prints.\n", "## Methods\n"]
    parts.append(table(list(rows[0]), [[literal(str(cell)) for cell in row.values()] for row in rows]))
    for title, content in others.items():
        cells = [[f"`{name}`", literal(about)] for name, about in content.items()]
        parts += [f"## {title.capitalize()}\n", table(["name", "meaning"], cells)]
    return "\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def literal(text: str) -> str:
    """Text in which only code between backticks is mark-up."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([*_<\[\]|])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)
