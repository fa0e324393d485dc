"""Tables of a page in docs/, written where the page marks them: <!-- name --> ... <!-- /name -->."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write(page: str, name: str, text: str) -> None:
    """Put the text between the marks of this name."""
    path = DOCS / page
    content = path.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = content.partition(start)
    _, also, after = rest.partition(end)
    if not (found and also):
        raise SystemExit(f"{path} has no place for {name}: it needs {start} and {end}.")
    path.write_text(f"{before}{start}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
    print(f"{page}: {name}\n{text}", flush=True)
