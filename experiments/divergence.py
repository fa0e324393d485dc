"""How far joint methods move the outputs of a model: python experiments/divergence.py MODEL DATA [METHOD ...]

Each method goes down to a quarter of the multiplications in six rounds, scored on 512 rows and fitted on 16,384 tokens.
After each round, the mean divergence of the outputs from the unpruned model's (KL, in nats) is measured on the
validation rows and on the test rows, without any label. It tells methods apart on far fewer rows than accuracy does.
"""

from __future__ import annotations

import sys

import torch

from greedy_gnorm.passes.trials import divergence
from greedy_gnorm.pruning.loop import prune_steps
from greedy_gnorm.pruning.prepare import prepare_run
from greedy_gnorm.report.tables import as_markdown
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.objectives import with_reference

SHARE, ROUNDS = 0.25, 6
METHODS = ("joint-refit", "joint-fisher", "joint-swap", "joint-fisher-joint", "joint-kl-fisher", "joint-reconstruction")


def walk(model: str, data: str, method: str) -> list[str]:
    """The divergences after each round on validation and test rows."""
    settings = Settings(method=method, macs=SHARE, rounds=ROUNDS, samples=512, calibration_tokens=16384)
    prepared = prepare_run(model, None, data, None, settings)
    sites, plan = prepared.sites, prepared.plan
    assert prepared.test is not None
    rows = [with_reference(sites.model, each) for each in (plan.evaluation, prepared.test)]
    found = []
    for step in prune_steps(sites, plan):
        if step.step:
            found.append(" / ".join(f"{divergence(sites, each):.3f}" for each in rows))
    return found


def main(model: str, data: str, *methods: str) -> None:
    torch.set_num_threads(1)
    shares, lines = [f"{SHARE ** (number / ROUNDS):.0%}" for number in range(1, ROUNDS + 1)], []
    for method in methods or METHODS:
        lines.append([method, *walk(model, data, method)])
        print(as_markdown(["validation / test", *shares], lines), flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
