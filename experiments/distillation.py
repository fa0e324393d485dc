"""What distillation adds to least squares: python experiments/distillation.py [RUN]

The last step of a finished compression is fitted, and then trained in several ways. Printed for the test rows: the
divergence from the unpruned model (KL, in nats), how many rows both models classify alike, the accuracy, and the
seconds that the training took. RUN is that of `python experiments/defaults.py own tweets` by default: a sixth of the
multiplications, without labels. The table goes to docs/compress.md.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from offline import HERE, RUNS

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.model.checkpoint import load_tokenizer
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.run import at_step, units_of
from greedy_gnorm.records import schema
from greedy_gnorm.records.journal import Journal
from greedy_gnorm.records.unpruned import load_unpruned, unpruned_source
from greedy_gnorm.recovery import distillation, variations
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.runs import recovery_of
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import task_of

sys.path.insert(0, str(HERE.parent / "benchmarks"))

from pages import write

TRAININGS = ((distillation.RATE, 300, variations.REPLACED), (1e-4, 300, 0.0))
"""Learning rates, steps, and the share of tokens that are replaced: the defaults now, and before tokens were."""


def judged(model: Any, unpruned: Any, rows: Batches) -> list[str]:
    """A classifier against the unpruned one and the labels."""
    divergence = alike = right = 0.0
    for batch in rows:
        with torch.no_grad():
            before, after = (each(**batch.inputs).logits.double() for each in (unpruned, model))
        chances = before.log_softmax(-1)
        divergence += float((chances.exp() * (chances - after.log_softmax(-1))).sum())
        alike += float((before.argmax(-1) == after.argmax(-1)).sum())
        right += float((after.argmax(-1) == batch.labels).sum())
    shares = (f"{100 * each / rows.rows:.2f}" for each in (alike, right))
    return [f"{divergence / rows.rows:.4f}", *shares]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    journal = Journal.read(folder)
    source = unpruned_source(journal, None)
    unpruned = load_unpruned(journal, source).float()
    tokenizer = load_tokenizer(source, config=unpruned.config)
    settings = Settings.of(schema.complete_settings(journal.header["config"]))
    recovery, _ = recovery_of(journal, unpruned, tokenizer, settings)
    assert recovery is not None
    data = journal.header["data"]["evaluation"]["source"]
    rows = evaluation_batches(unpruned, tokenizer, task_of(unpruned), data, Settings())
    last, units = len(journal.steps) - 1, units_of(journal.header)
    fitted = at_step(unpruned, journal.steps, last, units, replace(recovery, training=None))
    cells = [
        ["unpruned", *judged(unpruned, unpruned, rows), ""],
        ["least squares", *judged(fitted, unpruned, rows), ""],
    ]
    print(cells, flush=True)
    for rate, steps, replaced in TRAININGS:
        distillation.RATE, variations.REPLACED = rate, replaced
        trained, start = copy.deepcopy(fitted), time.monotonic()
        distillation.Distillation(recovery.calibration.original, recovery.calibration.batches, steps)(
            find_sites(trained)
        )
        name = f"and {steps} steps, learning rate {rate:g}, {replaced:.0%} of the tokens replaced"
        cells.append([name, *judged(trained, unpruned, rows), f"{time.monotonic() - start:.0f}"])
        print(cells[-1], flush=True)
    share = journal.steps[-1].cost.multiplications / journal.steps[0].cost.multiplications
    head = f"{share:.0%} of the multiplications, {rows.rows:,} test rows, one thread.\n\n"
    columns = ["", "divergence from the unpruned model", "same prediction, %", "accuracy, %", "seconds"]
    write("compress.md", "distillation", head + as_markdown(columns, cells))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else RUNS / "tweets" / "defaults-own")
