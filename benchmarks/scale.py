"""What a whole run costs on other machines, by a stated model: `make bench-scale` writes the table of docs/scale.md."""

from __future__ import annotations

from dataclasses import dataclass

from pages import write

from greedy_gnorm.report.tables import as_markdown

STEP = 1.26  # plain forwards of the scoring rows: the average of a whole walk, docs/performance.md
THROUGHPUT = 60e12  # multiply-adds x 2 a second that one GPU sustains on these matrices
GATHER = 0.01  # seconds a step to put scores and predictions together
SCORING, EVALUATION, TOKENS = 512, 2000, 128


@dataclass(frozen=True)
class Shape:
    """What the matrices of a model are made of."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    gates: int = 2  # matrices of the feed-forward part

    @property
    def operations(self) -> float:
        """Of one token in a plain forward pass."""
        matrices = 4 * self.width**2 + self.gates * self.width * self.inner
        return 2 * self.layers * (matrices + 2 * TOKENS * self.width)


SHAPES = (
    Shape("BERT-base", 12, 768, 3072, 12),
    Shape("RoBERTa-large", 24, 1024, 4096, 16),
    Shape("a decoder of 7B", 32, 4096, 11008, 32, gates=3),
)


def main() -> None:
    cells = []
    for shape in SHAPES:
        steps = shape.layers * shape.heads
        rows = STEP * SCORING + EVALUATION
        work = steps * rows * TOKENS * shape.operations
        times = [work / THROUGHPUT / count + steps * GATHER * (count > 1) for count in (1, 8, 64)]
        cells.append([shape.name, str(steps), f"{work:.1e}", *(f"{seconds / 60:,.1f}" for seconds in times)])
    write(
        "scale.md",
        "cost",
        as_markdown(["model", "steps", "operations", "minutes on 1 GPU", "on 8", "on 64"], cells),
    )


if __name__ == "__main__":
    main()
