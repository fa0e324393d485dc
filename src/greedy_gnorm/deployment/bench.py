"""The speed of the unpruned and the pruned model in several runtimes, for several batches and numbers of threads."""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greedy_gnorm.data.encoding import longest_sentence
from greedy_gnorm.deployment.export import check_installed, missing_packages, onnx_runner, to_int8, to_onnx
from greedy_gnorm.deployment.pair import Pair, load_pair
from greedy_gnorm.deployment.speed import timed
from greedy_gnorm.errors import GnormError
from greedy_gnorm.model.families import image_tokens
from greedy_gnorm.model.modes import convert, evaluating
from greedy_gnorm.passes.speed import Runner, multiplications, possible, random_inputs, torch_runner
from greedy_gnorm.pruning.run import Run
from greedy_gnorm.records.files import write_json, write_text, writing_to
from greedy_gnorm.report import figures
from greedy_gnorm.report.bench import bench_csv, bench_figure, bench_markdown
from greedy_gnorm.report.names import folder_name
from greedy_gnorm.units import Latency

log = logging.getLogger("greedy_gnorm")

TORCH, ONNX, INT8 = RUNTIMES = ("torch", "onnxruntime", "int8")
"""torch, ONNX in full precision, and ONNX with weights in 8 bits; the latter two run in onnxruntime."""
BATCHES, TOKENS = (1, 8, 32), (32, 128)


@dataclass(frozen=True, repr=False)
class Bench:
    """The times of both models. `left_out` says what was not measured, `folder` where the files are."""

    unpruned: str
    pruned: str
    latencies: Sequence[Latency]
    left_out: Sequence[str] = ()
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, as in bench.json."""
        return {
            "unpruned": self.unpruned,
            "pruned": self.pruned,
            "latency": [latency.to_json() for latency in self.latencies],
            "left_out": list(self.left_out),
        }

    def __repr__(self) -> str:
        speeds = [latency.speed_up for latency in self.latencies]
        runtimes = ", ".join(dict.fromkeys(latency.runtime for latency in self.latencies))
        between = f"{min(speeds):.2f} to {max(speeds):.2f} times as fast"
        return f"Bench({len(speeds)} measurement{'s' if len(speeds) > 1 else ''} in {runtimes}: {between})"


def bench(
    run: Run | str | Path,
    *,
    batches: Sequence[int] = BATCHES,
    tokens: Sequence[int] = TOKENS,
    runtimes: Sequence[str] | None = None,
    threads: Sequence[int] | None = None,
    seconds: float = 1.0,
    model: str | Path | None = None,
    out: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Bench:
    """Time the unpruned and the pruned model of a run, in turn, on the CPU and in float32 (or 8 bits).

    Args:
        run: A run, its folder, or the `model` folder in it.
        batches: Rows in a batch.
        tokens: Tokens in a row; lengths that the model does not accept are left out. All images have as many.
        runtimes: Any of "torch", "onnxruntime" and "int8" (onnxruntime with weights in 8 bits). Default: those that are
            installed.
        threads: Numbers of threads. Default: as many as torch uses.
        seconds: Time for each measurement, in which each model runs 5 to 50 times.
        model: The folder or name of the unpruned model, if it was moved or given to the run in Python.
        out: The folder to write bench.json, bench.csv, bench.md and the figure to. Default: `bench` in the run's
            folder, or nothing for a run in Python.
        trust_remote_code: Allow code that comes with the model to run.
    """
    counts = {"batches": batches, "tokens": tokens, "threads": threads or (torch.get_num_threads(),)}
    for name, values in counts.items():
        _check_counts(name, values)
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise GnormError(f"seconds must be a number above 0, not {seconds!r}.")
    chosen, left_out = _available(runtimes)
    pair = load_pair(run, model, trust_remote_code=trust_remote_code)
    if runtimes is None and not pair.task.output_names:
        chosen, left_out = [TORCH], [f"onnxruntime and int8: not for this model ({pair.task.name})."]
    shapes = [(rows, length) for length in counts["tokens"] for rows in counts["batches"]]
    fitting = possible(pair.before, shapes)
    most = longest_sentence(pair.before)
    if not fitting:
        raise GnormError(f"The model accepts at most {most} tokens: give smaller numbers of tokens.")
    if image_tokens(pair.before.config) is None:
        too_long = [length for length in counts["tokens"] if length > most]
        left_out += [f"{length} tokens: the model accepts at most {most}." for length in too_long]
    latencies = list(_measured(pair, fitting, chosen, counts["threads"], seconds))
    folder = Path(out) if out is not None else pair.folder and pair.folder / "bench"
    result = Bench(*pair.names, latencies, left_out, folder)
    if folder is not None:
        write_bench(result, folder)
    return result


def _check_counts(name: str, values: Any) -> None:
    if (
        not isinstance(values, Sequence)
        or not values
        or not all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)
    ):
        raise GnormError(f"{name} must be a list of whole numbers above 0, such as [1, 8], not {values!r}.")


def _available(runtimes: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The runtimes to use, and what is left out because it is not installed; one that is asked for must be there."""
    if runtimes is None:
        if missing := missing_packages():
            return [TORCH], [f"onnxruntime and int8: pip install 'greedy-gnorm[onnx]' ({', '.join(missing)})."]
        return list(RUNTIMES), []
    names = [runtimes] if isinstance(runtimes, str) else list(runtimes)
    unknown = [name for name in names if name not in RUNTIMES]
    if unknown or not names:
        raise GnormError(f"Unknown runtime {', '.join(unknown)!r}. Choose from: {', '.join(RUNTIMES)}.")
    if set(names) - {TORCH}:
        check_installed()
    return list(dict.fromkeys(names)), []


def _measured(
    pair: Pair, shapes: Sequence[tuple[int, int]], runtimes: Sequence[str], threads: Sequence[int], seconds: float
) -> Iterator[Latency]:
    models = [
        convert(copy.deepcopy(model), torch.device("cpu"), torch.float32).eval() for model in (pair.before, pair.after)
    ]
    promised = {
        length: multiplications(models[0], length) / multiplications(models[1], length)
        for length in dict.fromkeys(length for _, length in shapes)
    }
    with tempfile.TemporaryDirectory(prefix="gnorm-bench-") as temporary:
        files = _exported(models, Path(temporary), runtimes)
        for count in threads:
            with _threads(count), evaluating(models[0]), evaluating(models[1]), torch.inference_mode():
                for runtime in runtimes:
                    first, second = _runners(runtime, models, files)
                    for rows, length in shapes:
                        inputs = random_inputs(models[0], rows, length)
                        latency = timed(
                            runtime, first, second, inputs, (rows, length), seconds=seconds, promised=promised[length]
                        )
                        times = latency.before_ms, latency.after_ms
                        place = runtime, rows, length, count
                        log.info("%s, %d x %d tokens, threads: %d: %.1f ms before, %.1f ms after", *place, *times)
                        yield latency


def _exported(models: Sequence[Any], folder: Path, runtimes: Sequence[str]) -> dict[str, list[Path]]:
    """The ONNX files of both models by runtime."""
    if not set(runtimes) - {TORCH}:
        return {}
    files = {runtime: [folder / f"{side}-{runtime}.onnx" for side in range(2)] for runtime in (ONNX, INT8)}
    for model, whole, small in zip(models, files[ONNX], files[INT8], strict=True):
        log.info("exporting the %s model to ONNX", "unpruned" if model is models[0] else "pruned")
        to_onnx(model, whole)
        if INT8 in runtimes:
            to_int8(whole, small)
    return files


def _runners(runtime: str, models: Sequence[Any], files: dict[str, list[Path]]) -> list[Runner]:
    if runtime == TORCH:
        return [torch_runner(model) for model in models]
    return [onnx_runner(path) for path in files[runtime]]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch, and the runtimes that follow it, use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_bench(result: Bench, folder: Path) -> None:
    """bench.json, the table as CSV and Markdown, and the figure."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "bench.json", result.to_json())
        write_text(folder / "bench.csv", bench_csv(result.latencies))
        write_text(folder / "bench.md", bench_markdown(result.latencies, result.left_out))
        about = f"{folder_name(result.pruned)} beside {folder_name(result.unpruned)}"
        figures.save(bench_figure(result.latencies), folder / "bench", about)
