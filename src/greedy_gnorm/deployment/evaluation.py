"""The unpruned and the pruned model side by side on any labelled rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.deployment.pair import load_pair
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.passes.evaluation import LABELS, PREDICTED, row_statistics, tested, with_predictions
from greedy_gnorm.passes.predictions import compared_predictions
from greedy_gnorm.pruning.prepare import device_for, on_device
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.records.files import write_json, write_text, writing_to
from greedy_gnorm.records.header import describe_rows
from greedy_gnorm.report.evaluation import evaluation_csv, evaluation_markdown
from greedy_gnorm.settings import EVALUATING, Settings
from greedy_gnorm.tasks.task import AGREEMENT, Task
from greedy_gnorm.units import Matrix, quality_text

COLUMNS = ("text", "text_pair", "label")
"""The settings that name columns; those of the run are used unless one of them is given."""
REPORT = "eval.json"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Both models on the same rows.

    `quality` has each measure before and after, `intervals` their 95 % intervals and those of the change (paired).
    `per_class` has precision, recall and F1 of each class, and how many rows, or whatever is `counted`, have it;
    `confusion` and `changed`, the rows whose prediction changed, are there where each row has one class.
    """

    unpruned: str
    pruned: str
    data: Mapping[str, Any]
    rows: int
    leading: str
    quality: Mapping[str, Sequence[float]]
    intervals: Mapping[str, Mapping[str, Sequence[float]]]
    classes: Sequence[str] = ()
    counted: str = "rows"
    per_class: Sequence[Mapping[str, Any]] = ()
    confusion: Mapping[str, Sequence[Sequence[int]]] | None = None
    changed_count: int | None = None
    changed: Sequence[Mapping[str, Any]] = ()

    @property
    def agreement(self) -> float | None:
        """How well the pruned model predicts what the unpruned one does: the leading measure with these labels."""
        return self.quality[AGREEMENT][1] if AGREEMENT in self.quality else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, as in eval.json."""
        return {**asdict(self), AGREEMENT: self.agreement}

    def __repr__(self) -> str:
        before, after = self.quality[self.leading]
        ends = (quality_text(end, "+") for end in self.intervals[self.leading]["change"])
        change = f"{quality_text(after - before, '+')}, 95 % {' to '.join(ends)}"
        same = "" if self.agreement is None else f", agreement {self.agreement:.4f}"
        values = f"{quality_text(before)} to {quality_text(after)}"
        return f"Evaluation({self.rows:,} rows: {self.leading} {values} ({change}){same})"


def evaluate(
    run: Run | str | Path,
    data: Any,
    *,
    eval_samples: int | None = None,
    seed: int = 0,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    block_length: int | None = None,
    label_map: Mapping[str, str] | None = None,
    stride: int | None = None,
    threshold: float | None = None,
    dtype: str = "auto",
    device: str | None = None,
    tokens_per_batch: int = 2048,
    trust_remote_code: bool = False,
    model: str | Path | None = None,
    examples: int = 10,
    out: str | Path | None = None,
) -> Evaluation:
    """Measure the unpruned and the pruned model of a run on labelled rows.

    Args:
        run: A run, its folder, or the `model` folder in it.
        data: A file, a folder, `hub:NAME[:CONFIG][:SPLIT]`, a list of rows (dicts), a `datasets.Dataset`, or ready
            batches. The test split is used if there is one.
        eval_samples: Rows to evaluate on, a seeded and stratified sample; 0, the default, means all.
        seed: Seed of the sample.
        text: The text column. Default: the run's, else found by name.
        text_pair: The column of the second text of a pair. Default: the run's, else found by name.
        label: The label column. Default: the run's, else found by name.
        block_length: Tokens in a row of a language model, whose text is cut into blocks. Default: the run's.
        label_map: The model's label for each label of the data, such as {"neg": "NEGATIVE"}. Default: the run's.
        stride: Tokens that neighbouring windows share, where a context is longer than a window (question answering).
            Default: the run's, else 128, and at most half of a window.
        threshold: The probability above which a label is predicted, where a row may have several. Default: the run's.
        dtype: Precision of the computation: "auto", "float32", "float64", "bfloat16" or "float16"; "auto" uses float32
            for half-precision models.
        device: Where to compute, such as "cpu", "cuda" or "cuda:1". Default: a GPU if there is one.
        tokens_per_batch: Tokens in a batch, including padding.
        trust_remote_code: Allow code that comes with the model to run.
        model: The folder or name of the unpruned model, if it was moved or given to the run in Python.
        examples: Rows with a changed prediction to keep, the largest changes first.
        out: The folder to write eval.json, eval.md and CSV tables to. Default: nothing is written.
    """
    keywords = locals()
    given = Settings.of({name: keywords[name] for name in EVALUATING})
    if not isinstance(examples, int) or examples < 0:
        raise GnormError(f"examples must be a whole number, 0 or more, not {examples!r}.")
    pair = load_pair(run, model, trust_remote_code=trust_remote_code)
    given, task = _with_defaults_of_run(given, pair.settings), pair.task
    batches = evaluation_batches(pair.before, pair.tokenizer, task, data, given).to(device_for(given))
    models = [on_device(each, given) for each in (pair.before, pair.after)]
    if not task.tells_agreement or any(batch.labels is None for batch in batches):
        batches = with_predictions(models[0], batches)
    tables = [row_statistics(find_sites(each), batches).numpy() for each in models]
    quality = tested(task, *_with_agreement(task, batches, tables))
    predictions = compared_predictions(task, batches, tables, examples) or {}
    kept = ("classes", "counted", "per_class", "confusion", "changed_count", "changed")
    evaluation = Evaluation(
        *pair.names,
        describe_rows(data, batches),
        quality["rows"],
        _leading(task, pair.settings, batches, quality["quality"]),
        quality["quality"],
        quality["intervals"],
        **{name: predictions[name] for name in kept if name in predictions},
    )
    if out is not None:
        write_evaluation(evaluation, Path(out))
    return evaluation


def _with_defaults_of_run(given: Settings, run: Settings) -> Settings:
    """The settings, with the columns and label map of the run where none are given."""
    changes: dict[str, Any] = {}
    if all(getattr(given, name) is None for name in COLUMNS):
        changes |= {name: getattr(run, name) for name in COLUMNS}
    optional = ("block_length", "label_map", "stride", "threshold")
    changes |= {name: getattr(run, name) for name in optional if getattr(given, name) is None}
    return given.model_copy(update=changes | {"labels": run.labels})


def _leading(task: Task, run: Settings, batches: Batches, quality: Mapping[str, Any]) -> str:
    """The measure that the run follows, if these rows have it; without labels, the agreement."""
    if run.metric in quality:
        return str(run.metric)
    return task.measure(rows=batches).name if LABELS in batches.judged_by else AGREEMENT


def _with_agreement(task: Task, batches: Batches, tables: Sequence[Matrix]) -> tuple[Batches, list[Matrix]]:
    """The rows judged also by the predictions of the unpruned model, if its statistics hold them: no further pass."""
    if PREDICTED in batches.judged_by:
        return batches, list(tables)
    agreeing = [task.agreement_statistics(tables[0], table) for table in tables]
    both = [np.hstack([two, one]) for one, two in zip(agreeing, tables, strict=True) if one is not None]
    if not both:
        return batches, list(tables)
    return replace(batches, judged_by=(LABELS, PREDICTED)), both


def write_evaluation(evaluation: Evaluation, folder: Path) -> None:
    """eval.json, eval.md and the tables as CSV."""
    content = evaluation.to_json()
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / REPORT, content)
        write_text(folder / "eval.md", evaluation_markdown(content))
        for name, text in evaluation_csv(content).items():
            write_text(folder / f"{name}.csv", text)
