"""Decoders generate after pruning: the same tokens with a cache of keys and values as without."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import shared, tiny_config

from greedy_gnorm.model.modeling_pruned import Cached
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.surgery import dense, remove
from greedy_gnorm.units import Unit

DECODERS = ("gpt2", "llama", "llama-each", "mistral", "qwen2", "qwen3")
CUTS = {
    "uneven layers": {0: [1], 2: [0, 2], 3: range(10)},
    "no heads in the first layer": {0: range(4), 2: [3]},
    "no heads in the second layer": {2: range(4)},
    "no units": {site: range(24 if site % 2 else 4) for site in range(6)},
}
WAYS = {"greedy": {}, "beams": {"num_beams": 2}, "a static cache": {"cache_implementation": "static"}}


def language_model(family, cut="no heads in the first layer"):
    """A random language model without these units."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, eos_token_id=2)).eval()
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    sites = find_sites(model)
    remove(sites, [Unit(site, index) for site, units in CUTS[cut].items() for index in units])
    return model


def generated(model, tokens=10, **options):
    """What follows three prompts, one of which is shorter."""
    ids = torch.randint(3, 40, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = ids[1, :2] = 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", DECODERS)
def test_tokens_with_a_cache_are_those_without(family, attention, cut):
    model = language_model(family, cut)
    model.set_attn_implementation(attention)
    found = generated(model)
    assert torch.equal(found, generated(model, use_cache=False))
    assert len(set(found.flatten().tolist())) > 6, "the model repeats itself: the test would prove little"


@pytest.mark.parametrize("way", [name for name in WAYS if name != "greedy"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-each", "mistral"])
def test_other_caches_and_beams(family, way):
    model = language_model(family)
    options = {name: value for name, value in WAYS[way].items() if name != "cache_implementation"}
    assert torch.equal(generated(model, **WAYS[way]), generated(model, use_cache=False, **options))


def test_a_trained_llama_writes_the_same_story_with_its_cache():
    folder = shared("models/llama-stories")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(**prompt, **options)
    remove(find_sites(model), [Unit(0, head) for head in range(4)] + [Unit(3, neuron) for neuron in range(40)])
    story = model.generate(**prompt, **options)
    assert torch.equal(story, model.generate(**prompt, use_cache=False, **options))
    assert not torch.equal(story, whole)


@pytest.mark.parametrize("family", DECODERS)
def test_the_cache_shrinks_with_the_heads(family):
    """But not if a head is one query head of each group: keys and values stay."""
    model = language_model(family, "uneven layers")
    ids = torch.randint(3, 40, (2, 6))
    cache = model(ids, use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == ([2, 2, 2] if family == "llama-each" else [3, 2, 4])
    emptied = language_model(family)(ids, use_cache=True).past_key_values
    assert emptied.get_seq_length() == 6
    assert emptied.layers[0].keys.numel() <= 2 * 6


@pytest.mark.parametrize("family", DECODERS)
def test_a_layer_gets_its_own_class_back_with_its_heads(family):
    model = language_model(family)
    attention = find_sites(model, "heads")[0].module
    assert isinstance(attention, Cached)
    whole = dense(model)
    assert not any(isinstance(module, Cached) for module in whole.modules())
    assert torch.equal(generated(whole), generated(model))


@pytest.mark.parametrize("family", DECODERS)
def test_a_pruned_class_builds_layers_without_heads(family):
    """As when a saved model is loaded: the class cuts the newly built model, then the weights are set."""
    model = language_model(family)
    built = type(model)(model.config).eval()
    built.load_state_dict(model.state_dict())
    built.generation_config = model.generation_config
    for options in ({}, {"cache_implementation": "static", "prefill_chunk_size": 4}):
        assert torch.equal(generated(built, **options), generated(model, use_cache=False))
