"""Options of the command line, made from the settings: one definition for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from greedy_gnorm.errors import GnormError
from greedy_gnorm.pruning.rules import forms
from greedy_gnorm.settings import Settings, read_yaml

SCORING = (
    "objective", "score_options", "samples", "seed", "text", "text_pair", "label", "label_map", "dtype", "device",
    "device_map", "tokens_per_batch", "savings", "trust_remote_code",
)  # fmt: skip
PRUNING = tuple(setting.name for setting in fields(Settings))


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; it receives them together, as a dict."""
    hints = get_type_hints(Settings)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            part for part in inspect.signature(command, eval_str=True).parameters.values() if part.name != "settings"
        ]
        options = [
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=list(setting.default) if isinstance(setting.default, tuple) else setting.default,
                annotation=Annotated[_option_type(hints[setting.name]), typer.Option(help=_help(setting))],
            )
            for setting in fields(Settings)
            if setting.name in names
        ]

        def wrapper(**given: Any) -> None:
            command(settings={name: given.pop(name) for name in names}, **given)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {part.name: part.annotation for part in [*own, *options]}
        return wrapper

    return decorate


def _option_type(hint: Any) -> Any:
    return list[str] if hint == tuple[str, ...] else hint


def _help(setting: Any) -> str:
    return str(setting.metadata["help"]) + (f" {forms()}." if setting.name == "stop" else "")


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of this command from a YAML file."""
    if path is not None:
        content = read_yaml(path)
        known = {str(parameter.name): parameter for parameter in context.command.params}
        unknown = sorted(set(content) - set(known))
        if unknown:
            raise GnormError(f"{path}: unknown setting {unknown[0]!r}. Settings: {', '.join(sorted(known))}.")
        several = {name for name, parameter in known.items() if getattr(parameter, "multiple", False)}
        context.default_map = {name: _value(path, name, value, name in several) for name, value in content.items()}
    return path


def _value(path: Path, name: str, value: Any, several: bool) -> Any:
    """A value of the file as its option takes it: `methods` may be a list too, an option that can be repeated must."""
    if isinstance(value, list) and (several or name == "methods"):
        wrong = [part for part in value if not isinstance(part, str)]
        if wrong:
            raise GnormError(f"{path}: {name} must be names, not {wrong[0]!r}.")
        return value if several else ",".join(value)
    if isinstance(value, list | dict):
        raise GnormError(f"{path}: {name} must be one value, not {value!r}.")
    return [value] if several and isinstance(value, str) else value


def given_names(context: typer.Context) -> set[str]:
    """The parameters that the user gave, on the line or in a file."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name for name, source in sources.items() if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    }


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or a name on the hub.")]
Data = Annotated[str, typer.Option(help="csv, tsv, jsonl, parquet, a folder of them, or hub:NAME[:CONFIG][:SPLIT].")]
OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="A model folder or a name on the hub.")]
OptionalData = Annotated[
    str | None, typer.Option(help="csv, tsv, jsonl, parquet, a folder of them, or hub:NAME[:CONFIG][:SPLIT].")
]
EvalData = Annotated[str | None, typer.Option(help="Evaluate on other data, written like --data.")]
Out = Annotated[Path, typer.Option(help="The folder to write to.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing but errors and the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", callback=_from_file, is_eager=True, help="A YAML file with any of these options."),
]
