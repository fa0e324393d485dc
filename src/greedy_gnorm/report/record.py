"""The record on the page: model, rows, settings, versions, and the command that repeats the run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from greedy_gnorm.pruning.methods import JOINT, METHODS
from greedy_gnorm.records import compact
from greedy_gnorm.records.header import sources_of
from greedy_gnorm.report.compression import COMPRESS
from greedy_gnorm.report.page import Page
from greedy_gnorm.report.tables import in_words
from greedy_gnorm.scores import SCORES
from greedy_gnorm.settings import COMPARING, COMPRESSING, PRUNING, SETTINGS, Settings
from greedy_gnorm.units import ATTENTION, FFN, UNIT_WORDS, SiteInfo


def details(page: Page) -> list[tuple[str, list[tuple[str, str]]]]:
    """Model, rows, settings and versions, in groups of names and values."""
    header = page.header
    model, config = header["model"], header["config"]
    groups = [
        (
            "Model",
            [
                ("name", model["name"]),
                ("type", model["type"]),
                *_architecture([SiteInfo.from_json(site) for site in model["sites"]]),
                ("parameters", f"{model['parameters']:,}"),
                ("stored as", page.runs[0].precision.name),
                ("fingerprint of the weights", model["weights"]),
            ],
        )
    ]
    for part, rows in page.runs[0].journal.header["data"].items():
        facts = [("source", rows["source"]), ("rows", f"{rows['rows']:,} in {rows['batches']} batches")]
        facts += [("tokens", f"{rows['tokens']:,}, {rows['longest']:,} at most in a row")] if "tokens" in rows else []
        facts += [("truncated", f"{rows['truncated']} rows")] if rows["truncated"] else []
        groups.append((f"Rows for {part}", [*facts, ("fingerprint", rows["fingerprint"])]))
    if costs := _costs(page.runs[0].journal.header):
        groups.append(("Costs", costs))
    settings = {name: value for name, value in config.items() if value is not None and value != []}
    if page.joint and page.experiment is None:
        settings = {name: value for name, value in settings.items() if name in COMPRESSING or name not in SETTINGS}
    if page.experiment is not None:
        settings = {**{name: header[name] for name in ("methods", "runs", "trajectories")}, **settings}
        settings = {name: value for name, value in settings.items() if name not in ("method", "objective")}
    groups.append(("Settings", [(in_words(name), _plain(name, value)) for name, value in settings.items()]))
    how = [(name, header[name]) for name in ("processes", "threads", "started") if name in header]
    groups.append(("Versions", [*header["versions"].items(), *how]))
    return groups


def _costs(header: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows that costs are stated for, and the measured time of a batch of them."""
    shape, times = header.get("shape"), header.get("times")
    found = []
    if shape is not None:
        found.append(("multiplications of a row", f"{shape['tokens']:.4g} tokens, on average"))
        found.append(("rows timed together", str(shape["rows"])))
    if times is not None:
        found.append(("measured time of the unpruned model", f"{times['whole']:.2f} ms"))
    return found


ARCHITECTURE = {ATTENTION: "attention", FFN: "feed-forward"}
"""What the parts of a model are called, by the kind of their sites."""


def _architecture(sites: list[SiteInfo]) -> Iterator[tuple[str, str]]:
    """The layers of each kind in words."""
    for kind, name in ARCHITECTURE.items():
        if own := [site for site in sites if site.kind == kind]:
            yield name, _layers(own)


def _layers(sites: list[SiteInfo]) -> str:
    """`12 layers of 12 heads`; the smallest and the largest number where layers differ."""
    layers = [sum(site.units for site in sites if site.layer == layer) for layer in sorted({s.layer for s in sites})]
    counts, shared = sorted(set(layers)), max(site.applications for site in sites)
    units = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
    text = f"{len(layers)} layer{'s' if len(layers) > 1 else ''} of {units} {UNIT_WORDS[sites[0].kind]}s"
    return text + (f", each applied {shared} times" if shared > 1 else "")


def _plain(name: str, value: Any) -> str:
    if name in compact.FORMS:
        return compact.write(name, value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def command(page: Page) -> str | None:
    """The command that repeats the run or comparison; None for objects in memory and for several runs."""
    header = page.header
    data = page.runs[0].journal.header["data"]
    if header["model"].get("in_memory") or any(part.get("in_memory") for part in data.values()):
        return None
    if page.experiment is None and len(page.runs) > 1:
        return None
    scoring, evaluation = sources_of(page.runs[0].journal.header)
    run = COMPRESS if page.joint else "prune"
    parts = ["gnorm", run if page.experiment is None else "compare", header["model"]["name"], "--data", scoring]
    if evaluation is not None:
        parts += ["--eval-data", evaluation]
    if page.experiment is not None:
        parts += ["--methods", ",".join(header["methods"])]
        parts += ["--runs", str(header["runs"]), "--trajectories", str(header["trajectories"])]
        objectives = {run.journal.header["config"]["objective"] for run in page.runs}
        parts += _options(header["config"], set(COMPARING) - ({"objective"} if len(objectives) > 1 else set()))
    else:
        parts += _compress_options(header["config"]) if page.joint else _options(header["config"], set(PRUNING))
    return shlex.join([*parts, "--out", "AGAIN"])


def _compress_options(config: dict[str, Any]) -> Iterator[str]:
    """The settings that are not the defaults of `gnorm compress`."""
    method = str(config["method"])
    objective = SCORES[METHODS[method].score].objective if method in METHODS else None
    return _options(config, set(COMPRESSING), {"method": JOINT, "objective": objective})


def _options(config: dict[str, Any], names: set[str], own: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Those of the named settings that are not defaults, as on the command line; `own` are defaults of a command."""
    for name, default in {**Settings().to_json(), **(own or {})}.items():
        value = config.get(name, default)
        if name not in names or value == default:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
        elif name in compact.FORMS:
            yield from (option, compact.write(name, value))
        else:
            for each in value if isinstance(value, list) else [0 if value is None else value]:
                yield from (option, str(each))
