"""Looking ahead: of the heads that are next, the one goes whose removal leaves the outputs closest to the unpruned."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import LABEL_NAMES, tiny_batch, tiny_model, tiny_rows, tiny_tokenizer
from twins import slow_gradient_norms

import greedy_gnorm as gg
from greedy_gnorm.data.batches import ready_batches
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.trials import trial_removals
from greedy_gnorm.tasks.objectives import with_reference
from greedy_gnorm.units import Unit, removed_by

DATA, EVALUATION = [tiny_batch(seed=1), tiny_batch(rows=5, seed=4, longest=7)], [tiny_batch(rows=30, seed=2)]


def run(model, **options):
    return gg.prune(model, DATA, **{"eval_data": EVALUATION, "stop": "all", **options})


def chances(model):
    rows = [{key: tensor for key, tensor in row.items() if key != "labels"} for row in DATA]
    with torch.no_grad():
        return torch.cat([model(**row).logits.log_softmax(-1) for row in rows])


def by_hand(model, count, ahead):
    """Each candidate is cut out of a copy of its own, and the divergence is written out."""
    unpruned, order = chances(model), []
    for _ in range(count):
        logs = np.log(slow_gradient_norms(model, DATA)).sum(0)
        ranked = sorted(zip(*np.nonzero(~np.isnan(logs)), strict=True), key=lambda place: logs[place])
        distances = []
        for layer, head in ranked[:ahead]:
            trial = copy.deepcopy(model)
            gg.remove_heads(trial, {int(layer): [int(head)]})
            distances.append(float((unpruned.exp() * (unpruned - chances(trial))).sum(-1).mean()))
        layer, head = ranked[int(np.argmin(distances))]
        gg.remove_heads(model, {int(layer): [int(head)]})
        order.append(Unit(int(layer), int(head)))
    return order


def test_the_order_is_that_of_trials_by_hand(family):
    total = len(find_sites(tiny_model(family), "heads").survivors())
    expected = by_hand(tiny_model(family, dtype=torch.float64), total, 3)
    assert removed_by(run(tiny_model(family, dtype=torch.float64), look_ahead=3).steps) == expected


def test_it_can_change_the_order_and_one_head_can_not():
    model = tiny_model("bert", num_hidden_layers=2)
    plain = removed_by(run(model).steps)
    assert removed_by(run(model, look_ahead=1).steps) == plain
    assert removed_by(run(model, look_ahead=8).steps) != plain


def test_savings_change_nothing():
    model = tiny_model("bert", num_hidden_layers=3)
    orders = [removed_by(run(model, look_ahead=4, savings=savings).steps) for savings in ("all", "none")]
    assert orders[0] == orders[1]


def test_several_heads_in_a_step_are_the_closest_of_those_tried():
    model = tiny_model("bert", num_hidden_layers=2)
    one = run(model, look_ahead=5, stop="heads=1").steps[1].removed
    two = run(model, look_ahead=5, heads_per_step=2, stop="heads=2").steps[1].removed
    assert set(one) < set(two)


def test_a_run_that_was_cut_short_ends_alike(tmp_path):
    model = tiny_model("bert", num_hidden_layers=2)
    whole = run(model, look_ahead=4, out=tmp_path / "whole")

    def stop(step, *_):
        if step.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, look_ahead=4, out=tmp_path / "cut", on_step=stop)
    resumed = run(model, look_ahead=4, out=tmp_path / "cut", resume=True)
    assert [step.removed for step in resumed.steps] == [step.removed for step in whole.steps]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_comparisons_have_it_as_methods(tmp_path):
    model = tiny_model("bert", num_hidden_layers=2, **LABEL_NAMES)
    methods = "greedy-gnorm,gnorm-look-ahead,fisher-look-ahead"
    found = gg.compare(
        model, tiny_rows(60), tokenizer=tiny_tokenizer(), methods=methods, runs=1, samples=20, out=tmp_path / "c"
    )
    walk = found.curves["gnorm-look-ahead"][0]
    assert removed_by(walk) != removed_by(found.curves["greedy-gnorm"][0])
    assert len(removed_by(walk)) == 8


@pytest.mark.filterwarnings("ignore:The calibration rows have")
def test_fitted_models_are_tried_too():
    model = tiny_model("bert", num_hidden_layers=2)
    rows = [{key: tensor for key, tensor in row.items() if key != "labels"} for row in DATA]
    found = run(model, look_ahead=4, recover="least-squares", stop="heads=3")
    assert len(removed_by(found.steps)) == 3
    assert torch.isfinite(found.model(**rows[0]).logits).all()


def test_outputs_that_are_no_numbers_are_refused():
    model = tiny_model("bert", num_hidden_layers=2)
    sites, rows = find_sites(model, "heads"), ready_batches(DATA)
    rows = with_reference(model, rows)
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    with pytest.raises(gg.NonFiniteScore, match="check the weights"):
        trial_removals(sites, rows, [Unit(0, 0)])


def test_bad_numbers_are_refused():
    with pytest.raises(gg.GnormError, match="look_ahead must be a whole number, 1 or more"):
        run(tiny_model("bert"), look_ahead=0)
    with pytest.raises(gg.GnormError, match="inverse-gnorm removes what matters most first"):
        run(tiny_model("bert"), look_ahead=4, method="inverse-gnorm")
