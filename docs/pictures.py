"""Make the README's pictures from a run of the demo: its page and its main figure."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import started  # noqa: E402

from greedy_gnorm.cli.app import main  # noqa: E402


def make(figures: Path) -> None:
    """Run the demo in a folder of its own and take its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if main(["demo", "--quiet"]) != 0:
            sys.exit("The demo failed.")
        run = Path("runs/demo")
        shutil.copy(run / "figures" / "curve.png", figures / "demo-curve.png")
        with started() as browser:
            browser.open(run / "report.html", width=1200)
            browser.picture(figures / "report.png", height=1330)
    print(f"Wrote {figures / 'report.png'} and {figures / 'demo-curve.png'}.")


if __name__ == "__main__":
    make(ROOT / "docs" / "figures")
