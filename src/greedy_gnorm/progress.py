"""Following a run while it is made: callbacks, and a progress bar for notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from greedy_gnorm.passes.processes import is_first

Callback = Callable[..., None]
"""Called with each new step, the progress so far and its end; in a comparison, with the walk before these."""

FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def followed(
    on_step: Callback | Sequence[Callback] | None, progress: bool | None, title: str
) -> Iterator[Callback | None]:
    """One callback that calls all of these, and moves a progress bar: in notebooks, or if `progress` says so."""
    callbacks = [on_step] if callable(on_step) else list(on_step or ())
    bar = None
    if is_first() and (in_notebook() if progress is None else progress):
        from tqdm.auto import tqdm

        bar = tqdm(desc=title, bar_format=FORMAT)
        callbacks.insert(0, lambda *call: _move(bar, title, *call))

    def call_all(*call: Any) -> None:
        for callback in callbacks:
            callback(*call)

    try:
        yield call_all if callbacks else None
    finally:
        if bar is not None:
            bar.set_description_str(title)
            bar.close()


def _move(bar: Any, title: str, *call: Any) -> None:
    """Show a step: how far the run is, and the quality; a run that has stopped is at its end, and is measured next."""
    *walk, step, done, limit = call
    now = f"{title} {walk[0]}" if walk else f"{title}, measuring the result" if step.stop else title
    if walk and bar.desc != now:
        bar.reset()
    bar.total, bar.n = done if step.stop else limit, done
    bar.set_description_str(now, refresh=False)
    bar.set_postfix({name: f"{value:.3f}" for name, value in step.quality.items()})
