"""What users call: prune, score, compare, take a step out of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from greedy_gnorm.comparison.analysis import Comparison
from greedy_gnorm.comparison.experiment import OnPartStep, run_experiment
from greedy_gnorm.data.loading import scoring_batches
from greedy_gnorm.model.checkpoint import FORMATS, check_format, load_tokenizer, weights_fingerprint
from greedy_gnorm.model.modes import gradient_mode_restored
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import with_drawn_labels
from greedy_gnorm.passes.gradients import gradient_change
from greedy_gnorm.passes.processes import is_first, shard, world_size
from greedy_gnorm.phases import phase
from greedy_gnorm.progress import followed
from greedy_gnorm.pruning.choices import Choice, step_named
from greedy_gnorm.pruning.methods import GREEDY, JOINT, check_joint, resolve_score
from greedy_gnorm.pruning.prepare import (
    copy_sharing_weights,
    device_for,
    dtype_for,
    load_inputs,
    savings_for,
    working_copy,
)
from greedy_gnorm.pruning.run import OnStep, Run, at_step, units_of
from greedy_gnorm.records import schema
from greedy_gnorm.records.journal import RUN_FILE, Journal, open_journal, read_header
from greedy_gnorm.records.kept import keeping_scores
from greedy_gnorm.records.training import KeptTraining
from greedy_gnorm.records.unpruned import load_unpruned, unpruned_source
from greedy_gnorm.runs import measured_latencies, perform, recovery_of, trained_step
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SCORING, Settings
from greedy_gnorm.tasks.objectives import OBJECTIVES
from greedy_gnorm.tasks.task import measure_of, task_of, uses_own_labels
from greedy_gnorm.units import Scores, removed_by


@gradient_mode_restored()
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
    block_length: int | None = None,
    label_map: Mapping[str, str] | None = None,
    threshold: float | None = None,
    group_queries: str | None = None,
    labels: str = "data",
    stride: int | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    tokens_per_batch: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    units: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
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
        block_length: Tokens in a row of a language model, whose text is cut into blocks. Default: 512, or fewer if the
            model takes fewer.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        threshold: The probability above which a label is predicted, where a row may have several. Default: 0.5.
        group_queries: What a head is where several query heads share a key and a value: "whole", such a group, or
            "each", one query head of each group of the layer. Default: "whole", or as the model was pruned before.
        labels: "data", or "own" to score with labels drawn from the model's own predictions.
        stride: Tokens that neighbouring windows share, where a context is longer than a window (question answering).
            Default: 128, and at most half of a window.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        device_map: How to spread a large model over devices: "auto", "balanced", or a dict that gives each module a
            place (requires accelerate).
        tokens_per_batch: Tokens in a batch, including padding.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        units: What is scored: "heads" (the default), feed-forward neurons ("ffn") or "both".
        out: A folder that keeps what a score of many passes has computed, until it is complete.
        resume: Continue an interrupted score with what is kept in `out`.
    """
    given = _settings(locals(), SCORING)
    function, chosen = resolve_score(score, given)
    source = model
    model, tokenizer = load_inputs(model, tokenizer, given, given.units or "heads")
    task = task_of(model)
    needs_labels = function.asks_for_labels(chosen) and not uses_own_labels(task, given)
    with phase("Reading rows"):
        batches = scoring_batches(model, tokenizer, task, data, given, needs_labels=needs_labels)
    first, place = next(model.parameters()), device_for(given)
    as_it_is = (first.dtype, first.device) == (dtype_for(model, given), place) and given.device_map is None
    worked = copy_sharing_weights(model) if as_it_is else working_copy(model, source, given)
    sites = find_sites(worked, given.units or "heads").use(savings_for(given))
    batches = batches.to(place)
    if function.draws_labels or uses_own_labels(task, given):
        batches = with_drawn_labels(sites.model, batches)
    if out is None or not function.many_passes or world_size() > 1:
        return function(sites, shard(batches), chosen)
    state = {
        "model": weights_fingerprint(sites.model),
        "rows": [batches.fingerprint, batches.seed],
        "score": function.name,
        "options": function.defaults(),
        "objective": chosen.name,
        "labels": given.labels,
    }
    with keeping_scores(sites, Path(out), state, resume=resume):
        return function(sites, batches, chosen)


def prune(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    method: str = "greedy-gnorm",
    stop: str | Sequence[str] = "drop=0.01",
    metric: str | None = None,
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    block_length: int | None = None,
    label_map: Mapping[str, str] | None = None,
    threshold: float | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    heads_per_step: int | None = None,
    recompute: int | None = None,
    look_ahead: int | None = None,
    group_queries: str | None = None,
    recover: str | None = None,
    recover_steps: int = 300,
    labels: str = "data",
    stride: int | None = None,
    calibration_tokens: int = 65536,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | Mapping[str, int | str] | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    examples: bool = True,
    eval_data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | Sequence[OnStep] | None = None,
    progress: bool | None = None,
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
        stop: When to stop: one rule, or a list of rules of which the first that fires stops the run. By default the
            solution loses at most 0.01 on the rows that it is chosen on.
        metric: The measure that rules, curves and choices use, such as "macro_f1" or "mcc". Default: the task's own.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample; 0 means all.
        eval_samples: Rows to choose a step on, and rows to test on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        block_length: Tokens in a row of a language model, whose text is cut into blocks. Default: 512, or fewer if the
            model takes fewer.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        threshold: The probability above which a label is predicted, where a row may have several. Default: 0.5.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        heads_per_step: Heads to remove in each step. Default: the method's own number.
        recompute: Steps from one scoring to the next; 0 scores only once. Default: the method's own number.
        look_ahead: Heads to remove on trial in each step: of so many that are next by their scores, the one is removed
            whose removal keeps the outputs closest to the unpruned model's. Default: the method's own number.
        group_queries: What a head is where several query heads share a key and a value: "whole", such a group, or
            "each", one query head of each group of the layer. Default: "whole", or as the model was pruned before.
        recover: How quality is recovered after each step: "least-squares" fits the layers again, "gates" one factor for
            each unit, "mean" adds the mean outputs of removed units to biases, "none" does nothing.
            "distill" fits like "least-squares" and trains the chosen model at the end, towards the unpruned one.
            Default: the method's own.
        recover_steps: Steps of training, if `recover` is "distill".
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        stride: Tokens that neighbouring windows share, where a context is longer than a window (question answering).
            Default: 128, and at most half of a window.
        calibration_tokens: Tokens of the rows that layers are fitted on; they need no labels.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        device_map: How to spread a large model over devices: "auto", "balanced", or a dict that gives each module a
            place (requires accelerate).
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        examples: Keep the texts of rows whose prediction changed in the files of the run.
        eval_data: Rows to test on, given like `data`. Default: rows of `data` that have no other use.
        out: The folder to write the run to: journal, model, report, figures and tables. Default: nothing is written.
        resume: Continue the run in `out`.
        on_step: Called with each new step, the number of heads removed so far and the number that may be removed in
            all; or a list of such callbacks.
        progress: Show a progress bar. Default: in notebooks only.
        format: The saved model: "pruned" is smaller; "dense" keeps the original shapes, with zeros.
        latency: Measure the speed before and after, if `out` is given.
        push_to_hub: Upload the pruned model to the hub under this name; requires `out`.
    """
    given = _settings(locals(), PRUNING)
    with followed(on_step, progress, "Pruning") as report:
        return perform(
            "prune", given, model, tokenizer, data, eval_data, out=out, resume=resume, on_step=report, format=format,
            measure_speed=latency, push_to_hub=push_to_hub,
        )  # fmt: skip


def compress(
    model: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    method: str = JOINT,
    metric: str | None = None,
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    block_length: int | None = None,
    label_map: Mapping[str, str] | None = None,
    threshold: float | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    group_queries: str | None = None,
    units: str | None = None,
    recover: str | None = None,
    recover_steps: int = 300,
    labels: str = "data",
    stride: int | None = None,
    calibration_tokens: int = 65536,
    macs: float | None = None,
    speedup: float | None = None,
    latency: str | float | None = None,
    params: str | float | None = None,
    size: str | None = None,
    max_drop: float | None = None,
    rounds: int = 20,
    swap: bool | None = None,
    uniform: bool = False,
    multiple_of: int | None = None,
    shape: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    examples: bool = True,
    eval_data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | Sequence[OnStep] | None = None,
    progress: bool | None = None,
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
        metric: The measure that rules, curves and choices use, such as "macro_f1" or "mcc". Default: the task's own.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample of the training rows; 0 means all.
        eval_samples: Rows to choose a step on, and rows to test on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        block_length: Tokens in a row of a language model, whose text is cut into blocks. Default: 512, or fewer if the
            model takes fewer.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        threshold: The probability above which a label is predicted, where a row may have several. Default: 0.5.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        group_queries: What a head is where several query heads share a key and a value: "whole", such a group, or
            "each", one query head of each group of the layer. Default: "whole", or as the model was pruned before.
        units: What is removed: "heads", feed-forward neurons ("ffn") or "both".
        recover: How quality is recovered after each step: "least-squares" fits the layers again, "gates" one factor for
            each unit, "mean" adds the mean outputs of removed units to biases, "none" does nothing.
            "distill" fits like "least-squares" and trains the chosen model at the end, towards the unpruned one.
            Default: the method's own.
        recover_steps: Steps of training, if `recover` is "distill".
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        stride: Tokens that neighbouring windows share, where a context is longer than a window (question answering).
            Default: 128, and at most half of a window.
        calibration_tokens: Tokens of the rows that layers are fitted on; they need no labels.
        macs: Multiplications to keep at most, as a share of the unpruned model's.
        speedup: How many times faster the model should be, by times measured on this machine.
        latency: Time that a batch may take, such as "10ms", by times measured on this machine.
        params: Parameters to keep at most: a share such as 0.6, or a number such as "80M".
        size: Size of the stored weights at most, such as "30MB".
        max_drop: Quality to lose at most; 0.01 is one point of accuracy. Default: 0.01 if no target is given.
        rounds: Rounds of removing, fitting and scoring again.
        swap: Exchange the units of a round for others of their layer while that lowers the estimated loss. Default: as
            the method does.
        uniform: Keep the same number of units in every layer.
        multiple_of: Keep a multiple of this number of neurons in a layer. Default: 16 in layers of 512 neurons or
            more, else 1.
        shape: Rows and tokens of the batch that multiplications and times are stated for, such as "8x128". Default: the
            lengths of the data.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        examples: Keep the texts of rows whose prediction changed in the files of the run.
        eval_data: Rows to test on, given like `data`. Default: the test rows of `data`.
        out: The folder to write the run to: journal, model, report, figures and tables. Default: nothing is written.
        resume: Continue the run in `out`.
        on_step: Called with each new step, its round and the number of rounds; or a list of such callbacks.
        progress: Show a progress bar. Default: in notebooks only.
        format: The saved model: "pruned" is smaller; "dense" keeps the original shapes, with zeros.
        measure_speed: Measure the speed of the result and of the choices, if `out` is given.
        push_to_hub: Upload the pruned model to the hub under this name; requires `out`.
    """
    given = _settings(locals(), COMPRESSING)
    check_joint(given.method)
    with followed(on_step, progress, "Compressing") as report:
        return perform(
            "compress", given, model, tokenizer, data, eval_data, out=out, resume=resume, on_step=report, format=format,
            measure_speed=measure_speed, push_to_hub=push_to_hub,
        )  # fmt: skip


def _settings(keywords: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """The settings with these names among the keyword arguments of a function."""
    return Settings.of({name: keywords[name] for name in names})


def take_step(
    folder: str | Path,
    step: int | str,
    *,
    out: str | Path,
    model: str | Path | None = None,
    format: str = FORMATS[0],
    latency: bool = True,
    trust_remote_code: bool = False,
) -> Run:
    """Write the model that the run in `folder` had after `step`, with its record up to there, to the folder `out`.

    `step` is a number, or "drop=0.01", "free", "knee" or "fastest" for the step that the run's curve has there. `model`
    is the folder of the run's model, if it was moved; the rest is as for `prune`.
    """
    check_format(format)
    journal = Journal.read(Path(folder))
    step, last = step_named(journal.header, journal.steps, step), len(journal.steps) - 1
    source = unpruned_source(journal, model)
    with phase("Loading the model"):
        whole = load_unpruned(journal, source, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(source, config=whole.config, trust_remote_code=trust_remote_code)
    steps = [replace(each, stop=None) for each in journal.steps[: step + 1]]
    steps[-1] = replace(steps[-1], stop=f"step {step} of {last}, taken from {folder}")
    settings = Settings.of(schema.complete_settings(journal.header["config"]))
    recovery, evaluation = recovery_of(journal, whole, tokenizer, settings)
    header = {name: value for name, value in journal.header.items() if name != "result"}
    header["taken"] = {"run": str(folder), "step": step}
    with open_journal(Path(out), header, resume=_half_taken(Path(out))) as taken:
        for each in steps[len(taken.steps) :]:
            taken.append(each)
        kept = KeptTraining(taken.folder)
        pruned = at_step(whole, steps, step, units_of(header), recovery, kept)
        solution = trained_step(steps[-1], pruned, recovery, evaluation, settings, measure_of(header).name)
        here = settings.model_copy(update={"device": None, "device_map": None})  # the run may have had another machine
        times = measured_latencies(whole, steps, step, here, header) if latency else []
        result = journal.header.get("result", {})
        offered = [Choice.from_json(each) for each in result.get("choices", []) if each["step"] <= step]
        test = result.get("test") if step == result.get("solution") else None
        why = f"taken from {folder}, which has {last} steps"
        run = Run(
            steps, solution, pruned, tokenizer, taken.header, whole, times, recovery, test, offered, why=why
        )  # fmt: skip
        from greedy_gnorm.report.outcome import write_outcome  # loads matplotlib, which only this needs

        write_outcome(run, taken, format)
        kept.clear()
    return run


def _half_taken(out: Path) -> bool:
    """Whether a step was being taken into this folder when the process ended."""
    if not (out / RUN_FILE).exists():
        return False
    header = read_header(out / RUN_FILE)
    return "taken" in header and "result" not in header


def compare(
    model: Any,
    data: Any,
    *,
    out: str | Path,
    tokenizer: Any = None,
    methods: str | Sequence[str] = "paper",
    runs: int = 3,
    trajectories: int = 25,
    metric: str | None = None,
    objective: str | None = None,
    score_options: Mapping[str, Any] | None = None,
    samples: int | None = 512,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    block_length: int | None = None,
    label_map: Mapping[str, str] | None = None,
    threshold: float | None = None,
    protect: Sequence[tuple[int, int] | int] = (),
    min_heads: int = 0,
    heads_per_step: int | None = None,
    recompute: int | None = None,
    group_queries: str | None = None,
    recover: str | None = None,
    labels: str = "data",
    stride: int | None = None,
    calibration_tokens: int = 65536,
    dtype: str = "auto",
    device: str | None = None,
    tokens_per_batch: int = 2048,
    cache_memory: int = 2048,
    savings: str | Sequence[str] = "all",
    trust_remote_code: bool = False,
    rounds: int = 20,
    points: int | None = None,
    eval_data: Any = None,
    resume: bool = False,
    on_step: OnPartStep | Sequence[OnPartStep] | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Prune with several methods until no head is left, several times each, and write tables and figures.

    Args:
        model: A model object, a folder or a name on the Hugging Face Hub. It is not changed.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), or a `datasets.Dataset`.
        out: The folder to write to.
        tokenizer: The model's tokenizer. Default: the one in the model's folder.
        methods: "paper", "all", "joint" or "all-joint" (heads and neurons), or names of methods; `gnorm methods` lists
            them.
        runs: Runs of each method, each on another scoring sample.
        trajectories: Runs of the method "random".
        metric: The measure that rules, curves and choices use, such as "macro_f1" or "mcc". Default: the task's own.
        objective: The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own.
        score_options: Options of the score, such as {"variant": "A", "eps": 1e-5}; `gnorm methods` lists them.
        samples: Rows to score on, a seeded and stratified sample; 0 means all.
        eval_samples: Rows to evaluate on; 0, the default, means all.
        seed: Seed of the samples, of the split into scoring and evaluation rows and of random scores.
        text: The text column. Default: found by name.
        text_pair: The column of the second text of a pair. Default: found by name, unless the text column is given.
        label: The label column. Default: found by name.
        block_length: Tokens in a row of a language model, whose text is cut into blocks. Default: 512, or fewer if the
            model takes fewer.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}.
        threshold: The probability above which a label is predicted, where a row may have several. Default: 0.5.
        protect: Heads to keep: (layer, head) pairs, or a layer's number for all of its heads, such as [(0, 3), 11].
        min_heads: Heads to keep in every layer at least.
        heads_per_step: Heads to remove in each step. Default: the method's own number.
        recompute: Steps from one scoring to the next; 0 scores only once. Default: the method's own number.
        group_queries: What a head is where several query heads share a key and a value: "whole", such a group, or
            "each", one query head of each group of the layer. Default: "whole", or as the model was pruned before.
        recover: How every method recovers quality after each step: "least-squares" fits the layers again, "gates" one
            factor for each unit, "mean" adds the mean outputs of removed units to biases, and "none" does nothing.
            Default: each method's own way.
        labels: "data", or "own" to score with labels drawn from the model's own predictions, so that text without
            labels is enough; quality is then the agreement with the unpruned model.
        stride: Tokens that neighbouring windows share, where a context is longer than a window (question answering).
            Default: 128, and at most half of a window.
        calibration_tokens: Tokens of the rows that layers are fitted on; they need no labels.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        tokens_per_batch: Tokens in a batch, including padding.
        cache_memory: Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing.
        savings: Exact savings to use: "all", "none", or a list of names (kept-layers, first-token, gram).
        trust_remote_code: Allow code that comes with the model to run.
        rounds: Rounds of the methods that remove heads and neurons.
        points: Points of the curve at which quality is measured, besides those that the tables show. Default: after
            each head.
        eval_data: Rows to evaluate on, given like `data`. Default: rows of `data` that are not used for scoring.
        resume: Continue the comparison in `out`.
        on_step: Called with the walk (method and run), its new step, the number of heads removed so far and the number
            that may be removed in all; or a list of such callbacks.
        progress: Show a progress bar. Default: in notebooks only.
    """
    given = _settings({**locals(), "stop": "all"}, (*COMPARING, "stop"))
    with ExitStack() as stack:
        report = stack.enter_context(followed(on_step, progress, "Comparing"))
        experiment = run_experiment(
            model, tokenizer, data, out=Path(out), methods=methods, runs=runs, trajectories=trajectories,
            eval_data=eval_data, resume=resume, on_step=report, given=given,
        )  # fmt: skip
        walked = stack.enter_context(experiment)
        comparison = walked.comparison
        if is_first():
            changes = None
            if GREEDY in comparison.curves:  # shown for the head that Greedy-Gnorm removes first
                (head, *_) = removed_by(comparison.curves[GREEDY][0])
                changes = head, gradient_change(walked.sites, walked.scoring, OBJECTIVES["logit-norm"], head)
            from greedy_gnorm.report.outcome import write_comparison  # loads matplotlib, which only this needs

            write_comparison(comparison, Path(out), changes)
    return comparison
