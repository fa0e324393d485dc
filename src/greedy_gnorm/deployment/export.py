"""ONNX: a pruned model for runtimes without torch, checked against torch before it is kept."""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from greedy_gnorm.data.batches import Batches
from greedy_gnorm.data.loading import evaluation_batches
from greedy_gnorm.data.rows import PIXELS
from greedy_gnorm.data.sets import EVALUATION, TEST
from greedy_gnorm.deployment.speed import timed
from greedy_gnorm.errors import DataError, GnormError, RunFolderError, UnsupportedModel
from greedy_gnorm.model.checkpoint import load, load_tokenizer
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.model.padding import set_padding
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.model.sizes import parameter_count
from greedy_gnorm.model.surgery import fill_empty_sites
from greedy_gnorm.passes.evaluation import evaluate, with_predictions
from greedy_gnorm.passes.speed import Inputs, Runner, possible, random_inputs, torch_runner
from greedy_gnorm.phases import phase
from greedy_gnorm.pruning.prepare import load_sets
from greedy_gnorm.records.files import replace_folder, write_json, writing_to
from greedy_gnorm.records.header import sources_of
from greedy_gnorm.records.journal import RUN_FILE, Journal
from greedy_gnorm.settings import Settings
from greedy_gnorm.tasks.task import Task, task_of

CHECKED = ((1, 5), (3, 17), (2, 33))
"""Rows and tokens of the batches that an export is checked on; every row but the first ends in padding."""
TOLERANCE = 1e-4
ONE_FILE = 1_500_000_000
"""Bytes above which weights are stored beside the graph: a single ONNX file ends at 2 GB."""
REPORT = "export.json"


@dataclass(frozen=True)
class Exported:
    """Where the files are, and what was measured."""

    folder: Path
    report: dict[str, Any]


def export(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    int8: bool = False,
    data: str | None = None,
    tolerance: float = TOLERANCE,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the model of a run, or of a model folder, as ONNX (and in 8 bits), compared with torch.

    The quality in 8 bits is measured on the run's own evaluation rows, or on `data`, read with the run's settings.
    """
    check_installed()
    folder = Path(folder)
    journal = Journal.read(folder) if (folder / RUN_FILE).exists() else None
    source = folder / "model" if journal is not None else folder
    with phase("Loading the model"):
        model = load(source, dtype=torch.float32, trust_remote_code=trust_remote_code)
        if output_names(model) and model.config.pad_token_id is None and image_tokens(model.config) is None:
            # Decoders find the last token of a row by the one that fills it up
            set_padding(model, load_tokenizer(source, trust_remote_code=trust_remote_code))
    rows = _evaluation_rows(model, source, journal, data) if int8 else None
    target = Path(out) if out is not None else folder / "onnx"
    if target.exists() and not (target / REPORT).exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} is not empty and holds no earlier export: choose another folder.")
    with writing_to(target), replace_folder(target) as partial:
        report = _write(model, partial, tolerance)
        if rows is not None:
            report["int8"] = _quantised(model, partial, rows)
        write_json(partial / REPORT, report)
    return Exported(target, report)


def missing_packages() -> list[str]:
    """The packages that ONNX needs and that are not installed."""
    return [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]


def check_installed() -> None:
    """Refuse to go on without the packages that ONNX needs."""
    if missing := missing_packages():
        raise GnormError(f"ONNX needs {', '.join(missing)}: pip install 'greedy-gnorm[onnx]'.")


def _write(model: Any, folder: Path, tolerance: float) -> dict[str, Any]:
    path = folder / "model.onnx"
    with torch.inference_mode():
        if not all(torch.isfinite(each).all() for each in _named_outputs(model, _inputs(model, *CHECKED[-1]))):
            raise GnormError("The model's outputs are NaN or infinite. Are all of its weights finite?")
    with phase("Writing ONNX"):
        to_onnx(model, path)
    runner = onnx_runner(path)
    difference = largest_difference(model, runner)
    if not difference <= tolerance:
        raise GnormError(
            f"The ONNX model's outputs differ from torch by {difference:.2e}, more than {tolerance:.0e}: the model "
            f"was not kept. Use a larger --tolerance to accept it."
        )
    return {
        "file": path.name,
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "largest difference to torch": difference,
        "latency": _latencies(model, runner),
    }


def to_onnx(model: Any, path: Path) -> None:
    """Export with a dynamic number of rows and tokens; images have one size."""
    shown = copy.deepcopy(model).eval()
    fill_empty_sites(shown)  # runtimes refuse to reshape the empty tensors of a layer without heads
    inputs, outputs = _inputs(model, 3, 17), output_names(model)
    dynamic = {
        name: dict.fromkeys(range(1 if name == PIXELS else each.ndim), torch.export.Dim.DYNAMIC)
        for name, each in inputs.items()
    }
    with _quiet():
        torch.onnx.export(
            _Outputs(shown, outputs),
            (),
            path,
            kwargs=dict(inputs),
            dynamo=True,
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=dynamic,
            external_data=4 * parameter_count(model) > ONE_FILE,
            verbose=False,
        )


def output_names(model: nn.Module) -> list[str]:
    """The outputs of an exported model; refuses models that can't be exported."""
    task = task_of(model)
    if not task.output_names:
        raise UnsupportedModel(
            f"{type(model).__name__} can't be exported to ONNX ({task.name}): to generate text it needs a cache, "
            f"which this export does not write."
        )
    return list(task.output_names)


class _Outputs(nn.Module):
    """The model as a function from tokens or images to its named outputs."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        given = {name: value for name, value in locals().items() if isinstance(value, Tensor)}
        outputs = self.model(**given)
        return tuple(getattr(outputs, name) for name in self.names)


def _named_outputs(model: Any, inputs: Inputs) -> list[Tensor]:
    outputs = model(**inputs)
    return [getattr(outputs, name) for name in output_names(model)]


def onnx_runner(path: Path) -> Runner:
    """An ONNX file as a function of a batch, with as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}

    def run(inputs: Inputs) -> SimpleNamespace:
        given = {name: tensor.cpu().numpy() for name, tensor in inputs.items() if name in names}
        outputs = zip(session.get_outputs(), session.run(None, given), strict=True)
        return SimpleNamespace(**{output.name: torch.from_numpy(array) for output, array in outputs})

    return run


def largest_difference(model: Any, runner: Runner) -> float:
    """Between the outputs of torch and of another runtime, on batches of several shapes with padding."""
    largest = 0.0
    with torch.inference_mode():
        for rows, tokens in CHECKED:
            inputs = _inputs(model, rows, tokens)
            theirs: Any = runner(inputs)
            for name, ours in zip(output_names(model), _named_outputs(model, inputs), strict=True):
                apart = (ours - getattr(theirs, name)).abs().nan_to_num(nan=torch.inf)
                largest = max(largest, float(apart.max()))
    return largest


def _inputs(model: Any, rows: int, tokens: int) -> Inputs:
    """Random tokens, every row but the first shorter than the batch; images are never shorter."""
    inputs = random_inputs(model, rows, tokens, choices=2)
    for row in range(1, rows if "attention_mask" in inputs else 1):
        inputs["attention_mask"][row, ..., tokens - row - 1 :] = 0
    return inputs


def _latencies(model: Any, runner: Runner) -> list[dict[str, Any]]:
    """This model in torch (before) and in onnxruntime (after)."""
    with torch.inference_mode():
        return [
            timed("torch, then onnxruntime", torch_runner(model), runner, _inputs(model, *shape), shape).to_json()
            for shape in possible(model)
        ]


def _quantised(model: Any, folder: Path, rows: Batches) -> dict[str, Any]:
    """Write weights in 8 bits, and measure the quality on the evaluation rows in full precision and in 8 bits."""
    whole, small = folder / "model.onnx", folder / "model.int8.onnx"
    to_int8(whole, small)
    task = task_of(model)
    return {
        "file": small.name,
        "bytes": small.stat().st_size,
        "rows": rows.data_rows,
        "quality": {
            "torch": evaluate(find_sites(model), rows)[task.quality],
            "onnx": _quality(onnx_runner(whole), rows, task),
            "int8": _quality(onnx_runner(small), rows, task),
        },
        "latency": [
            timed(
                "onnxruntime, then int8", onnx_runner(whole), onnx_runner(small), _inputs(model, *shape), shape
            ).to_json()
            for shape in possible(model)
        ],
    }


def to_int8(whole: Path, small: Path) -> None:
    """Write an ONNX file with weights in 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(whole)
    del graph.graph.value_info[:]  # the quantiser transposes weights and infers their shapes itself
    with _quiet():
        quantize_dynamic(graph, small, weight_type=QuantType.QInt8)


def _quality(runner: Runner, rows: Batches, task: Task) -> float:
    def model(**inputs: Tensor) -> Any:
        return runner(inputs)

    tables, as_model = [], cast(nn.Module, model)
    for batch in rows:
        assert batch.labels is not None
        outputs = task.outputs(as_model, batch)
        tables.append(task.row_statistics(outputs.double(), batch.labels, batch))
    order = np.argsort([row for batch in rows for row in batch.rows])
    return task.measures(task.combined(torch.cat(tables).numpy()[order]))[task.quality]


def _evaluation_rows(model: Any, source: Path, journal: Journal | None, data: str | None) -> Batches:
    """The rows that the run was evaluated on, or those of the data that the user names."""
    tokenizer, task = load_tokenizer(source, config=model.config), task_of(model)
    set_padding(model, tokenizer)
    settings = Settings() if journal is None else Settings.of(journal.header["config"])
    if data is not None:
        rows = evaluation_batches(model, tokenizer, task, data, settings.model_copy(update={"eval_samples": None}))
        return with_predictions(model, rows) if task.own_labels else rows
    if journal is None:
        raise DataError("Quality in 8 bits needs labelled rows: give them with --data.")
    described, sources = journal.header["data"], sources_of(journal.header)
    sets = load_sets(model, tokenizer, *sources, settings)
    use = TEST if TEST in sets else EVALUATION
    if sets[use].fingerprint != described[use]["fingerprint"]:
        raise DataError(
            f"{described[use]['source']} has changed since the run was evaluated on it: give rows with --data."
        )
    if task.own_labels:
        return with_predictions(model, sets[use])
    if any(batch.labels is None for batch in sets[use]):
        raise DataError("Quality in 8 bits needs labelled rows, and this run had none: give them with --data.")
    return sets[use]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log and warnings, and take back the handlers it adds; its errors are exceptions."""
    before, handlers = logging.root.manager.disable, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers
