"""Fitting the classifier, the linear map that runs last."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from conftest import EVERY_FAMILY, tiny_config, tiny_model
from recovery.test_least_squares import ROWS, cut_for, recovery_for, refitted

from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.recovery.least_squares import RIDGE

CLASSIFIERS = {
    "AutoModelForSequenceClassification": "classifier",
    "AutoModelForTokenClassification": "classifier",
    "AutoModelForQuestionAnswering": "qa_outputs",
    "AutoModel": None,
}


def calls(model, name, place):
    """What a map receives (0) or returns (1) over all rows: a vector for each row, or for each real token."""
    found = []
    hook = model.get_submodule(name).register_forward_hook(
        lambda module, given, result: found.append((given[0], result)[place])
    )
    with torch.no_grad():
        for row in ROWS:
            given = {key: tensor for key, tensor in row.items() if key != "labels"}
            model(**given)
            if found[-1].dim() == 3:
                found[-1] = found[-1][given["attention_mask"].bool()]
    hook.remove()
    return torch.cat(found)


def fitted_by_lstsq(model, fitted, name):
    """The weight and the bias of the classifier, by lstsq on what it receives in the fitted model."""
    x, y = calls(fitted, name, 0), calls(model, name, 1)
    linear = model.get_submodule(name)
    centred = linear.bias is not None
    means = (x.mean(0), y.mean(0)) if centred else (torch.zeros_like(x[0]), torch.zeros_like(y[0]))
    a, b = x - means[0], y - means[1]
    strength = max(1.0, x.shape[1] / len(x))
    ridge = float(strength * RIDGE * a.square().sum(0).mean()) ** 0.5
    stacked = torch.cat([a, ridge * torch.eye(x.shape[1], dtype=x.dtype)])
    weight = torch.linalg.lstsq(stacked, torch.cat([b, ridge * linear.weight.detach().mT])).solution
    return weight.mT, means[1] - means[0] @ weight if centred else None


@EVERY_FAMILY
def test_the_classifier_equals_lstsq_on_what_it_receives(family):
    model = tiny_model(family, dtype=torch.float64)
    recovery = recovery_for(model)
    fitted = refitted(model, [cut_for(model)], recovery).model
    name = recovery.calibration.classifier
    weight, bias = fitted_by_lstsq(model, fitted, name)
    linear = fitted.get_submodule(name)
    torch.testing.assert_close(linear.weight.detach(), weight, rtol=1e-8, atol=1e-8)
    if bias is not None:
        torch.testing.assert_close(linear.bias.detach(), bias, rtol=1e-8, atol=1e-8)
    assert not torch.equal(linear.weight, model.get_submodule(name).weight)


@pytest.mark.parametrize("auto_class", CLASSIFIERS)
def test_what_the_classifier_of_a_task_is(auto_class):
    with torch.random.fork_rng():
        model = getattr(transformers, auto_class).from_config(tiny_config("bert", num_labels=2)).eval()
    assert recovery_for(model).calibration.classifier == CLASSIFIERS[auto_class]


def test_a_vocabulary_is_no_classifier():
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    assert recovery_for(model).calibration.classifier is None


def test_gates_leave_the_classifier_as_it_is():
    model = tiny_model("bert")
    fitted = refitted(model, [cut_for(model)], recovery_for(model, "gates")).model
    assert torch.equal(fitted.classifier.weight, model.classifier.weight)


def test_a_model_of_which_nothing_was_removed_keeps_its_classifier():
    model = tiny_model("bert")
    recovery, sites = recovery_for(model), find_sites(copy.deepcopy(model))
    recovery(sites)
    for name, weights in model.state_dict().items():
        assert torch.equal(sites.model.state_dict()[name], weights)


def test_few_rows_keep_the_classifier_close_to_the_original_one():
    model = tiny_model("bert", dtype=torch.float64)
    moved = {}
    for count in (2, len(ROWS[0]["input_ids"])):
        rows = [{key: tensor[:count] for key, tensor in ROWS[0].items()}]
        fitted = refitted(model, [cut_for(model)], recovery_for(model, rows=rows)).model
        moved[count] = float((fitted.classifier.weight - model.classifier.weight).detach().norm())
    assert moved[2] < moved[len(ROWS[0]["input_ids"])]
