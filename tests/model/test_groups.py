"""Query heads that share a key and a value: one of each group can be removed, and keys and values stay."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from conftest import tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from twins import columns_of, rows_of, slow_entropy, slow_gate_gradients, slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.cli.app import main
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import as_plain, dense, remove
from greedy_gnorm.recovery import least_squares
from greedy_gnorm.units import Unit

GROUPED = ("llama", "mistral", "qwen2", "qwen3")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The unpruned model's perplexity is:UserWarning", "ignore:The calibration rows have:UserWarning"
)
DATA, EVALUATION = [tiny_batch(seed=1)], [tiny_batch(rows=30, seed=2)]


def grouped(family="llama", **changes):
    """Three layers of two groups with four query heads each."""
    return tiny_model(family, **{"num_key_value_heads": 2, "head_dim": 4, **changes})


def logits(model):
    batch = tiny_batch()
    batch.pop("labels")
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", GROUPED)
def test_a_head_is_one_query_head_of_each_group(family, attention, tmp_path):
    """Query head 1 of a group is head 1 of all in the first group, and head 5 in the second."""
    model = grouped(family)
    model.set_attn_implementation(attention)
    expected = copy.deepcopy(model)
    for layer, gone in {0: [1, 5], 1: range(8), 2: [0, 3, 4, 7]}.items():
        weight = expected.model.layers[layer].self_attn.o_proj.weight
        for head in gone:
            weight.data[:, 4 * head : 4 * head + 4] = 0
    gg.remove_heads(model, {0: [1], 1: range(4), 2: [0, 3]}, group_queries="each")

    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)
    attentions = [layer.self_attn for layer in model.model.layers]
    assert [each.q_proj.out_features for each in attentions] == [24, 0, 16]
    assert [each.k_proj.out_features for each in attentions] == [8, 8, 8]
    assert [each.num_key_value_groups for each in attentions] == [3, 0, 2]
    save(model, None, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["pruned_group_queries"] == "each"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    loaded.set_attn_implementation(attention)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("family", GROUPED)
def test_equal_numbers_make_an_ordinary_model(family, tmp_path):
    model = grouped(family)
    gg.remove_heads(model, {0: [1, 2], 1: [0, 1], 2: [0, 3]}, group_queries="each")
    plain = as_plain(model)
    plain.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    config = loaded.config
    assert (config.num_key_value_heads, config.num_attention_heads, config.head_dim) == (2, 4, 4)
    assert not hasattr(config, "pruned_group_queries")
    assert not list(tmp_path.glob("*.py"))
    assert find_sites(gg.load(tmp_path), "heads")[0].total == 2  # groups, as in any model
    remove(find_sites(model, "heads"), [Unit(1, 2)])
    assert as_plain(model) is None


@pytest.mark.parametrize("state", ["whole", "pruned"])
def test_scores_are_those_of_all_query_heads_of_a_unit(state):
    model = grouped(dtype=torch.float64, pruned_group_queries="each")
    if state == "pruned":
        gg.remove_heads(model, {0: [1, 2], 1: range(4)})
    sites = find_sites(model, "heads")
    norms = gg.score(model, DATA, score="gnorm")
    assert list(norms.parts) == ["q"]
    np.testing.assert_allclose(norms.values, slow_gradient_norms(model, DATA)[0], rtol=1e-9)
    entropy = gg.score(model, DATA, score="entropy", score_options={"eps": 1e-3})
    np.testing.assert_allclose(entropy.values, slow_entropy(model, DATA, eps=1e-3), rtol=1e-5)
    effects = np.stack(slow_gate_gradients(model, DATA))
    np.testing.assert_allclose(gg.score(model, DATA, score="fisher").values, (effects**2).mean(0), rtol=1e-9)
    np.testing.assert_allclose(gg.score(model, DATA, score="tis").values, np.abs(effects).mean(0), rtol=1e-9)
    magnitude = gg.score(model, DATA, score="magnitude").values
    for site in sites:
        for head, *blocks in zip(site.survivors, rows_of(site, "q"), columns_of(site), strict=True):
            expected = torch.cat([block.flatten() for block in blocks]).norm()
            assert magnitude[site.index, head] == pytest.approx(float(expected))


@pytest.mark.parametrize("name", ["least-squares", "gates"])
def test_a_head_takes_the_place_of_one_like_it(name, monkeypatch):
    """If two query heads do the same in every group, one of them with twice its output does what both did."""
    monkeypatch.setattr(least_squares, "RIDGE", 1e-12)
    model = grouped(dtype=torch.float64)
    attention = model.model.layers[2].self_attn
    for group in range(2):
        first, last = ([4 * (4 * group + head) + channel for channel in range(4)] for head in (0, 3))
        attention.q_proj.weight.data[last] = attention.q_proj.weight.data[first]
        attention.o_proj.weight.data[:, last] = attention.o_proj.weight.data[:, first]
    others = [0, 1, (2, 0), (2, 1), (2, 2)]
    run = gg.prune(
        model, EVALUATION, eval_data=DATA, stop="heads=1", protect=others, recover=name, group_queries="each"
    )
    assert find_sites(run.model, "heads")[2].survivors == [0, 1, 2]
    torch.testing.assert_close(logits(run.model), logits(model), rtol=1e-6, atol=1e-6)
    cut = copy.deepcopy(model)
    gg.remove_heads(cut, {2: [3]}, group_queries="each")
    assert (logits(cut) - logits(model)).abs().max() > 1e-2


def test_original_shapes_are_those_of_an_ordinary_model():
    model = grouped()
    gg.remove_heads(model, {0: [1], 1: range(4)}, group_queries="each")
    whole = dense(model)
    assert not hasattr(whole.config, "pruned_group_queries")
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-5, atol=1e-5)


def test_one_key_for_all_query_heads():
    model = grouped(num_key_value_heads=1)
    assert [site.total for site in find_sites(model, "heads")] == [1, 1, 1]
    run = gg.prune(model, DATA, eval_data=EVALUATION, stop="heads=5", group_queries="each")
    assert [site.total for site in find_sites(run.model, "heads")] == [8, 8, 8]
    assert len(find_sites(run.model, "heads").survivors()) == 19


def test_a_model_is_pruned_in_one_mode():
    model = grouped()
    gg.remove_heads(model, {0: [3]}, group_queries="each")
    gg.remove_heads(model, {0: [2]})
    assert find_sites(model, "heads")[0].survivors == [0, 1]
    assert gg.score(model, DATA).values.shape == (3, 4)
    message = r"pruned with --group-queries each, so it can't be pruned on with whole"
    with pytest.raises(gg.GnormError, match=message):
        gg.remove_heads(model, {0: [1]}, group_queries="whole")
    with pytest.raises(gg.GnormError, match=message):
        gg.prune(model, DATA, group_queries="whole")
    groups = grouped()
    gg.remove_heads(groups, {0: [1]})
    with pytest.raises(gg.GnormError, match=r"pruned with --group-queries whole, so it can't be pruned on with each"):
        gg.score(groups, DATA, group_queries="each")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_model("bert"), r"--group-queries each: bert models have no groups of query heads"),
        (lambda: grouped(num_key_value_heads=8), r"every query head of this model has its own key and value"),
    ],
)
def test_models_without_groups_are_refused(model, message):
    with pytest.raises(gg.UnsupportedModel, match=message):
        gg.score(model(), DATA, group_queries="each")
    with pytest.raises(gg.UnsupportedModel, match=message):
        gg.remove_heads(model(), {0: [0]}, group_queries="each")
    assert gg.score(model(), DATA, group_queries="whole").values.shape[0] == 3


def test_unknown_modes_are_refused():
    with pytest.raises(gg.GnormError, match=r"group_queries must be 'whole' or 'each'"):
        gg.score(grouped(), DATA, group_queries="heads")
    with pytest.raises(gg.GnormError, match=r"Unknown group_queries 'heads'\. Choose from: whole, each"):
        gg.remove_heads(grouped(), {}, group_queries="heads")
    for family, mode in (("llama", "heads"), ("bert", "each")):
        model = tiny_model(family, pruned_group_queries=mode)
        with pytest.raises(gg.UnsupportedModel, match=f"pruned_group_queries in the configuration can't be '{mode}'"):
            find_sites(model)


def test_the_given_model_is_left_alone():
    model = grouped()
    run = gg.prune(model, DATA, eval_data=EVALUATION, stop="heads=3", group_queries="each")
    assert not hasattr(model.config, "pruned_group_queries")
    assert [site.total for site in find_sites(model, "heads")] == [2, 2, 2]
    assert torch.equal(logits(run.at(3)), logits(run.model))


@pytest.fixture
def folder(tmp_path):
    """A saved language model and its text."""
    model = grouped(auto_class="AutoModelForCausalLM", vocab_size=len(tiny_tokenizer()))
    save(model, tiny_tokenizer(), tmp_path / "llm")
    (tmp_path / "rows.txt").write_text("\n".join(row["text"] for row in tiny_rows(300)))
    return tmp_path


def run_of(folder, command, *options, eval_rows=("--eval-samples", "30")):
    data = ["--data", str(folder / "rows.txt"), "--block-length", "8", "--samples", "30", *eval_rows]
    assert main([command, str(folder / "llm"), *data, "--group-queries", "each", "--quiet", *options]) == 0


def test_a_run_can_be_taken_apart_again(folder):
    """Its steps, tables and results know what a head was, from the command to the saved model."""
    run_of(
        folder, "prune", "--stop", "heads=4", "--out", str(folder / "run"), "--recover", "least-squares", "--no-latency"
    )
    header = json.loads((folder / "run/run.json").read_text())
    assert header["model"]["pruned_group_queries"] == header["config"]["group_queries"] == "each"
    assert [site["units"] for site in header["model"]["sites"]] == [4, 4, 4]
    taken = gg.take_step(folder / "run", 4, out=folder / "taken", latency=False)
    final = gg.load(folder / "run/model")
    for name, parameter in final.named_parameters():
        torch.testing.assert_close(dict(taken.model.named_parameters())[name], parameter)
    assert main(["table", str(folder / "run")]) == 0


def test_a_uniform_compression_has_its_table(folder):
    options = (
        "--params",
        "0.9",
        "--rounds",
        "2",
        "--uniform",
        "--units",
        "heads",
        "--no-measure-speed",
        "--out",
        str(folder / "run"),
    )
    run_of(folder, "compress", *options, "--out", str(folder / "run"))
    config = json.loads((folder / "run/model/config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert config["num_attention_heads"] < 8
    assert not list((folder / "run/model").glob("*.py"))
    assert main(["table", str(folder / "run")]) == 0


def test_scores_are_written_with_their_units(folder):
    run_of(folder, "score", "--score", "fisher", "--out", str(folder / "scores"), eval_rows=())
    content = json.loads((folder / "scores/scores.json").read_text())
    assert [len(vector) for vector in content["values"]] == [4, 4, 4]
