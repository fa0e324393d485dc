"""Size and speed of pruned models: `make bench-deployment` writes the tables of docs/deployment.md."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import write
from transformers import AutoModelForSequenceClassification, BertConfig

import greedy_gnorm as gg
from greedy_gnorm.deployment.export import onnx_runner, to_onnx
from greedy_gnorm.deployment.speed import timed, torch_latencies
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.model.surgery import remove
from greedy_gnorm.passes.speed import multiplications, random_inputs
from greedy_gnorm.pruning.budget import Budget, Target, by_rank, part_of, pick_round
from greedy_gnorm.pruning.costs import Costs, Shape
from greedy_gnorm.report.tables import as_markdown, latency_cells
from greedy_gnorm.units import Scores, Unit

PAGE = "deployment.md"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "models"


def without(model: Any, share: float) -> Any:
    """A copy without so many of its heads, drawn at random."""
    pruned = copy.deepcopy(model)
    sites = find_sites(pruned, "heads")
    heads = sites.survivors()
    chosen = np.random.default_rng(0).permutation(len(heads))[: round(share * len(heads))]
    remove(sites, [Unit(*heads[place]) for place in chosen])
    return pruned


def base() -> None:
    """BERT-base's shape: the speed-up against what the saved multiplications promise."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(BertConfig(num_labels=3)).eval()
    cells = []
    for share in (0.25, 0.5, 0.75, 1.0):
        pruned = without(model, share)
        (row,) = torch_latencies(model, pruned, [(8, 128)], seconds=30)
        assert row.promised is not None
        cells.append(
            [f"{share:.0%}", f"{parameter_count(pruned) / parameter_count(model):.2f}", f"{row.promised:.2f}",
             f"{row.speed_up:.2f}", f"{row.speed_up / row.promised:.2f}"]
        )  # fmt: skip
    write(PAGE, "base", as_markdown(["heads gone", "parameters", "promised", "measured", "measured / promised"], cells))


def narrowed(model: Any, share: float, tokens: int, multiple: int = 1) -> Any:
    """A copy with this share of its multiplications: heads and neurons drawn at random, the same share of each kind."""
    pruned = copy.deepcopy(model)
    sites = find_sites(pruned)
    costs = Costs(sites, 4, Shape(8, tokens, tokens * tokens))
    draws = np.random.default_rng(0)
    scores = Scores([draws.random(site.total) for site in sites])
    start = costs.of(sites)
    target = Target("share", "multiplications", share * part_of(start, "multiplications"))
    budget = Budget((target,), start, (1.0,), multiple)
    order = scores.order()
    remove(sites, pick_round(by_rank(scores, order, sites, budget, costs), sites, order, budget, costs, 1))
    return pruned


def compressed() -> None:
    """BERT-base's shape with fewer heads and neurons: the speed-up against what the multiplications promise."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(BertConfig(num_labels=3)).eval()
    shape, cells = (8, 128), []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.onnx"
        to_onnx(model, whole)
        for share, multiple in ((0.5, 1), (0.33, 1), (0.5, 16), (0.33, 16)):
            pruned, path = narrowed(model, share, shape[1], multiple), Path(folder) / f"{share}-{multiple}.onnx"
            to_onnx(pruned, path)
            rows = torch_latencies(model, pruned, [shape], seconds=30)
            rows.append(
                timed("onnxruntime", onnx_runner(whole), onnx_runner(path), random_inputs(model, *shape), shape,
                      seconds=30, promised=rows[0].promised)
            )  # fmt: skip
            for row in rows:
                assert row.promised is not None
                cells.append(
                    [f"{share:.0%}", str(multiple), row.runtime, str(row.threads), f"{row.promised:.2f}",
                     f"{row.speed_up:.2f}", f"{row.speed_up / row.promised:.2f}"]
                )  # fmt: skip
    header = ["multiplications", "multiple of", "runtime", "threads", "promised", "measured", "measured / promised"]
    write(PAGE, "compressed", as_markdown(header, cells))


def minilm() -> None:
    """A trained model at several masks: torch and onnxruntime, by batch and length."""
    model = gg.load(SHARED / "minilm-tweets", dtype=torch.float32)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.onnx"
        to_onnx(model, whole)
        for share in (0.25, 0.5, 0.75, 0.9):
            pruned, path = without(model, share), Path(folder) / f"{share}.onnx"
            to_onnx(pruned, path)
            for shape in ((1, 32), (8, 128), (32, 64)):
                promised = multiplications(model, shape[1]) / multiplications(pruned, shape[1])
                rows = torch_latencies(model, pruned, [shape], seconds=3)
                rows.append(
                    timed("onnxruntime", onnx_runner(whole), onnx_runner(path), random_inputs(model, *shape), shape,
                          seconds=3, promised=promised)
                )  # fmt: skip
                cells += [[f"{share:.0%}", *latency_cells(row)] for row in rows]
    header = ["heads gone", "runtime", "batch", "threads", "ms before", "ms after", "speed-up", "promised"]
    write(PAGE, "minilm", as_markdown(header, cells))


PARTS = {"base": base, "compressed": compressed, "minilm": minilm}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
