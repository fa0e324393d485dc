"""Options of the command line, made from the settings, and the YAML files that can hold them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.rules import forms
from greedy_gnorm.records import compact
from greedy_gnorm.settings import DTYPES, Settings, parse_number

HINTS = get_type_hints(Settings)
"""The types of all settings."""


def with_settings(names: Sequence[str], **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; it receives them together, checked, as a dict.

    `defaults` are those that this command has instead of the usual ones.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            part for part in inspect.signature(command, eval_str=True).parameters.values() if part.name != "settings"
        ]
        options = [_option(name, defaults.get(name, Settings.model_fields[name].default)) for name in names]

        def wrapper(**given: Any) -> None:
            checked = Settings.of({name: given.pop(name) for name in names})
            command(settings={name: getattr(checked, name) for name in names}, **given)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {part.name: part.annotation for part in [*own, *options]}
        return wrapper

    return decorate


def _option(name: str, default: Any) -> inspect.Parameter:
    """The option of a setting; lists and dicts are written in their compact form."""
    about = str(Settings.model_fields[name].description)
    if name in compact.FORMS:
        about = f"{about} Example: {compact.EXAMPLES[name]}."
        kind: Any = Annotated[
            Any, typer.Option(help=about, metavar="TEXT", parser=_reader(name), show_default=bool(default))
        ]
        default = default or None
    elif name == "stop":
        kind, default = Annotated[list[str], typer.Option(help=f"{about} Rules: {forms()}.")], list(default)
    else:
        about += f" One of {', '.join(DTYPES)}." if name == "dtype" else ""
        hint = HINTS[name]
        if str in get_args(hint) or any(get_origin(each) is Literal for each in (hint, *get_args(hint))):
            hint = str if default is not None else str | None  # checked with the other settings
        reader: dict[str, Any] = (
            {"parser": parse_number, "metavar": "NUMBER"} if float in (hint, *get_args(hint)) else {}
        )
        kind = Annotated[hint, typer.Option(help=about, **reader)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _reader(name: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        return compact.parse(name, value) if isinstance(value, str) else value  # a YAML file has lists and dicts

    return read


class _Loader(yaml.SafeLoader):
    """Safe loading that reads 1e-5 as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The names and values of a YAML file, underscores in names read as hyphens."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise GnormError(f"Can't read {path}: {error}") from error
    if not isinstance(content, dict):
        raise GnormError(f"{path} must hold names and values, such as `method: greedy-gnorm`.")
    return {str(name).replace("_", "-"): value for name, value in content.items()}


def typed_names(command: Any) -> dict[str, Any]:
    """The parameters of a command that a YAML file can set, by the name that a user types, without hyphens in front."""
    named = {_typed_name(parameter): parameter for parameter in command.params}
    return {name: parameter for name, parameter in sorted(named.items()) if name not in ("config", "help")}


def _typed_name(parameter: Any) -> str:
    longest: str = max(parameter.opts, key=len)
    return longest.lstrip("-").replace("_", "-")


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of this command from a YAML file."""
    if path is not None:
        content, known = read_yaml(path), typed_names(context.command)
        unknown = sorted(set(content) - set(known))
        if unknown:
            raise GnormError(f"{path}: unknown setting {unknown[0]!r}. Settings: {', '.join(known)}.")
        context.default_map = {
            str(known[name].name): _value(f"{path}: {name}", value, known[name]) for name, value in content.items()
        }
    return path


def _value(place: str, value: Any, parameter: Any) -> Any:
    """A value of the file as its option takes it: a list or a dict where it can be one, else what a user would type."""
    if value is None or parameter.name in (*compact.FORMS, "methods"):
        return value
    if parameter.name == "stop":
        return _names(place, value)
    if isinstance(value, list | dict):
        raise GnormError(f"{place} must be one value, not {value!r:.100}.")
    return str(value)


def _names(place: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise GnormError(f"{place} must be a name or a list of names, not {value!r:.100}.")
    return names


def read_methods(value: Any) -> list[str]:
    """`a,b,c`, or a list from a YAML file."""
    return value.split(",") if isinstance(value, str) else _names("methods", value)


def counts(about: str) -> Any:
    """An option of whole numbers above 0, separated by commas."""
    return typer.Option(parser=_read_counts, metavar="N,N,...", help=about)


def _read_counts(value: str) -> list[int]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GnormError(f"{value!r} must be whole numbers above 0, separated by commas, such as 1,8.")
    return [int(part) for part in parts]


def _read_runtimes(value: str) -> list[str]:
    return [part.strip() for part in value.split(",")]


def given_names(context: typer.Context) -> set[str]:
    """The parameters that the user gave, on the command line or in a file, by the names that a user types."""
    sources = {
        name: context.get_parameter_source(str(each.name)) for name, each in typed_names(context.command).items()
    }
    return {
        name for name, source in sources.items() if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    }


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gnorm {version('greedy-gnorm')}")
        raise typer.Exit


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a name on the hub.")]
Data = Annotated[str, typer.Option(help="csv, tsv, jsonl, parquet, a folder of them, or hub:NAME[:CONFIG][:SPLIT].")]
OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="A model folder or a name on the hub.")]
OptionalData = Annotated[
    str | None, typer.Option(help="csv, tsv, jsonl, parquet, a folder of them, or hub:NAME[:CONFIG][:SPLIT].")
]
EvalData = Annotated[str | None, typer.Option(help="Evaluate on other data, given like --data.")]
OptionalOut = Annotated[
    Path | None, typer.Option(help="The folder to write to. Default: a new one in runs, named after the model.")
]
Workers = Annotated[
    int,
    typer.Option(min=1, help="Processes to start for this work, each with its share of the cores."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors and the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Methods = Annotated[
    Any,
    typer.Option(
        parser=read_methods,
        metavar="TEXT",
        help="paper, all, joint, all-joint, or names from `gnorm methods`, separated by commas.",
    ),
]
Runtimes = Annotated[
    Any,
    typer.Option(
        parser=_read_runtimes,
        metavar="TEXT",
        help="torch, onnxruntime, int8 (weights in 8 bits), separated by commas. Default: those installed.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or the model folder in it.")]
MovedModel = Annotated[
    str | None, typer.Option(help="The unpruned model, if it was moved. Default: the one that the run names.")
]
Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_from_file,
        is_eager=True,
        help="A YAML file with any of these options, such as `label-map: {neg: NEGATIVE}`.",
    ),
]
