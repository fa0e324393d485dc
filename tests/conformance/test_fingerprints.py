"""Fixed runs end as they did in 0.1.0: the same order and weights everywhere, the same digits on the same machine.

Only the paper's score by the Gram form has other last digits since it is centred; `fingerprints.json` has both seals.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import shared
from fingerprints import FILE, fingerprint, machine, names, run

CONTENT = json.loads(FILE.read_text())


def marked(name):
    family, method, how = name.split()
    trained = family in ("demo", "minilm-tweets")  # these take long
    quick = family == "bert" or ((method, how) == ("greedy-gnorm", "direct") and not trained)
    return name if quick else pytest.param(name, marks=pytest.mark.slow)


def test_every_run_is_recorded():
    assert set(CONTENT["runs"]) == set(names())


@pytest.mark.parametrize("name", [marked(name) for name in names()])
def test_a_fixed_run_ends_as_before(name):
    if name.startswith("minilm"):
        shared("models/minilm-tweets")
    done, recorded = run(name), CONTENT["runs"][name]
    assert all(np.isfinite(list(step.quality.values())).all() for step in done.steps)
    now, first = fingerprint(done), recorded["0.1.0"]
    if not name.startswith("demo") or machine() == CONTENT["machine"]:  # the demo's model is trained on the spot
        assert (now["order"], now["weights"]) == (first["order"], first["weights"])
    if machine() == CONTENT["machine"]:
        assert now["seal"] == recorded["now"]["seal"]


@pytest.mark.parametrize("name", names())
def test_only_the_centred_form_has_new_digits(name):
    recorded = CONTENT["runs"][name]
    if recorded["0.1.0"]["seal"] != recorded["now"]["seal"]:
        assert "gnorm" in name
        assert name.endswith(" all"), "the Gram form is on"
    assert {key: recorded["0.1.0"][key] for key in ("order", "weights")} == {
        key: recorded["now"][key] for key in ("order", "weights")
    }
