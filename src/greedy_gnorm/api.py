"""What users call: prune, score, compare, take a step out of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.comparison.experiment import OnPartStep, run_experiment
from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import scoring_batches
from greedy_gnorm.data.sets import CALIBRATION
from greedy_gnorm.deployment import hub
from greedy_gnorm.deployment.speed import torch_latencies
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.checkpoint import load, load_tokenizer, weights_fingerprint
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import tested, with_drawn_labels
from greedy_gnorm.passes.gradients import gradient_change
from greedy_gnorm.passes.processes import broadcast, is_first, on_all_ranks, shard
from greedy_gnorm.passes.speed import SHAPES, possible
from greedy_gnorm.pruning.choices import Choice, choose
from greedy_gnorm.pruning.costs import Times
from greedy_gnorm.pruning.methods import GREEDY, JOINT, JOINTS, METHODS
from greedy_gnorm.pruning.prepare import (
    copy_sharing_weights,
    device_for,
    dtype_for,
    load_inputs,
    load_sets,
    objective_for,
    prepare_run,
    recovery_for,
    resolve_method,
    savings_for,
    working_copy,
)
from greedy_gnorm.pruning.run import OnStep, Run, at_step, measure_of, units_of, walk
from greedy_gnorm.records import schema
from greedy_gnorm.records.header import check_processes_agree, run_header, sources_of
from greedy_gnorm.records.journal import RUN_FILE, Journal, open_journal, read_header
from greedy_gnorm.recovery.least_squares import Recovery
from greedy_gnorm.report.outcome import FORMATS, check_format, write_comparison, write_outcome
from greedy_gnorm.scores import score_with
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SCORING, Settings
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import task_of
from greedy_gnorm.units import Latency, Scores, Step, removed_by


def score(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    score: str = "gnorm",
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    label_map: Mapping[str, str] | None = None,
    labels: str = "data",
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    tokens_per_batch: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    units: str | None = None,
) -> Scores:
    """Score every unit of a model on data, without removing any.

    Args:
        model: A model object, a folder or a name on the Hugging Face Hub. It is not changed.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), a `datasets.Dataset`, or ready
            batches.
        tokenizer: The model's tokenizer. Default: the one in the model's folder.
        score: The score; `gnorm methods` lists them.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample; 0 means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        labels: "data", or "own" to score with labels drawn from the model's own predictions.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        device_map: How to spread a large model over devices: "auto", "balanced", or a dict that gives each module a
            place (requires accelerate).
        tokens_per_batch: Tokens in a batch, including padding.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        units: What is scored: "heads" (the default), feed-forward neurons ("ffn") or "both".
    """
    given = _settings(locals(), SCORING)
    function = score_with(score, given.score_options)
    chosen = objective_for(function, given)
    if chosen.needs_reference and function.objective is not None:
        raise GnormError(f"{chosen.name} compares with the unpruned model, which is the one to score: it is zero.")
    source = model
    model, tokenizer = load_inputs(model, tokenizer, given, given.units or "heads")
    needs_labels = function.asks_for_labels(chosen) and given.labels == "data"
    batches = scoring_batches(model, tokenizer, task_of(model), data, given, needs_labels=needs_labels)
    first, place = next(model.parameters()), device_for(given)
    as_it_is = (first.dtype, first.device) == (dtype_for(model, given), place) and given.device_map is None
    worked = copy_sharing_weights(model) if as_it_is else working_copy(model, source, given)
    sites = find_sites(worked, given.units or "heads").use(savings_for(given))
    batches = batches.to(place)
    if given.labels == "own":
        batches = with_drawn_labels(sites.model, batches)
    return function(sites, shard(batches), chosen)


def prune(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    method: str = "greedy-gnorm",
    stop: str | Sequence[str] = "knee",
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    label_map: Mapping[str, str] | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    heads_per_step: int | None = None,
    recompute: int | None = None,
    recover: str | None = None,
    labels: str = "data",
    calibration_tokens: int = 65536,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    eval_data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    format: str = FORMATS[0],
    latency: bool = True,
    push_to_hub: str | None = None,
) -> Run:
    """Prune a copy of a model; the result has the steps, the solution and the pruned model.

    Args:
        model: A model object, a folder or a name on the Hugging Face Hub. It is not changed.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), a `datasets.Dataset`, or ready
            batches.
        tokenizer: The model's tokenizer. Default: the one in the model's folder.
        method: How heads are chosen; `gnorm methods` lists the methods.
        stop: When to stop: one rule such as "drop=0.01", or a list of rules of which the first that fires stops the
            run.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample; 0 means all.
        eval_samples: Rows to evaluate on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        heads_per_step: Heads to remove in each step. Default: the method's own number.
        recompute: Steps from one scoring to the next; 0 scores only once. Default: the method's own number.
        recover: How quality is recovered after each step: "least-squares" fits the output projections, "gates" fits one
            factor for each unit, "none" does nothing. Default: the method's own.
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        calibration_tokens: Tokens of the rows that output projections are fitted on; they need no labels.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        device_map: How to spread a large model over devices: "auto", "balanced", or a dict that gives each module a
            place (requires accelerate).
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        eval_data: Rows to evaluate on, given like `data`. Default: rows of `data` that are not used for scoring.
        out: The folder to write the run to: journal, model, report, figures and tables. Default: nothing is written.
        resume: Continue the run in `out`.
        on_step: Called with each new step, the number of heads removed so far and the number that may be removed in
            all.
        format: The saved model: "pruned" is smaller; "dense" keeps the original shapes, with zeros.
        latency: Measure the speed before and after, if `out` is given.
        push_to_hub: Upload the pruned model to the hub under this name; requires `out`.
    """
    given = _settings(locals(), PRUNING)
    return _perform(
        "prune", given, model, tokenizer, data, eval_data, out=out, resume=resume, on_step=on_step, format=format,
        measure_speed=latency, push_to_hub=push_to_hub,
    )  # fmt: skip


def compress(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    method: str = JOINT,
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    label_map: Mapping[str, str] | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    units: str | None = None,
    recover: str | None = None,
    labels: str = "data",
    calibration_tokens: int = 65536,
    macs: float | None = None,
    speedup: float | None = None,
    latency: str | float | None = None,
    params: str | float | None = None,
    size: str | None = None,
    max_drop: float | None = None,
    rounds: int = 20,
    uniform: bool = False,
    multiple_of: int = 1,
    shape: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    eval_data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    format: str = FORMATS[0],
    measure_speed: bool = True,
    push_to_hub: str | None = None,
) -> Run:
    """Remove heads and feed-forward neurons from a copy of a model, and fit what is left, without training.

    With targets (macs, speedup, latency, params, size), all of them are reached. Without any, the result is the
    smallest model that loses at most `max_drop` on validation rows. Quality on test rows is measured once, at the end.

    Args:
        model: A model object, a folder or a name on the Hugging Face Hub. It is not changed.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), a `datasets.Dataset`, or ready
            batches.
        tokenizer: The model's tokenizer. Default: the one in the model's folder.
        method: How heads are chosen; `gnorm methods` lists the methods.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample of the training rows; 0 means all.
        eval_samples: Rows to choose a step on, and rows to test on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        units: What is removed: "heads", feed-forward neurons ("ffn") or "both".
        recover: How quality is recovered after each step: "least-squares" fits the output projections, "gates" fits one
            factor for each unit, "none" does nothing. Default: the method's own.
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        calibration_tokens: Tokens of the rows that output projections are fitted on; they need no labels.
        macs: Multiplications to keep at most, as a share of the unpruned model's.
        speedup: How many times faster the model should be, by times measured on this machine.
        latency: Time that a batch may take, such as "10ms", by times measured on this machine.
        params: Parameters to keep at most: a share such as 0.6, or a number such as "80M".
        size: Size of the stored weights at most, such as "30MB".
        max_drop: Quality to lose at most; 0.01 is one point of accuracy. Default: 0.01 if no target is given.
        rounds: Rounds of removing, fitting and scoring again.
        uniform: Keep the same number of units in every layer.
        multiple_of: Keep a multiple of this number of neurons in every layer.
        shape: Rows and tokens of the batch that multiplications and times are stated for, such as "8x128". Default: the
            lengths of the data.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        eval_data: Rows to test on, given like `data`. Default: the test rows of `data`.
        out: The folder to write the run to: journal, model, report, figures and tables. Default: nothing is written.
        resume: Continue the run in `out`.
        on_step: Called with each new step, its round and the number of rounds.
        format: The saved model: "pruned" is smaller; "dense" keeps the original shapes, with zeros.
        measure_speed: Measure the speed of the result and of the choices, if `out` is given.
        push_to_hub: Upload the pruned model to the hub under this name; requires `out`.
    """
    given = _settings(locals(), COMPRESSING)
    if not METHODS[given.method].in_rounds:
        raise GnormError(f"gnorm compress takes the methods {', '.join(JOINTS)}; {given.method} is for gnorm prune.")
    return _perform(
        "compress", given, model, tokenizer, data, eval_data, out=out, resume=resume, on_step=on_step, format=format,
        measure_speed=measure_speed, push_to_hub=push_to_hub,
    )  # fmt: skip


def _perform(
    command: str,
    given: Settings,
    model: Any,
    tokenizer: Any,
    data: Any,
    eval_data: Any,
    *,
    out: str | Path | None,
    resume: bool,
    on_step: OnStep | None,
    format: str,
    measure_speed: bool,
    push_to_hub: str | None,
) -> Run:
    """Prepare a run, perform its steps, measure the result and write it."""
    check_format(format)
    if push_to_hub is not None:
        if out is None:
            raise GnormError("push_to_hub requires a folder for the model: set out.")
        hub.check(push_to_hub)
    times = _recorded_times(out) if resume else None
    prepared = on_all_ranks(lambda: prepare_run(model, tokenizer, data, eval_data, given, times))
    header = {"command": command, **run_header(prepared.model, model, prepared.rows, given, prepared.plan.costs)}
    check_processes_agree(header)
    with ExitStack() as stack:
        journal: Journal | None = None

        def begin() -> list[dict[str, Any]]:
            nonlocal journal
            if out is not None:
                journal = stack.enter_context(open_journal(Path(out), header, resume=resume))
            return [] if journal is None else [step.to_json() for step in journal.steps]

        history = [Step.from_json(line) for line in broadcast(begin)]
        record = None if journal is None else journal.append
        steps = walk(prepared.sites, prepared.plan, history, prepared.limit, record=record, on_step=on_step)
        chosen, unpruned, tokenizer = prepared.plan.rules.solution(steps), prepared.model, prepared.tokenizer
        recovery, test, units = prepared.plan.recovery, prepared.test, units_of(header)
        # At most three copies of the model at a time: the one that was cut and those that are timed go first
        del prepared
        timed = measure_speed and journal is not None and given.device_map is None
        latencies = _latencies(unpruned, steps, chosen, given, units) if timed else []
        choices = choose(steps, measure_of(header)) if test is not None else []
        if timed and is_first():
            choices = _timed_choices(choices, unpruned, steps, given, units)
        pruned = at_step(unpruned, steps, chosen, units, recovery)
        if recovery is not None:
            recovery.calibration.clear()  # gigabytes on disk, and computed again when another step is rebuilt
        tests = None if test is None else _tested(unpruned, pruned, test, given)
        run = Run(steps, steps[chosen], pruned, tokenizer, header, unpruned, latencies, recovery, tests, choices)
        if journal is None:
            return run
        write_outcome(run, journal, format)
        if push_to_hub is not None:
            hub.push(journal.folder / "model", push_to_hub)
        return run


def _recorded_times(out: str | Path | None) -> Times | None:
    """The times that the run in this folder measured by width, if it did."""
    if out is None or not (Path(out) / RUN_FILE).exists():
        return None
    content = read_header(Path(out) / RUN_FILE).get("times")
    return None if content is None else Times.from_json(content)


def _tested(before: Any, after: Any, test: Batches, given: Settings) -> dict[str, Any]:
    """The quality of both models on the test rows, in the precision of the run."""
    place = device_for(given), dtype_for(before, given)
    first, second = (find_sites(copy.deepcopy(model).to(*place)) for model in (before, after))
    return tested(first, second, test)


def _settings(keywords: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """The settings with these names among the keyword arguments of a function."""
    return Settings.of({name: keywords[name] for name in names})


def _latencies(model: Any, steps: Sequence[Step], chosen: int, given: Settings, units: str) -> list[Latency]:
    """The speed of the unpruned model and of the solution, on the device and in the precision of the run."""
    before = _as_run(model, given)
    return torch_latencies(before, at_step(before, steps, chosen, units), _shapes(given))


def _timed_choices(
    choices: Sequence[Choice], model: Any, steps: Sequence[Step], given: Settings, units: str
) -> list[Choice]:
    """The choices with their measured speed, each timed in turn with the unpruned model."""
    before = _as_run(model, given)
    shapes = possible(before, _shapes(given))[-1:]
    timed = []
    for choice in choices:
        for latency in torch_latencies(before, at_step(before, steps, choice.step, units), shapes, seconds=1.0):
            choice = replace(choice, measured=latency.speed_up, milliseconds=latency.after_ms)
        timed.append(choice)
    return timed


def _as_run(model: Any, given: Settings) -> Any:
    """The model on the device and in the precision of the run."""
    device, dtype = device_for(given), dtype_for(model, given)
    first = next(model.parameters())
    return model if (first.device, first.dtype) == (device, dtype) else copy.deepcopy(model).to(device, dtype)


def _shapes(given: Settings) -> tuple[tuple[int, int], ...]:
    """The shapes to time: the usual ones, and the one that the user states."""
    if given.shape is None:
        return SHAPES
    rows, tokens = map(int, given.shape.split("x"))
    return (*SHAPES, (rows, tokens))


def take_step(
    folder: str | Path,
    step: int,
    *,
    out: str | Path,
    model: str | Path | None = None,
    format: str = FORMATS[0],
    latency: bool = True,
    trust_remote_code: bool = False,
) -> Run:
    """Write the model that the run in `folder` had after `step`, with its record up to there, to the folder `out`.

    `model` is the folder of the run's model, if it was moved; the rest is as for `prune`.
    """
    check_format(format)
    journal = Journal.read(Path(folder))
    last = len(journal.steps) - 1
    if not 0 <= step <= last:
        raise GnormError(f"There is no step {step} in {folder}: its steps go from 0 to {last}.")
    source = _source(journal, model)
    whole = load(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    was, now = journal.header["model"]["weights"], weights_fingerprint(whole)
    if was != now:
        raise GnormError(
            f"{source} is not the model of the run in {folder}: the fingerprint of its weights is {now}, not {was}."
        )
    steps = [replace(each, stop=None) for each in journal.steps[: step + 1]]
    steps[-1] = replace(steps[-1], stop=f"step {step} of {last}, taken from {folder}")
    settings = Settings.of(schema.complete_settings(journal.header["config"]))
    units, recovery = units_of(journal.header), _recovery_of(journal, whole, tokenizer, settings)
    pruned = at_step(whole, steps, step, units, recovery)
    header = {name: value for name, value in journal.header.items() if name != "result"}
    header["taken"] = {"run": str(folder), "step": step}
    with open_journal(Path(out), header, resume=_half_taken(Path(out))) as taken:
        for each in steps[len(taken.steps) :]:
            taken.append(each)
        times = torch_latencies(whole, pruned) if latency else []
        run = Run(steps, steps[-1], pruned, tokenizer, taken.header, whole, times, recovery)
        write_outcome(run, taken, format)
    return run


def _recovery_of(journal: Journal, model: Any, tokenizer: Any, settings: Settings) -> Recovery | None:
    """What a recorded run fitted its output maps with: its calibration rows are read again, and must be the same."""
    method, _, _ = resolve_method(settings)
    if method.recover == "none":
        return None
    described = journal.header["data"]
    if any(part.get("in_memory") for part in described.values()):
        raise GnormError(f"The run in {journal.folder} was given rows in Python: take its steps with run.at(step).")
    sets = load_sets(model, tokenizer, *sources_of(journal.header), settings)
    if sets[CALIBRATION].fingerprint != described[CALIBRATION]["fingerprint"]:
        raise GnormError(
            f"{described[CALIBRATION]['source']} has changed since the run in {journal.folder} was calibrated on it."
        )
    device = device_for(settings)
    rows = {CALIBRATION: sets[CALIBRATION].to(device)}
    return recovery_for(method, copy.deepcopy(model).to(device, dtype_for(model, settings)), rows)


def _half_taken(out: Path) -> bool:
    """Whether a step was being taken into this folder when the process ended."""
    if not (out / RUN_FILE).exists():
        return False
    header = read_header(out / RUN_FILE)
    return "taken" in header and "result" not in header


def _source(journal: Journal, model: str | Path | None) -> Any:
    if model is None and journal.header["model"].get("in_memory"):
        raise GnormError(
            f"The run in {journal.folder} pruned a model given in Python: save that model and name its folder."
        )
    return model or journal.header["model"]["name"]


def compare(
    model: Any,
    data: Any,
    *,
    out: str | Path,
    tokenizer: Any = None,
    methods: str | Sequence[str] = "paper",
    runs: int = 3,
    trajectories: int = 25,
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    label_map: Mapping[str, str] | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    heads_per_step: int | None = None,
    recompute: int | None = None,
    labels: str = "data",
    calibration_tokens: int = 65536,
    dtype: str = "auto",
    device: str | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    rounds: int = 20,
    eval_data: Any = None,
    resume: bool = False,
    on_step: OnPartStep | None = None,
) -> Comparison:
    """Prune with several methods until no head is left, several times each, and write tables and figures.

    Args:
        model: A model object, a folder or a name on the Hugging Face Hub. It is not changed.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), or a `datasets.Dataset`.
        out: The folder to write to.
        tokenizer: The model's tokenizer. Default: the one in the model's folder.
        methods: "paper", "all", "joint" (heads and neurons), or names of methods; `gnorm methods` lists them.
        runs: Runs of each method, each on another scoring sample.
        trajectories: Runs of the method "random".
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample; 0 means all.
        eval_samples: Rows to evaluate on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        heads_per_step: Heads to remove in each step. Default: the method's own number.
        recompute: Steps from one scoring to the next; 0 scores only once. Default: the method's own number.
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        calibration_tokens: Tokens of the rows that output projections are fitted on; they need no labels.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        rounds: Rounds of the methods that remove heads and neurons.
        eval_data: Rows to evaluate on, given like `data`. Default: rows of `data` that are not used for scoring.
        resume: Continue the comparison in `out`.
        on_step: Called with the walk (method and run), its new step, the number of heads removed so far and the number
            that may be removed in all.
    """
    given = _settings({**locals(), "stop": "all"}, (*COMPARING, "stop"))
    experiment = run_experiment(
        model, tokenizer, data, out=Path(out), methods=methods, runs=runs, trajectories=trajectories,
        eval_data=eval_data, resume=resume, on_step=on_step, given=given,
    )  # fmt: skip
    with experiment as walked:
        comparison = walked.comparison
        if is_first():
            changes = None
            if GREEDY in comparison.curves:  # shown for the head that Greedy-Gnorm removes first
                (head, *_) = removed_by(comparison.curves[GREEDY][0])
                changes = head, gradient_change(walked.sites, walked.scoring, OBJECTIVES["logit-norm"], head)
            write_comparison(comparison, Path(out), changes)
    return comparison
