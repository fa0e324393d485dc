"""What distillation adds to least squares: python experiments/distillation.py [MODEL DATA]

A model is compressed to a quarter of its multiplications and fitted, and then trained with several learning rates and
numbers of steps. Printed for the test rows: the divergence from the unpruned model (KL, in nats), how many rows both
models classify alike, the accuracy, and the seconds that the training took. The figures in docs/compress.md are those
of shared/models/minilm-tweets and shared/data/tweets.jsonl beside the project, with one thread.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch

import greedy_gnorm as gg
from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.sets import CALIBRATION, TEST
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.prepare import load_inputs, load_sets
from greedy_gnorm.recovery import distillation
from greedy_gnorm.settings import Settings

SHARED = Path(__file__).resolve().parents[2] / "shared"
INPUTS = str(SHARED / "models" / "minilm-tweets"), str(SHARED / "data" / "tweets.jsonl")
COMPRESSION: dict[str, Any] = {"macs": 0.25, "rounds": 6, "samples": 128, "calibration_tokens": 49152}
TRAININGS = ((1e-4, 300), (3e-4, 300))
"""Learning rates and steps."""


def judged(model: Any, unpruned: Any, rows: Batches) -> str:
    """A classifier against the unpruned one and the labels."""
    divergence = alike = right = 0.0
    for batch in rows:
        with torch.no_grad():
            before, after = (each(**batch.inputs).logits.double() for each in (unpruned, model))
        chances = before.log_softmax(-1)
        divergence += float((chances.exp() * (chances - after.log_softmax(-1))).sum())
        alike += float((before.argmax(-1) == after.argmax(-1)).sum())
        right += float((after.argmax(-1) == batch.labels).sum())
    return f"KL {divergence / rows.rows:.4f}  alike {alike / rows.rows:.4f}  accuracy {right / rows.rows:.4f}"


def main(model: str, data: str) -> None:
    torch.set_num_threads(1)
    run = gg.compress(model, data, recover="least-squares", measure_speed=False, **COMPRESSION)
    settings = Settings(method="joint-refit", **COMPRESSION)
    sets = load_sets(*load_inputs(model, None, settings, "both"), data, None, settings)
    assert run.recovery is not None
    original, fitted = run.recovery.calibration.original, run.model.float()
    for name, each in (("unpruned", original.model), ("least squares", fitted)):
        print(f"{name:20}  {judged(each, original.model, sets[TEST])}", flush=True)
    for rate, steps in TRAININGS:
        distillation.RATE, trained, start = rate, copy.deepcopy(fitted), time.monotonic()
        distillation.Distillation(original, sets[CALIBRATION], steps)(find_sites(trained))
        seconds = time.monotonic() - start
        print(
            f"{f'{steps} steps at {rate:g}':20}  {judged(trained, original.model, sets[TEST])}  {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(*(sys.argv[1:] or INPUTS))
