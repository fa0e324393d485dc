"""Settings of a run: one definition for Python, YAML files and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from greedy_gnorm.errors import GnormError
from greedy_gnorm.registry import suggestion

MEBIBYTE = 2**20


def _saving(about: str) -> Any:
    return field(default=True, metadata={"about": about})


@dataclass(frozen=True)
class Savings:
    """Which savings are on, how many bytes the layers of passes may take, and whether passes are kept for the next."""

    kept_layers: bool = _saving("layers below a change, and parts of a layer that were fitted, are not run again")
    first_token: bool = _saving("the last layer computes what the classifier reads, its first token")
    gram: bool = _saving("gradient norms by X X^T where that is cheaper than forming the gradients")
    kept_bytes: int = 0
    between_steps: bool = True

    @classmethod
    def names(cls) -> list[str]:
        """Those that can be switched."""
        return [saving.name.replace("_", "-") for saving in fields(cls) if saving.metadata]

    @classmethod
    def named(cls, chosen: str | Sequence[str], megabytes: int = 0) -> Savings:
        """`all`, `none`, or a list of the names of those that are on."""
        known = cls.names()
        names = known if chosen == "all" else [] if chosen == "none" else chosen
        unknown = [name for name in names if name not in known]
        if unknown:
            raise GnormError(f"Unknown saving {unknown[0]!r}. Use 'all', 'none', or a list of: {', '.join(known)}.")
        return cls(**{name.replace("-", "_"): name in names for name in known}, kept_bytes=megabytes * MEBIBYTE)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _as_dict(value: Any) -> Any:
    """An empty mapping sets nothing."""
    return (dict(value) or None) if isinstance(value, Mapping) else value


def _one_as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _none_as_empty(value: Any) -> Any:
    return () if value is None else _as_tuple(value)


def _zero_as_all(value: Any) -> Any:
    return None if type(value) is int and value == 0 else value


def _numbers_as_text(value: Any) -> Any:
    """Labels are often numbers; they are compared as they are written."""

    def text(label: Any) -> Any:
        return str(label) if isinstance(label, int) and not isinstance(label, bool) else label

    return {text(ours): text(theirs) for ours, theirs in value.items()} if isinstance(value, Mapping) else value


def parse_number(text: str) -> float:
    """A number, or a percentage: `1%` is 0.01. Raises ValueError if the text is neither."""
    number = text.strip()
    try:
        return float(f"{number[:-1]}e-2") if number.endswith("%") else float(number)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number nor a percentage") from None


def _percentage_as_number(value: Any) -> Any:
    return parse_number(value) if isinstance(value, str) and value.strip().endswith("%") else value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _check_places(value: Any) -> Any:
    """JSON is read by the command line only; on the meta device there are no weights."""
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    if is_json or (isinstance(value, Mapping) and (not value or "meta" in value.values())):
        raise ValueError
    return dict(value) if isinstance(value, Mapping) else value


def _one_saving_as_tuple(value: Any) -> Any:
    return value if value in ("all", "none") else _one_as_tuple(value)


def _check_savings(value: Any) -> Any:
    Savings.named(value)
    return value


Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Rows = Annotated[Positive | None, BeforeValidator(_zero_as_all)]
LayerHead = Annotated[tuple[Count, Count], BeforeValidator(_as_tuple)]
Number = Annotated[FiniteFloat, BeforeValidator(_percentage_as_number)]
Fraction = Annotated[Number, Field(gt=0, lt=1)]
Amount = Annotated[str, BeforeValidator(_number_as_text)]
Shape = Annotated[str, Field(pattern=r"^[1-9]\d{0,5}(x[1-9]\d{0,5})?$")]
UNITS, SHARE = "'heads', 'ffn' or 'both'", "a share between 0 and 1, such as 0.5"
Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]


def _setting(default: Any, description: str, expected: str | None = None) -> Any:
    """A field; `expected` says what a value must be, where the type alone does not."""
    return Field(default, description=description, json_schema_extra={"expected": expected})


class Settings(BaseModel):
    """Everything that can be set for a run besides the model, the data and where to write."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    method: str = _setting("greedy-gnorm", "How heads are chosen; `gnorm methods` lists the methods.")
    stop: Annotated[tuple[str, ...], BeforeValidator(_one_as_tuple)] = _setting(
        ("drop=0.01",),
        "When to stop; several rules may be given, and the first that fires stops the run.",
        "a rule or a list of rules, such as 'drop=0.01' or ['drop=0.01', 'heads=5']",
    )
    metric: str | None = _setting(
        None,
        "The measure that rules, curves and choices use, such as accuracy, macro_f1, f1, mcc or loss. Default: the "
        "task's own.",
    )
    objective: str | None = _setting(
        None, "The quantity that scores differentiate; `gnorm methods` lists them. Default: the score's own."
    )
    score_options: Annotated[dict[str, bool | int | FiniteFloat | str] | None, BeforeValidator(_as_dict)] = _setting(
        None,
        "Options of the score; `gnorm methods` lists them.",
        "a dict of names and values, such as {'variant': 'A', 'eps': 1e-05}",
    )
    samples: Rows = _setting(512, "Rows to score on, a seeded and stratified sample; 0 means all.")
    eval_samples: Rows = _setting(None, "Rows to evaluate on; 0, the default, means all.")
    seed: Count = _setting(
        0, "Seed of the samples, of the split into scoring and evaluation rows and of random scores."
    )
    text: str | None = _setting(None, "The text column. Default: found by name.")
    text_pair: str | None = _setting(
        None, "The column of the second text of a pair. Default: found by name, unless the text column is given."
    )
    label: str | None = _setting(None, "The label column. Default: found by name.")
    block_length: Annotated[int, Field(ge=2, lt=2**63)] | None = _setting(
        None,
        "Tokens in a row of a language model, whose text is cut into blocks. Default: 512, or fewer if the model takes "
        "fewer.",
        "a whole number, 2 or more",
    )
    label_map: Annotated[dict[str, str] | None, BeforeValidator(_as_dict), BeforeValidator(_numbers_as_text)] = (
        _setting(
            None,
            "The model's label for each label of the data.",
            "a dict from the data's labels to the model's, such as {'neg': 'NEGATIVE', 'pos': 'POSITIVE'}",
        )
    )
    threshold: Fraction | None = _setting(
        None,
        "The probability above which a label is predicted, where a row may have several. Default: 0.5.",
        SHARE,
    )
    protect: Annotated[tuple[LayerHead | Count, ...], BeforeValidator(_none_as_empty)] = _setting(
        (),
        "Heads to keep: (layer, head) pairs, or a layer's number for all of its heads.",
        "a list of (layer, head) pairs and layers, such as [(0, 3), 11]",
    )
    min_heads: Count = _setting(0, "Heads to keep in every layer at least.")
    heads_per_step: Positive | None = _setting(None, "Heads to remove in each step. Default: the method's own number.")
    recompute: Count | None = _setting(
        None, "Steps from one scoring to the next; 0 scores only once. Default: the method's own number."
    )
    look_ahead: Positive | None = _setting(
        None,
        "Heads to remove on trial in each step: of so many that are next by their scores, the one is removed whose "
        "removal keeps the outputs closest to the unpruned model's. Default: the method's own number, mostly none.",
        "a whole number, 1 or more",
    )
    group_queries: Literal["whole", "each"] | None = _setting(
        None,
        "What a head is where several query heads share a key and a value: such a group (whole), or one query head of "
        "each group of the layer (each). Default: whole, or as the model was pruned before.",
        "'whole' or 'each'",
    )
    units: Literal["heads", "ffn", "both"] | None = _setting(
        None, "What is removed: heads, feed-forward neurons (ffn) or both. Default: the method's own.", UNITS
    )
    recover: Literal["none", "least-squares", "gates", "mean", "distill"] | None = _setting(
        None,
        "How quality is recovered after units are removed: by fitting the linear maps of layers and the classifier "
        "(least-squares), also by training the chosen model towards the unpruned one at the end (distill), by one "
        "factor for each unit (gates), by the mean outputs of removed units in biases (mean), or none. Default: the "
        "method's own.",
        "'none', 'least-squares', 'gates', 'mean' or 'distill'",
    )
    recover_steps: Positive = _setting(300, "Steps of training, with --recover distill.")
    labels: Literal["data", "own"] = _setting(
        "data",
        "Labels to score with: those of the data, or the model's own (own), drawn from its predictions, so that text "
        "without labels is enough.",
        "'data' or 'own'",
    )
    stride: Count | None = _setting(
        None,
        "Tokens that neighbouring windows share, where a context is longer than a window (question answering). "
        "Default: 128, and at most half of a window.",
        "a whole number, 0 or more",
    )
    calibration_tokens: Positive = _setting(65536, "Tokens of the rows that layers are fitted on.")
    macs: Fraction | None = _setting(
        None, "Multiplications to keep at most, as a share of the unpruned model's.", SHARE
    )
    speedup: Annotated[FiniteFloat, Field(gt=1)] | None = _setting(
        None, "How many times faster the model should be, by times measured on this machine.", "a number above 1"
    )
    latency: Amount | None = _setting(
        None, "Milliseconds that a batch may take, by times measured on this machine.", "a time such as '10ms'"
    )
    params: Amount | None = _setting(
        None, "Parameters to keep at most: a share such as 0.6, or a number such as 80M.", "a share or a number"
    )
    size: Amount | None = _setting(
        None, "Size of the stored weights at most, such as 30MB; a MB has 2^20 bytes.", "a size such as '30MB'"
    )
    max_drop: Annotated[Number, Field(ge=0)] | None = _setting(
        None,
        "Quality to lose at most (0.01 is one point of accuracy). Default: 0.01 if no target is given.",
        "a number, 0 or more",
    )
    rounds: Positive = _setting(20, "Rounds of removing, fitting and scoring again.")
    points: Positive | None = _setting(
        None,
        "Points of the curve at which quality is measured, besides those that the tables show. Default: after each "
        "head.",
        "a whole number, 1 or more",
    )
    swap: bool | None = _setting(
        None,
        "Exchange the units of a round for others of their layer while that lowers the estimated loss. Default: as the "
        "method does.",
        "true or false",
    )
    uniform: bool = _setting(False, "Keep the same number of units in every layer.")
    multiple_of: Positive | None = _setting(
        None,
        "Keep a multiple of this number of neurons in a layer. Default: 16 in layers of 512 neurons or more, else 1.",
        "a whole number",
    )
    shape: Shape | None = _setting(
        None,
        "Rows x tokens of the batch that multiplications and times are stated for. Default: the lengths of the data.",
        "rows x tokens, such as '8x128', or rows alone, such as '8'",
    )
    dtype: Dtype = _setting("auto", "Precision of the computation; auto uses float32 for half-precision models.")
    device: str | None = _setting(None, "Where to compute: cpu, cuda, cuda:1. Default: a GPU if there is one.")
    device_map: Annotated[str | dict[str, int | str] | None, BeforeValidator(_check_places)] = _setting(
        None,
        "How to spread a large model over devices: auto, balanced, or a place for each module (requires accelerate).",
        "'auto', 'balanced', or a dict that gives every module a place (a GPU's number, 'cpu' or 'disk'), such as "
        "{'': 'disk'}",
    )
    tokens_per_batch: Positive = _setting(2048, "Tokens in a batch, including padding.")
    cache_memory: Count = _setting(
        2048, "Megabytes for outputs of unchanged layers, kept between steps; 0 keeps nothing."
    )
    savings: Annotated[str | tuple[str, ...], BeforeValidator(_one_saving_as_tuple), AfterValidator(_check_savings)] = (
        _setting(
            "all",
            f"Exact savings to use: all, none, or some of {', '.join(Savings.names())}.",
            f"'all', 'none' or a list of names ({', '.join(Savings.names())})",
        )
    )
    trust_remote_code: bool = _setting(False, "Allow code that comes with the model to run.")
    examples: bool = _setting(True, "Keep the texts of rows whose prediction changed in the files of the run.")

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise GnormError(_message(error, given)) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from names and values; an unknown name is refused with those that exist."""
        return cls(**given)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some settings changed; they are checked, which pydantic's own copy does not do."""
        return type(self)(**{**dict(self), **(update or {})})

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json and YAML."""
        return self.model_dump(mode="json")


SETTINGS = tuple(Settings.model_fields)
"""The names of all settings, in the order of every signature, help text and record."""
TARGETS = ("macs", "speedup", "latency", "params", "size")
"""The settings that say how small or fast the result of `compress` should be."""
_ONLY_COMPRESSING = (*TARGETS, "max_drop", "rounds", "swap", "uniform", "multiple_of", "shape", "units")
_ONLY_COMPARING = ("points",)
PRUNING = tuple(name for name in SETTINGS if name not in (*_ONLY_COMPRESSING, *_ONLY_COMPARING))
"""The settings of `prune`."""
_ONLY_PRUNING = ("stop", "heads_per_step", "recompute", "look_ahead", "device_map")
COMPRESSING = tuple(name for name in SETTINGS if name not in (*_ONLY_PRUNING, *_ONLY_COMPARING))
"""The settings of `compress`."""
_NOT_FOR_SCORING = (
    "method", "stop", "metric", "eval_samples", "protect", "min_heads", "heads_per_step", "recompute", "look_ahead",
    "cache_memory",
    "recover", "recover_steps", "calibration_tokens", "examples",
)  # fmt: skip
SCORING = tuple(name for name in (*PRUNING, "units") if name not in _NOT_FOR_SCORING)
"""The settings of `score`."""
_NOT_FOR_COMPARING = ("method", "stop", "look_ahead", "device_map", "recover_steps", "examples")
COMPARING = tuple(name for name in (*PRUNING, "rounds", *_ONLY_COMPARING) if name not in _NOT_FOR_COMPARING)
"""The settings of `compare`, which walks several methods to the end on copies of a model that fits one device."""
EVALUATING = (
    "eval_samples", "seed", "text", "text_pair", "label", "block_length", "label_map", "stride", "threshold", "dtype",
    "device",
    "tokens_per_batch", "trust_remote_code",
)  # fmt: skip
"""The settings of `evaluate`."""
DTYPES = get_args(Dtype)


def _message(error: ValidationError, given: Mapping[str, Any]) -> str:
    """The first fault of a validation in one line: the setting, what was expected and what was given."""
    unknown = sorted(set(given) - set(SETTINGS))
    if unknown:
        hint = suggestion(unknown[0], SETTINGS)
        return f"Unknown setting {unknown[0]!r}.{hint} Settings: {', '.join(SETTINGS)}."
    fault = error.errors(include_url=False)[0]
    name = str(fault["loc"][0])
    value = given[name]
    about: Any = Settings.model_fields[name].json_schema_extra
    expected = about["expected"] or (
        str(fault["msg"]).removeprefix("Input should be ").replace("greater than or equal to", "at least")
    )
    return f"{name} must be {expected}, not {value!r:.100} ({type(value).__name__})."
