"""Fitting the linear maps of a pruned model by least squares, so that its sublayers add what the unpruned ones did.

For a site with the inputs X of its output map, the residuals r and the unpruned model's sums Z, all at real tokens of
the calibration rows, the map should return Y = Z - r. With X and Y centred and the original weights W0 of the units
that are left,

    W = (X'X + lam I)^-1 (X'Y + lam W0),   b = mean(Y) - mean(X) W,   lam = RIDGE * mean of the diagonal of X'X.

Sites are fitted from the bottom, each after those below it. What the input maps of a site receive is no longer what
they receive in the unpruned model. So they first get the best estimate of that: with H the hidden states in the pruned
model and H0 those in the unpruned one,

    M = (H'H + lam I)^-1 (H'H0 + lam I),   m = mean(H0) - mean(H) M,

and every input map (V0, c0) becomes (M V0, c0 + m V0). Modules that several layers share are fitted to the
unpruned model's own inputs, all applications at once. At last, the classifier is fitted to what it returns in the
unpruned model.

Much less is done by means: the weights stay, and what the removed units returned on average in the unpruned model is
added to the bias, b = b0 + mean(X_R) W_R.

The result depends on the unpruned model, the units that are removed and the rows, not on the order of removal: any step
of a run can be rebuilt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from greedy_gnorm.errors import NonFiniteScore, UnsupportedModel
from greedy_gnorm.model.modeling_pruned import kept_channels
from greedy_gnorm.model.modes import evaluating
from greedy_gnorm.model.sites import Site, Sites, find_sites, weight_of
from greedy_gnorm.passes.calibration import Calibration, Sample, Target
from greedy_gnorm.passes.equations import NormalEquations
from greedy_gnorm.passes.stack import Stream, classifier_samples, through_layers
from greedy_gnorm.phases import counted, phase
from greedy_gnorm.recovery.distillation import Distillation

log = logging.getLogger("greedy_gnorm")

RIDGE = 0.01
"""The weight of the original weights, relative to the mean square of an input."""


Fit = tuple[Tensor, Tensor | None]
"""New weights, (D, d), and the bias, (d,), if the map has one; in float64."""


def fit_weights(
    equations: NormalEquations, weight: Tensor, bias: Tensor | None, where: Site | str, strength: float = 1.0
) -> Fit:
    """The weights that return the targets best, with a ridge of this strength towards the original ones."""
    squares, products = equations.squares, equations.products
    if bias is None:
        squares = squares + equations.count * torch.outer(equations.mean_input, equations.mean_input)
        products = products + equations.count * torch.outer(equations.mean_input, equations.mean_target)
    fitted = _solve(squares, products, weight, where, strength)
    return fitted, None if bias is None else equations.mean_target - equations.mean_input @ fitted


def fit_gates(equations: NormalEquations, weight: Tensor, bias: Tensor | None, site: Site) -> Fit:
    """One factor for each unit (Kwon et al. 2022): the original weights, scaled; the bias stays."""
    squares = equations.squares + equations.count * torch.outer(equations.mean_input, equations.mean_input)
    target = equations.mean_target if bias is None else equations.mean_target - bias
    products = equations.products + equations.count * torch.outer(equations.mean_input, target)
    between = site.by_unit(squares * (weight @ weight.mT)).sum(-1).mT  # (units, D)
    wanted = site.by_unit((products * weight).sum(1)).sum(1, keepdim=True)
    factors = _solve(site.by_unit(between).sum(-1), wanted, torch.ones_like(wanted), site)
    return weight * site.by_channel(factors.mT).mT, bias


def _solve(squares: Tensor, products: Tensor, start: Tensor, where: Site | str, strength: float = 1.0) -> Tensor:
    """Solve for the weights with a ridge towards `start`; the ridge grows until the system can be solved."""
    if not (torch.isfinite(squares).all() and torch.isfinite(products).all()):
        raise NonFiniteScore(f"The activations in {where} are NaN or infinite on calibration rows: check the weights.")
    ridge = strength * RIDGE * float(squares.diagonal().mean()) if len(squares) else 0.0
    ridge = ridge or RIDGE  # inputs that are always zero
    for _ in range(20):
        damped = squares.clone()
        damped.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            solved = torch.cholesky_solve(products + ridge * start, factor)
            if torch.isfinite(solved).all():
                return solved
        ridge *= 10
        log.warning("the system of %s is singular: solving it with a larger ridge, %.1e", where, ridge)
    raise NonFiniteScore(f"The output of {where} can't be fitted: its system stays singular. Check the weights.")


Solver = Callable[[NormalEquations, Tensor, Tensor | None, Site], Fit]


@dataclass(frozen=True)
class Recovery:
    """Fits a pruned model on calibration rows; without a solver, removed units leave their means."""

    name: str
    solver: Solver | None
    calibration: Calibration
    shared: dict[int, NormalEquations] = field(default_factory=dict)  # of modules that several layers share, by site
    training: Distillation | None = None  # of a step that is taken, after it was fitted

    @property
    def classifier(self) -> str | None:
        """The name of the classifier, if it is fitted too; gates and means are for units alone."""
        return self.calibration.classifier if self.solver is fit_weights else None

    @property
    def key(self) -> tuple[str, str]:
        """What the result depends on besides the model and its units."""
        return self.name, self.calibration.batches.fingerprint

    def __call__(self, sites: Sites) -> None:
        """Fit all sites of the model, heads' and neurons', in place; the model must have the original weights."""
        everything, classifier = find_sites(sites.model).use(sites.savings), self.classifier
        for site in everything:
            _set_map(site.output, *self._original(site))
            for path, linear in self._stream(site).items():
                _set_map(linear, *self._original_input(site, path))
        if classifier is not None:
            _set_map(sites.model.get_submodule(classifier), *self._original_classifier(classifier))
        if not any(map(self._is_cut, everything)):
            return
        with evaluating(sites.model), evaluating(self.calibration.original.model), torch.no_grad():
            if self.solver is None:
                self._add_means(everything)
            elif everything.layers:
                self._fit_layers(everything)
            else:
                self._fit_shared(everything)
            if classifier is not None:
                self._fit_classifier(everything, classifier)
        for site in sites:
            site.version += 1

    def _add_means(self, sites: Sites) -> None:
        """Add what the removed units of each site returned on average to the bias of its output map."""
        check_recovery(self.name, [site for site in sites if self._is_cut(site)])
        for site in filter(self._is_cut, sites):
            whole, bias = _parameters_of(self.calibration.original[site.index].output)
            assert bias is not None
            means = self.calibration.input_means[site.index].to(whole.device, copy=True)
            means[self._channels(site)] = 0  # what units that are left return is no part of the bias
            _set_map(site.output, self._original(site)[0], bias.double() + means @ whole.double())

    def _fit_layers(self, sites: Sites) -> None:
        """Fit a stack of layers from the bottom; below the lowest removed unit nothing changes."""
        layer = next(place for place, layer in enumerate(sites.layers) if any(map(self._is_cut, layer.sites)))
        fitted = [site for layer in sites.layers[layer:] for site in layer.sites]
        lowest = next(site.index for site in fitted if self._is_cut(site))
        with phase("Fitting", len(fitted), "map") as work:
            for visit in through_layers(sites, self.calibration, layer):
                if visit.site.index > lowest and self._stream(visit.site):
                    self._fit_inputs(visit.site, visit.streams())
                if visit.site.index >= lowest:
                    weight, bias = self._original(visit.site)
                    self._fit(visit.site, _equations(visit.samples(), weight).gathered(), weight, bias)
                work.advance()

    def _fit_inputs(self, site: Site, streams: Iterable[Stream]) -> None:
        """Let the input maps of a site read the best estimate of what they receive in the unpruned model."""
        maps = {path: self._original_input(site, path) for path in self._stream(site)}
        weight, _ = next(iter(maps.values()))
        equations = NormalEquations(len(weight), len(weight), weight.device)
        for stream in streams:
            equations.add(stream.states, stream.original, stream.weights)
        equations = equations.gathered()
        same = torch.eye(len(weight), dtype=torch.float64, device=weight.device)
        estimates: dict[bool, Fit] = {}  # with and without a mean, which needs a bias
        for path, (weight, bias) in maps.items():
            centred = bias is not None
            if centred not in estimates:
                estimates[centred] = fit_weights(equations, same, same[0] if centred else None, f"the input of {site}")
            states, shift = estimates[centred]
            fitted = weight.double()
            new_bias = None if bias is None or shift is None else bias.double() + shift @ fitted
            _set_map(site.inputs[path], states @ fitted, new_bias)

    def _fit_shared(self, sites: Sites) -> None:
        """Fit modules that several layers share to the unpruned model's own inputs, all applications at once.

        The equations of all units are computed once, and each set of units takes its part of them.
        """
        for site in counted(sites, "Fitting", "map"):
            if self._is_cut(site):
                if site.index not in self.shared:
                    whole, _ = _parameters_of(self.calibration.original[site.index].output)
                    samples = self.calibration.original_samples(site.index)
                    self.shared[site.index] = _equations(samples, whole).gathered()
                weight, bias = self._original(site)
                self._fit(site, self.shared[site.index].at(self._channels(site).tolist()), weight, bias)

    def _fit(self, site: Site, equations: NormalEquations, weight: Tensor, bias: Tensor | None) -> None:
        assert self.solver is not None
        _set_map(site.output, *self.solver(equations, weight.double(), _double(bias), site))

    def _fit_classifier(self, sites: Sites, name: str) -> None:
        """Fit the classifier; it has one row for each text, so with fewer rows than inputs the ridge grows."""
        weight, bias = self._original_classifier(name)
        equations = NormalEquations(weight.shape[0], weight.shape[1], weight.device)
        for inputs, logits in classifier_samples(sites, self.calibration):
            equations.add(inputs, logits, inputs.new_ones(len(inputs)))
        equations = equations.gathered()
        strength = max(1.0, len(weight) / equations.count)
        fit = fit_weights(equations, weight.double(), _double(bias), "the classifier", strength)
        _set_map(sites.model.get_submodule(name), *fit)

    def _original_classifier(self, name: str) -> Fit:
        return _parameters_of(self.calibration.original.model.get_submodule(name))

    def _is_cut(self, site: Site) -> bool:
        return site.survivors != self.calibration.original[site.index].survivors

    def _stream(self, site: Site) -> dict[str, nn.Module]:
        """The input maps that are fitted: none where layers share them, or where no unit is left."""
        fits = self.solver is fit_weights and self.calibration.original.layers and site.survivors
        return site.stream if fits else {}

    def _channels(self, site: Site, linear_map: dict[str, Any] | None = None) -> Tensor:
        """The channels of a map of the unpruned model, by default the output map, that belong to the units left."""
        original = self.calibration.original[site.index]
        places_of = {unit: place for place, unit in enumerate(original.survivors)}
        places = [places_of[unit] for unit in site.survivors]
        linear_map = linear_map or original.layout["output"]
        channels = kept_channels(linear_map, original.layout, len(original.survivors), places)
        return torch.tensor(channels, dtype=torch.long)

    def _original(self, site: Site) -> Fit:
        """The unpruned model's output map for the units that are left."""
        weight, bias = _parameters_of(self.calibration.original[site.index].output)
        return weight[self._channels(site)], bias

    def _original_input(self, site: Site, path: str) -> Fit:
        """An input map of the unpruned model for the units that are left."""
        original = self.calibration.original[site.index]
        channels = self._channels(site, next(each for each in original.layout["inputs"] if each["path"] == path))
        weight, bias = _parameters_of(original.inputs[path])
        return weight[:, channels], None if bias is None else bias[channels]


def _equations(samples: Iterable[tuple[Sample, Target]], weight: Tensor) -> NormalEquations:
    equations = NormalEquations(weight.shape[0], weight.shape[1], weight.device)
    for sample, target in samples:
        equations.add(sample.inputs, target.sums - sample.residuals, target.weights)
    return equations


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _parameters_of(linear: nn.Module) -> Fit:
    """The weights, (D, d), and the bias of a linear map."""
    stored, bias = weight_of(linear).detach(), linear.bias
    assert bias is None or isinstance(bias, Tensor)
    return stored if isinstance(linear, Conv1D) else stored.mT, None if bias is None else bias.detach()


def _set_map(linear: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a linear map new parameters; the old ones may be shared with the unpruned model."""
    values = {"weight": weight if isinstance(linear, Conv1D) else weight.mT, "bias": bias}
    for name, value in values.items():
        own: Tensor | None = getattr(linear, name)
        if own is not None and value is not None:
            new = nn.Parameter(value.to(own.device, own.dtype).contiguous(), requires_grad=own.requires_grad)
            setattr(linear, name, new)


MEAN = "mean"
SOLVERS: dict[str, Solver | None] = {"least-squares": fit_weights, "gates": fit_gates, MEAN: None}
"""How quality can be recovered without training."""


def check_recovery(name: str, sites: Iterable[Site]) -> None:
    """Refuse to add means to output maps that have no bias."""
    without = next((site for site in sites if site.output.bias is None), None)
    if name == MEAN and without is not None:
        raise UnsupportedModel(
            f"The output projection of {without} has no bias to which the means of removed units could be added: "
            f"recover by least-squares or gates instead of {MEAN}."
        )
