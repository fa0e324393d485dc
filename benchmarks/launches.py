"""What passes launch on a device and ask it for: python benchmarks/launches.py writes to docs/performance.md.

No GPU is needed to count it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pages import write
from rivals import plain_forward
from speed import PAGE, bert, score, sentences
from torch.utils._python_dispatch import TorchDispatchMode

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.passes.evaluation import evaluate
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.scores import SCORES
from greedy_gnorm.tasks.objectives import OBJECTIVES


class Launches(TorchDispatchMode):
    """Counts operations, each of which a GPU would launch, and the values that the program waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.questions = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.operations += 1
        self.questions += function._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")
        return function(*arguments, **(options or {}))


def main() -> None:
    layers, few, many = 3, sentences(8, 32, 32, 128), sentences(32, 32, 32, 128)
    sites = bert(hidden_size=48, intermediate_size=64, num_attention_heads=4, num_hidden_layers=layers)
    works: dict[str, Callable[[Batches], Any]] = {
        "a plain forward pass": lambda batches: plain_forward(sites.model, batches),
        "quality": lambda batches: evaluate(sites, batches),
        "fisher": lambda batches: SCORES["fisher"](sites, batches, OBJECTIVES["loss"]),
        "gnorm": lambda batches: score(sites, batches),
    }
    cells = []
    for name, work in works.items():
        counts = []
        for batches in (few, many):
            work(batches)
            with Launches() as counted:
                work(batches)
            counts.append((counted.operations, counted.questions))
        more = len(many.items) - len(few.items)
        operations, questions = ((counts[1][place] - counts[0][place]) / more for place in (0, 1))
        once = counts[0][1] - questions * len(few.items)
        cells.append([name, f"{operations / layers:.0f}", f"{questions:.0f}", f"{once:.0f}"])
    columns = ["work", "operations per layer and batch", "values asked for per batch", "and once"]
    write(PAGE, "launches", as_markdown(columns, cells))


if __name__ == "__main__":
    main()
