"""What a run came to: the solution in figures, and the files that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from greedy_gnorm import figures
from greedy_gnorm.checkpoint import save
from greedy_gnorm.files import whole_folder, write_text
from greedy_gnorm.heads import Head, Step, by_site, removed_by
from greedy_gnorm.journal import Journal
from greedy_gnorm.measure import HEADER, Counts, as_csv, as_markdown, module_counts, size_table, table_cells
from greedy_gnorm.report import write_report


@dataclass(frozen=True)
class Run:
    """A finished run: every step, the chosen one, and the model pruned to it."""

    steps: list[Step]
    solution: Step
    model: Any
    tokenizer: Any
    header: dict[str, Any]
    counts_before: Counts

    @property
    def removed(self) -> list[Head]:
        """The heads that the solution removes, in the order they went."""
        return removed_by(self.steps[: self.solution.step + 1])

    @property
    def quality(self) -> str:
        """The measure that the rules and the curve follow."""
        return str(self.header["quality"])

    @property
    def reason(self) -> str:
        """Why the run ended."""
        return self.steps[-1].stop or "unfinished"

    def parameter_table(self) -> list[list[str]]:
        """The paper's parameter table for this model and solution, as text cells."""
        rows = size_table(self.counts_before, module_counts(self.model))
        before, after = (step.quality[self.quality] for step in (self.steps[0], self.solution))
        return table_cells(rows, (self.quality, before, after))

    def summary(self) -> dict[str, Any]:
        """The result in plain values, as `gnorm prune --json` prints it."""
        first, chosen = self.steps[0], self.solution
        return {
            "solution": chosen.step,
            "reason": self.reason,
            "heads": {"total": _heads_at_start(self.header), "removed": len(self.removed)},
            "removed": {str(site): heads for site, heads in by_site(self.removed).items()},
            "quality": {name: [first.quality[name], chosen.quality[name]] for name in first.quality},
            "parameters": [first.parameters, chosen.parameters],
            "bytes": [first.bytes, chosen.bytes],
            "steps": len(self.steps) - 1,
            "seconds": sum(sum(step.seconds.values()) for step in self.steps),
        }


def _heads_at_start(header: dict[str, Any]) -> int:
    sites, heads = header["model"]["shape"]
    return int(sites * heads - len(header["model"]["removed"]))


def write_outcome(run: Run, journal: Journal) -> None:
    """The model, tables, figures and the page into the run's folder, and the result into run.json."""
    save(run.model, run.tokenizer, journal.folder / "model", card=model_card(run))
    with whole_folder(journal.folder / "tables") as tables:
        write_text(tables / "curve.csv", curve_csv(run.steps))
        write_text(tables / "parameters.csv", as_csv(HEADER, run.parameter_table()))
        write_text(tables / "parameters.md", as_markdown(HEADER, run.parameter_table()))
    with whole_folder(journal.folder / "figures") as folder:
        figures.save(figures.curve(run.steps, run.solution.step, run.quality), folder / "curve")
        figures.save(figures.mask(run.removed, run.header["model"]), folder / "mask")
        scored = next((step.scores for step in run.steps if step.scores is not None), None)
        if scored is not None:
            figures.save(
                figures.heat_map(scored, f"Scores before pruning ({run.header['config']['method']})"), folder / "scores"
            )
    journal.finish(run.summary())
    write_report([journal.folder])


def curve_csv(steps: list[Step]) -> str:
    """Heads removed, quality and size, a line a step."""
    names = list(steps[0].quality)
    cells, gone = [], 0
    for step in steps:
        gone += len(step.removed)
        heads = " ".join(str(head) for head in step.removed)
        cells.append(
            [str(gone), heads, *(repr(step.quality[name]) for name in names), str(step.parameters), str(step.bytes)]
        )
    return as_csv(["heads_removed", "removed", *names, "parameters", "bytes"], cells)


def model_card(run: Run) -> str:
    """README.md of the pruned model."""
    summary, config, data = run.summary(), run.header["config"], run.header["data"]
    quality = "".join(
        f"| {name} | {before:.4f} | {after:.4f} |\n" for name, (before, after) in summary["quality"].items()
    )
    return (
        f"---\nlibrary_name: transformers\ntags:\n- greedy-gnorm\n- pruned\n---\n\n"
        f"# {run.header['model']['name']}, pruned\n\n"
        f"{summary['heads']['removed']} of {summary['heads']['total']} attention heads removed by greedy-gnorm "
        f"(method {config['method']}, objective {config['objective']}, seed {config['seed']}).\n\n"
        f"| | before | after |\n|---|---:|---:|\n{quality}"
        f"| parameters | {summary['parameters'][0]:,} | {summary['parameters'][1]:,} |\n"
        f"| bytes | {summary['bytes'][0]:,} | {summary['bytes'][1]:,} |\n\n"
        f"Quality on {data['evaluation']['rows']} rows (fingerprint {data['evaluation']['fingerprint']}), "
        f"heads chosen on {data['scoring']['rows']} rows (fingerprint {data['scoring']['fingerprint']}).\n\n"
        f'Load it with:\n\n```python\nimport greedy_gnorm as gg\n\nmodel = gg.load("path/to/this/folder")\n```\n'
    )
