"""What one exact scoring pass costs against a plain forward pass, against a backward per sentence, and against the
paper's own procedure (a full forward and backward with weight gradients, once per layer). Ratios within one run."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from greedy_gnorm.batches import Batch, Batches, bucketed, padded
from greedy_gnorm.gradients import gradient_norms
from greedy_gnorm.objectives import OBJECTIVES
from greedy_gnorm.sites import find_sites

LOGIT_NORM = OBJECTIVES["logit-norm"]


def sentences(count: int, shortest: int, longest: int) -> Batches:
    """Random token rows of unequal length, bucketed as the package does it."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=chance).tolist()
    rows = [torch.randint(5, 30000, (length,), generator=chance).tolist() for length in lengths]
    tokenised = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    items = [
        Batch(padded([tokenised[place] for place in group], {"input_ids": 0, "attention_mask": 0}), None, tuple(group))
        for group in bucketed(lengths, 2048)
    ]
    return Batches(tuple(items), "benchmark")


def plain_forward(model: Any, batches: Batches) -> None:
    with torch.no_grad():
        for batch in batches:
            model(**batch.inputs)


def backward_per_sentence(model: Any, batches: Batches) -> None:
    for batch in batches:
        for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True):
            model.zero_grad()
            model(input_ids=ids[mask.bool()][None]).logits.norm().backward()


def papers_procedure(model: Any, batches: Batches) -> None:
    """A full backward pass for every batch in each layer (section 3.2 of the paper)."""
    for _ in range(model.config.num_hidden_layers):
        for batch in batches:
            model.zero_grad()
            model(**batch.inputs).logits.norm().backward()


def seconds(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=10)
    parser.add_argument("--longest", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(BertConfig(num_labels=3)).eval()
    batches, sites = sentences(given.sentences, given.shortest, given.longest), find_sites(model)
    plain_forward(model, batches)
    forward = seconds(lambda: plain_forward(model, batches), 2 * given.repeats)
    exact = seconds(lambda: gradient_norms(sites, batches, LOGIT_NORM), given.repeats)
    sentence = seconds(lambda: backward_per_sentence(model, batches), 1)
    paper = seconds(lambda: papers_procedure(model, batches), 1)
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "one exact scoring pass / plain forward": round(exact / forward, 2),
                "backward per sentence / one exact scoring pass": round(sentence / exact, 1),
                "the paper's procedure / one exact scoring pass": round(paper / exact, 1),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
