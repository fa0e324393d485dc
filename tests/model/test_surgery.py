"""Gates at zero == structural removal == saved and loaded again, for every family."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import transformers
from conftest import EVERY_FAMILY, tiny_batch, tiny_config, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import greedy_gnorm as gg
from greedy_gnorm.model.checkpoint import save
from greedy_gnorm.model.gates import gates
from greedy_gnorm.model.sites import Sites, features, find_sites
from greedy_gnorm.model.surgery import as_plain, dense, fill_empty_sites, remove
from greedy_gnorm.scores.baselines import out_by_in
from greedy_gnorm.units import Unit

CUTS = {
    "some": lambda sites: {0: [1, 2], len(sites) - 1: [3]},
    "a whole site": lambda sites: {0: range(sites[0].total)},
    "everything": lambda sites: {site.index: range(site.total) for site in sites},
}
JOINT_CUTS = {
    "some neurons": lambda sites: {1: [0, 3, 17], len(sites) - 1: range(5, 24)},
    "an emptied feed-forward": lambda sites: {1: range(sites[1].total)},
    "heads and neurons": lambda sites: {0: [1, 2], 1: range(20), len(sites) - 2: [0], len(sites) - 1: [3]},
    "everything": lambda sites: {site.index: range(site.total) for site in sites},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def logits(model: Any) -> torch.Tensor:
    batch = tiny_batch()
    batch.pop("labels")
    with torch.no_grad():
        return model(**batch).logits.float()


def choose_attention(model: Any, name: str) -> None:
    """Skip the test for a family with one way to compute attention, unless it is this one."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        pytest.skip(f"{model.config.model_type} has no {name} attention")


def closed(sites: Sites, cut: dict[int, Any]) -> dict[int, torch.Tensor]:
    """Gates at zero for these heads."""
    return {
        site: torch.tensor([0.0 if head in cut[site] else 1.0 for head in range(sites[site].total)]) for site in cut
    }


@EVERY_FAMILY
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_removed_equals_gated_equals_reloaded(family, cut, attention, dtype, tmp_path):
    model = tiny_model(family, dtype=dtype)
    choose_attention(model, attention)
    sites = find_sites(model, "heads")
    heads = CUTS[cut](sites)
    untouched = logits(model)
    with gates(sites, closed(sites, heads)):
        gated = logits(model)
    assert torch.equal(logits(model), untouched)

    gg.remove_heads(model, heads)
    removed = logits(model)
    save(model, None, tmp_path / "model")
    loaded = gg.load(tmp_path / "model")
    loaded.set_attn_implementation(attention)

    assert (gated - untouched).abs().max() > 1e-3, "the heads made no difference: the test would prove nothing"
    torch.testing.assert_close(removed, gated, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(logits(loaded), removed)
    assert type(loaded) is type(model)
    assert loaded.dtype == dtype


@EVERY_FAMILY
@pytest.mark.parametrize("cut", JOINT_CUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_removed_neurons_equal_gated_equal_reloaded(family, cut, attention, dtype, tmp_path):
    model = tiny_model(family, dtype=dtype)
    choose_attention(model, attention)
    sites = find_sites(model)
    units = JOINT_CUTS[cut](sites)
    untouched = logits(model)
    with gates(sites, closed(sites, units)):
        gated = logits(model)
    remove(sites, [Unit(site, index) for site in units for index in units[site]])
    removed = logits(model)
    save(model, None, tmp_path / "model")
    loaded = gg.load(tmp_path / "model")
    loaded.set_attn_implementation(attention)

    assert (gated - untouched).abs().max() > 1e-3, "the units made no difference: the test would prove nothing"
    torch.testing.assert_close(removed, gated, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(logits(loaded), removed)
    assert type(loaded) is type(model)
    assert find_sites(loaded).removed() == sites.removed()
    widths = [features(site.output)[0] for site in find_sites(loaded) if site.kind == "ffn"]
    assert widths == [len(site.survivors) for site in sites if site.kind == "ffn"]


def test_units_of_one_kind_leave_the_record_of_the_other(family):
    model = tiny_model(family)
    remove(find_sites(model, "ffn"), [Unit(0, 3), Unit(0, 5)])
    gg.remove_heads(model, {0: [1]})
    assert model.config.pruned_neurons == {0: [3, 5]}
    assert model.config.pruned_heads == {0: [1]}
    assert [str(site.kind) for site in find_sites(model)][:2] == ["attention", "ffn"]
    assert find_sites(model)[0].survivors == [0, 2, 3]
    assert 3 not in find_sites(model)[1].survivors
    assert [site.layer for site in find_sites(model, "heads")] == [site.layer for site in find_sites(model, "ffn")]


def test_dense_shapes_and_filled_layers_compute_the_same(family):
    model = tiny_model(family)
    sites = find_sites(model)
    remove(sites, [Unit(0, 2), *(Unit(1, index) for index in range(sites[1].total))])
    expected = logits(model)
    torch.testing.assert_close(logits(dense(model)), expected, rtol=1e-5, atol=1e-5)
    fill_empty_sites(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def saved_as_plain(model, folder):
    """The ordinary model that transformers loads, without any code, and which computes the same."""
    as_plain(model).save_pretrained(folder / "model")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert torch.equal(logits(loaded), logits(model))
    assert type(loaded).__module__.startswith("transformers.models.")
    assert not list((folder / "model").glob("*.py"))
    return loaded


def without_heads(family, *gone, **changes):
    """A model without so many heads in each layer, in turn the first and the last ones."""
    model = tiny_model(family, **changes)
    sites = find_sites(model, "heads")
    for site, count in zip(sites, gone, strict=True):
        remove(sites, [Unit(site.index, index) for index in site.survivors[:: -1 if site.index % 2 else 1][:count]])
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_equal_numbers_of_key_value_heads_make_an_ordinary_model(family, tmp_path):
    model = without_heads(family, 2, 2, 2)
    remove(find_sites(model, "ffn"), [Unit(site, index) for site in range(3) for index in (site, 9, 11, 20)])
    loaded = saved_as_plain(model, tmp_path)
    config = loaded.config
    assert (config.num_key_value_heads, config.num_attention_heads, config.head_dim) == (2, 4, 6)
    assert config.intermediate_size == 20
    for uneven in ((2, 2, 1), (4, 4, 4)):
        assert as_plain(without_heads(family, *uneven)) is None


def test_the_number_of_heads_must_suit_the_class(tmp_path):
    """Llama's hidden size, 16, must be a multiple of its heads, here 6; in other families heads have a fixed size."""
    assert as_plain(without_heads("llama", 1, 1, 1)) is None
    assert saved_as_plain(without_heads("mistral", 1, 1, 1), tmp_path).config.num_attention_heads == 6
    for family in ("bert", "gpt2", "modernbert"):
        assert as_plain(without_heads(family, 2, 2, 2)) is None


def test_equal_widths_make_an_ordinary_model(family, tmp_path):
    model = tiny_model(family)
    sites = find_sites(model)
    neurons = [Unit(site.index, index) for site in sites if site.kind == "ffn" for index in (site.layer, 9, 11, 20)]
    remove(sites, neurons)
    loaded = saved_as_plain(model, tmp_path)
    assert {site.total for site in find_sites(loaded, "ffn")} == {20}

    uneven = [Unit(1, 5)] if len(find_sites(model, "ffn")) > 1 else []
    remove(find_sites(model), uneven or [Unit(0, 1)])
    assert as_plain(model) is None


def test_unknown_units_are_refused():
    with pytest.raises(gg.GnormError, match=r"Unknown units 'neurons'\. Choose from: heads, ffn, both"):
        find_sites(tiny_model("bert"), "neurons")


def turned(linear, weight):
    """A weight with its outputs as rows."""
    return weight.mT if isinstance(linear, Conv1D) else weight


def test_weights_are_really_cut_and_bookkeeping_is_true(family):
    model = tiny_model(family)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    site = find_sites(model, "heads")[0]
    gg.remove_heads(model, {0: [1, 3]})
    site = find_sites(model, "heads")[0]
    names = {id(module): name for name, module in model.named_modules()}

    def kept(width):
        """The channels of the units 0 and 2 among four, written out."""
        return [*range(width), *range(2 * width, 3 * width)]

    def kept_of(linear_map):
        """The same for a map with several parts, or with one part in several places."""
        start, channels = 0, []
        for width in (site.layout["sizes"][part] for part in linear_map["parts"]):
            channels += [start + channel for channel in kept(width)]
            start += 4 * width
        return channels

    for linear_map in site.layout["inputs"]:
        linear, rows = site.inputs[linear_map["path"]], kept_of(linear_map)
        assert torch.equal(out_by_in(linear), turned(linear, before[f"{names[id(linear)]}.weight"])[rows])
        if linear.bias is not None:
            assert torch.equal(linear.bias, before[f"{names[id(linear)]}.bias"][rows])
        assert features(linear)[1] == len(rows)
    output, columns = names[id(site.output)], kept_of(site.layout["output"])
    assert torch.equal(out_by_in(site.output), turned(site.output, before[f"{output}.weight"])[:, columns])
    if site.output.bias is not None:
        assert torch.equal(site.output.bias, before[f"{output}.bias"])
    assert features(site.output)[0] == len(columns)
    for path, what in site.layout["follow"].items():
        expected = 2 if what == "units" else 2 * site.sizes[what]
        assert operator.attrgetter(path)(site.module) == expected
    assert model.config.pruned_heads == {0: [1, 3]}
    assert site.survivors == [0, 2]
    left = sum(parameter.numel() for parameter in model.parameters())
    assert sum(p.numel() for p in before.values()) - left == 2 * site.unit_cost().parameters


def test_numbers_stay_original_in_later_cuts(family):
    at_once, in_turn = tiny_model(family), tiny_model(family)
    gg.remove_heads(at_once, {0: [0, 2, 3]})
    for head in (2, 0, 3):
        gg.remove_heads(in_turn, {0: [head]})
    assert torch.equal(logits(at_once), logits(in_turn))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [1, 1]}, "listed twice"),
        ({9: [0]}, "no layer 9"),
        ({0: [4]}, "no head 4"),
        ({0: [-1]}, "no head -1"),
        ({1: [0], 0: [2]}, "is already removed"),
    ],
)
def test_a_wrong_removal_is_refused_and_nothing_is_cut(heads, message):
    model = tiny_model("bert")
    gg.remove_heads(model, {0: [2]})
    before = logits(model)
    with pytest.raises(gg.GnormError, match=message):
        gg.remove_heads(model, heads)
    assert torch.equal(logits(model), before)
    assert find_sites(model, "heads").removed() == [Unit(0, 2)]


def test_a_configuration_shared_by_two_models_is_not_mixed_up():
    from transformers import BertForSequenceClassification

    config = tiny_config("bert")
    first, second = BertForSequenceClassification(config), BertForSequenceClassification(config)
    gg.remove_heads(first, {0: [1]})
    assert find_sites(second, "heads").removed() == []
    assert find_sites(first, "heads").removed() == [Unit(0, 1)]


def test_two_models_that_share_a_pruned_configuration_are_cut_one_by_one():
    first = tiny_model("bert")
    gg.remove_heads(first, {0: [1]})
    second = type(first)(first.config).eval()
    assert second.config is first.config
    before = logits(second)
    gg.remove_heads(first, {1: [2, 3]})
    assert find_sites(second, "heads").removed() == [Unit(0, 1)]
    assert find_sites(first, "heads").removed() == [Unit(0, 1), Unit(1, 2), Unit(1, 3)]
    assert torch.equal(logits(second), before)


def test_removing_nothing_changes_nothing():
    model = tiny_model("bert")
    kind, config, said = type(model), model.config, model.config.to_dict()
    gg.remove_heads(model, {})
    gg.remove_heads(model, {0: []})
    assert (type(model), model.config.to_dict()) == (kind, said)
    assert model.config is config


def test_a_pruned_model_can_be_copied_saved_and_pruned_further(family, tmp_path):
    model = tiny_model(family)
    gg.remove_heads(model, {0: [1]})
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = gg.load(tmp_path)
    for one in (model, twin, loaded):
        gg.remove_heads(one, {0: [3]})
    assert torch.equal(logits(model), logits(loaded))
    assert torch.equal(logits(model), logits(twin))


def test_albert_has_a_site_per_parameter_group():
    sites = find_sites(tiny_model("albert"), "heads")
    assert [(site.applications, site.total) for site in sites] == [(4, 4)]
    sites = find_sites(tiny_model("albert-groups"), "heads")
    assert [site.applications for site in sites] == [2, 2, 2, 2]
    assert [site.applications for site in find_sites(tiny_model("bert"), "heads")] == [1, 1, 1]


def test_other_models_are_refused_by_name():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model("openai-gpt", n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    with pytest.raises(gg.UnsupportedModel, match=r"'openai-gpt'.*bert, roberta"):
        find_sites(AutoModelForSequenceClassification.from_config(config), "heads")
    with pytest.raises(gg.UnsupportedModel, match="Linear without a model_type"):
        find_sites(nn.Linear(2, 2), "heads")


@pytest.mark.parametrize(
    "wrong", [[1], {"0": 3}, {"0": [9]}, {"0": [1, 1]}, {"7": [0]}, {"0": ["1"]}, {"-1": [0]}, {"x": [0]}]
)
def test_a_hand_edited_record_of_pruned_heads_is_refused(wrong):
    model = tiny_model("bert")
    model.config.pruned_heads = wrong
    with pytest.raises(gg.UnsupportedModel, match="pruned_heads"):
        find_sites(model, "heads")


def test_a_record_that_does_not_fit_the_weights_is_refused():
    model = tiny_model("bert")
    model.config.pruned_heads = {"0": [1]}
    with pytest.raises(gg.UnsupportedModel, match="width"):
        find_sites(model, "heads")


def test_gates_are_gone_also_after_an_exception():
    model = tiny_model("bert")
    sites = find_sites(model, "heads")
    before = logits(model)
    with pytest.raises(RuntimeError, match="stop"), gates(sites, {0: torch.zeros(4)}):
        raise RuntimeError("stop")
    assert torch.equal(logits(model), before)
    assert all(not module._forward_pre_hooks for module in model.modules())
