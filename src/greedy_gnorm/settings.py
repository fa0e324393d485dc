"""Settings of a run: one definition for Python, YAML files and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from greedy_gnorm.errors import GnormError

MEBIBYTE = 2**20


def _saving(about: str) -> Any:
    return field(default=True, metadata={"about": about})


@dataclass(frozen=True)
class Savings:
    """Which savings are on, and how many bytes may be kept between passes."""

    kept_layers: bool = _saving("layers below a change are not run again")
    first_token: bool = _saving("the last layer computes what the classifier reads, its first token")
    gram: bool = _saving("gradient norms by X X^T where that is cheaper than forming the gradients")
    kept_bytes: int = 0

    @classmethod
    def names(cls) -> list[str]:
        """Those that can be switched."""
        return [saving.name.replace("_", "-") for saving in fields(cls) if saving.metadata]

    @classmethod
    def named(cls, text: str, megabytes: int = 0) -> Savings:
        """`all`, `none`, or the names of those that are on: kept-layers,gram."""
        known = cls.names()
        names = [name.strip() for name in text.split(",")]
        chosen = known if names == ["all"] else [] if names == ["none"] else names
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise GnormError(f"Unknown saving {unknown[0]!r}. Write all, none, or some of: {', '.join(known)}.")
        on = {name.replace("-", "_"): name in chosen for name in known}
        return replace(cls(**on), kept_bytes=megabytes * MEBIBYTE)


DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Settings:
    """Everything a run can be told besides the model, the data and where to write."""

    method: str = _setting("greedy-gnorm", "Which heads go: one of `gnorm methods`.")
    objective: str | None = _setting(None, "What is scored, one of `gnorm methods`; the score's own by default.")
    score_options: str | None = _setting(None, "Options of the score, such as variant=A,eps=1e-5.")
    stop: tuple[str, ...] = _setting(("knee",), "When to stop; several may be given, the first that fires stops.")
    samples: int | None = _setting(512, "Rows to score on, seeded and stratified; 0 means all.")
    eval_samples: int | None = _setting(None, "Rows to evaluate on; 0, the default, means all.")
    seed: int = _setting(0, "Seed of samples, divisions and random scores.")
    text: str | None = _setting(None, "The column of the text; found by name by default.")
    text_pair: str | None = _setting(
        None, "The column of the second text of a pair; found by name unless --text is given."
    )
    label: str | None = _setting(None, "The column of the label; found by name by default.")
    label_map: str | None = _setting(None, "The data's labels as the model's: neg=NEGATIVE,pos=POSITIVE.")
    protect: str | None = _setting(None, "Heads that stay, SITE.HEAD or a whole SITE: 0.3,0.7,11.")
    min_heads: int = _setting(0, "Heads that every site keeps at the least.")
    heads_per_step: int | None = _setting(None, "Heads to remove a step, instead of the method's own number.")
    recompute: int | None = _setting(None, "Score again every so many steps (0: never), instead of the method's own.")
    dtype: str = _setting("auto", f"Precision of the work: {', '.join(DTYPES)}; auto is float32 for half precision.")
    device: str | None = _setting(None, "Where to compute: cpu, cuda, cuda:1; a GPU by default where there is one.")
    device_map: str | None = _setting(
        None, 'Spread a large model over devices: auto, balanced, or JSON such as \'{"": "disk"}\' (needs accelerate).'
    )
    tokens_per_batch: int = _setting(2048, "Tokens in a batch, padding included.")
    cache_memory: int = _setting(2048, "Megabytes for what unchanged layers computed, kept between steps; 0: none.")
    savings: str = _setting("all", f"Exact savings that are on: all, none, or some of {', '.join(Savings.names())}.")
    trust_remote_code: bool = _setting(False, "Allow code that comes with the model to run.")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, list | tuple) or not all(isinstance(part, str) for part in self.stop):
            raise GnormError(f"stop must be a rule or a list of rules, such as 'drop=0.01', not {self.stop!r}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("samples", "eval_samples"):  # 0 means all
            object.__setattr__(self, name, getattr(self, name) or None)
        for setting in fields(self):
            _check_type(setting, getattr(self, setting.name))
        if self.dtype not in DTYPES:
            raise GnormError(f"Unknown dtype {self.dtype!r}. Choose from: {', '.join(DTYPES)}.")
        Savings.named(self.savings)
        for name, least in (
            ("samples", 1),
            ("eval_samples", 1),
            ("tokens_per_batch", 1),
            ("seed", 0),
            ("min_heads", 0),
            ("cache_memory", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**63:
                raise GnormError(f"{name} must be at least {least}{' and below 2**63' * (value > 0)}, not {value}.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from names and values; an unknown name is refused with those that exist."""
        known = [setting.name for setting in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise GnormError(f"Unknown setting {unknown[0]!r}. Settings: {', '.join(known)}.")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Plain values for run.json and YAML."""
        return {**asdict(self), "stop": list(self.stop)}


def _check_type(setting: Field[Any], value: Any) -> None:
    """Refuse a value of the wrong type; annotations are strings here, such as `int | None`."""
    kinds = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": tuple}
    wanted = [kinds[part] for part in str(setting.type).split(" | ") if part != "None"]
    if value is None and "None" in str(setting.type):
        return
    if not isinstance(value, tuple(wanted)) or (isinstance(value, bool) and bool not in wanted):
        raise GnormError(f"{setting.name} must be {setting.type}, not {value!r} ({type(value).__name__}).")


def read_yaml(path: Path) -> dict[str, Any]:
    """The names and values of a YAML file, hyphens in names read as underscores; safe loading only."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GnormError(f"Can't read {path}: {error}") from error
    if not isinstance(content, dict):
        raise GnormError(f"{path} must hold names and values, such as `method: greedy-gnorm`.")
    settings = {str(name).replace("-", "_"): value for name, value in content.items()}
    if "protect" in settings and not isinstance(settings["protect"], str):
        raise GnormError(f"{path}: put protect in quotes ('0.10'), or YAML reads it as a number.")
    return settings
