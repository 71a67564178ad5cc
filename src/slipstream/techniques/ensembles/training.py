"""Train ensembles: independently, from one trained network, on a shared trunk, or in one run.

Source: peers: our own design for the goal of CODE, "Compiler-based Neuron-aware Ensemble Training",
MLSys 2021; snapshots: Huang et al., "Snapshot Ensembles: Train 1, Get M for Free", ICLR
2017; shared weights: Wen et al., "BatchEnsemble", ICLR 2020; independent members: Lakshminarayanan
et al., NeurIPS 2017.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, SlipstreamError, SlipstreamWarning
from slipstream.files import replacing
from slipstream.measure import time_function
from slipstream.surgery import removable_units
from slipstream.tables import Field, Table
from slipstream.techniques.ensembles.compaction import compact
from slipstream.techniques.ensembles.members import Ensemble, Quality, evaluate, probabilities
from slipstream.techniques.ensembles.stacking import StackedEnsemble, redrawn

Train = Callable[[nn.Module, float, int], object]
"""Trains a model in place, for a share of the full schedule's epochs, with a seed."""
Method = Literal["independent", "peers", "trunk", "batch", "snapshot"]
_EARLY_STOPPING: tuple[Method, ...] = ("independent", "peers", "trunk")
# Training stops after this many consecutive members that make the ensemble less accurate.
_PATIENCE = 2
METHODS: tuple[Method, ...] = get_args(Method)


def build(
    model: nn.Module,
    train: Train,
    *,
    members: int = 4,
    method: Method = "peers",
    sample: Sequence[torch.Tensor] = (),
    correlation: float = 0.93,
    fresh: float = 0.3,
    share: float = 0.3,
    trunk: int = 1,
    seed: int = 0,
    directory: str | Path | None = None,
    validation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Ensemble:
    """Train an ensemble.

    Args:
        model: untrained; copies of it are trained.
        train: see `Train`; called with a share of 1.0 for a full training.
        members: number of members.
        method: ``independent`` trains every member from scratch. ``peers`` trains one, compacts
            it (`compact`), and starts the others from the result with some units reinitialised.
            ``trunk`` trains one, shares its first `trunk` children with all, and starts the other
            members' remaining children from its own, with some units reinitialised. ``batch``
            trains all in one run, with shared weights and factors of each member. ``snapshot``
            copies the model at `members` equidistant points of one training.
        sample: inputs by which peers are compacted; without any they keep their width.
        correlation: see `compact`.
        fresh: share of each hidden layer's units that is reinitialised, with ``peers`` and
            ``trunk``.
        share: share of a full training for each member after the first, with ``peers`` and
            ``trunk``.
        trunk: number of shared children; `model` must be an ``nn.Sequential``.
        seed: of the first member; each following one gets the next integer.
        directory: where trained members are written. A repeated call with the same arguments, such
            as after an interruption, reads them.
        validation: inputs and labels that neither training nor evaluation uses. Training stops
            when two consecutive members make the ensemble less accurate on them. If the ensemble
            is less accurate than its best member, that member is returned alone, with a warning.
            Without validation data such an ensemble goes unnoticed; members that start from a
            compacted network may be worse than the first.

    Raises:
        InvalidArgumentError: `members` is less than 1, a share is not in (0, 1], `trunk` does not
            fit the model, or there is not one label per validation input.
        SlipstreamError: a file in `directory` belongs to other members, or cannot be written.
    """
    if members < 1:
        raise InvalidArgumentError("members", f"{members} is less than 1")
    if method not in METHODS:
        raise InvalidArgumentError("method", f"'{method}' is not one of {', '.join(METHODS)}")
    for name, value in (("fresh", fresh), ("share", share)):
        if not 0.0 < value <= 1.0:
            raise InvalidArgumentError(name, f"{value} is not in (0, 1]")
    splits = isinstance(model, nn.Sequential) and 0 < trunk < len(model)
    if method == "trunk" and not splits:
        raise InvalidArgumentError(
            "trunk", f"{trunk} shared children need an nn.Sequential with more than {trunk}"
        )
    validator = None if validation is None else _Validator(*validation)
    starts = _Starts(model, members, sample, correlation, fresh, trunk, seed)
    models: list[nn.Module] = []
    trained = starts.trained
    for number, (member, epochs_share) in enumerate(getattr(starts, method)(share)):
        path = None if directory is None else Path(directory) / f"{method}-{number}.pt"
        if path is not None and path.exists():
            _read(member, path)
        else:
            train(member, epochs_share, seed + number)
            if path is not None:
                _write(member, path)
        trained.append(member)
        models.append(copy.deepcopy(member) if method == "snapshot" else member)
        if validator is not None and method in _EARLY_STOPPING and validator.stops(models[-1]):
            break
    ensemble = Ensemble(models)
    if method == "trunk":
        first = models[0]
        assert isinstance(first, nn.Sequential)
        heads = [first[trunk:], *(member.get_submodule("1") for member in models[1:])]
        ensemble = Ensemble(heads, first[:trunk])
    return ensemble if validator is None else validator.best(ensemble)


class _Validator:
    """Accuracy of members and of their mean on validation data."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        if len(x) != len(labels) or not len(labels):
            raise InvalidArgumentError(
                "validation", f"has {len(labels)} labels for {len(x)} inputs",
                remedy="pass validation=(x, labels), with one label per input",
            )  # fmt: skip
        self._x, self._labels = x, labels
        self._each: list[torch.Tensor] = []
        self._worse = 0

    def stops(self, member: nn.Module) -> bool:
        """Add a trained member; return whether the last two made the ensemble less accurate."""
        before = self._accuracy(self._each)
        self._each.append(probabilities(Ensemble([member]), self._x)[0])
        self._worse = self._worse + 1 if self._accuracy(self._each) < before else 0
        return self._worse >= _PATIENCE

    def best(self, ensemble: Ensemble) -> Ensemble:
        """Return the ensemble, or its most accurate member if the ensemble is less accurate."""
        by_member = list(probabilities(ensemble, self._x))
        accuracies, accuracy = (
            [self._accuracy([probability]) for probability in by_member],
            self._accuracy(by_member),
        )
        top = max(range(len(accuracies)), key=accuracies.__getitem__)
        if accuracy >= accuracies[top]:
            return ensemble
        shared = len(ensemble.members) != len(by_member)
        warnings.warn(
            f"the ensemble of {len(by_member)} is {accuracy:.1%} accurate on the validation data, "
            f"its member {top} alone {accuracies[top]:.1%}; "
            + ("members share weights, so the ensemble is returned unchanged" if shared
               else "only that member is returned; try method='independent' or a larger share"),
            SlipstreamWarning, stacklevel=3,
        )  # fmt: skip
        return ensemble if shared else Ensemble([ensemble.members[top]], ensemble.trunk)

    def _accuracy(self, by_member: Sequence[torch.Tensor]) -> float:
        """Return the accuracy of the mean of probabilities [N, classes]; 0 without members."""
        if not by_member:
            return 0.0
        return float(
            (torch.stack(list(by_member)).mean(0).argmax(-1) == self._labels).float().mean()
        )


@dataclass
class _Starts:
    """Initial state of each member and the share of a full training it gets, by method.

    Attributes:
        trained: trained members; the caller appends each before it requests the next.
    """

    model: nn.Module
    members: int
    sample: Sequence[torch.Tensor]
    correlation: float
    fresh: float
    children: int
    seed: int

    def __post_init__(self) -> None:
        self.trained: list[nn.Module] = []

    def independent(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        for number in range(self.members):
            yield redrawn(self.model, self.seed + number), 1.0

    def snapshot(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        member = copy.deepcopy(self.model)
        for _ in range(self.members):
            yield member, 1.0 / self.members

    def batch(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield StackedEnsemble([copy.deepcopy(self.model)] * self.members, "shared"), 1.0

    def peers(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        yield copy.deepcopy(self.model), 1.0
        start = self.trained[0]
        if self.members > 1 and len(self.sample):
            start = compact(start, self.sample, self.correlation).model
        for number in range(1, self.members):
            yield self._partly_redrawn(start, number), share

    def trunk(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        yield copy.deepcopy(self.model), 1.0
        first = self.trained[0]
        assert isinstance(first, nn.Sequential)
        fixed = _Frozen(first[: self.children])
        for number in range(1, self.members):
            yield nn.Sequential(fixed, self._partly_redrawn(first[self.children :], number)), share

    def _partly_redrawn(self, start: nn.Module, number: int) -> nn.Module:
        member = copy.deepcopy(start)
        _redraw_units(member, self.fresh, self.seed + number)
        return member


class _Frozen(nn.Module):
    """Layers that are not trained and always run in eval mode."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self._layers = [copy.deepcopy(layers).eval()]  # a list: no parameters for an optimizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = self._layers[0](x)
            return output


def _redraw_units(model: nn.Module, share: float, seed: int) -> None:
    """Reinitialise the incoming and outgoing weights of some units of every hidden layer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = redrawn(model, seed)
    for units, other in zip(removable_units(model), removable_units(drawn), strict=True):
        chosen = torch.randperm(units.count, generator=generator)[: round(share * units.count)]
        with torch.no_grad():
            units.layer.weight[chosen] = other.layer.weight[chosen]
            if units.layer.bias is not None:
                units.layer.bias[chosen] = other.layer.bias[chosen]
            weight = units.following.weight
            blocks = weight.view(len(weight), units.count, -1)
            blocks[:, chosen] = other.following.weight.view_as(blocks)[:, chosen]


def _write(model: nn.Module, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            torch.save(model.state_dict(), part)
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _read(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except Exception as error:
        raise SlipstreamError(
            "is not a member of this ensemble", where=str(path),
            remedy="pass another directory, or the arguments that the file was written with",
        ) from error  # fmt: skip


@dataclass(frozen=True)
class MethodResult:
    """A method of building an ensemble, compared with one training of the model.

    Attributes:
        time: CPU time to build it, analysis included, over that of one training.
        parameters: number of all members' parameters over the model's.
        quality: quality on held-out inputs.
    """

    method: str
    members: int
    time: float
    parameters: float
    quality: Quality


@dataclass(frozen=True)
class EnsembleComparison:
    """Comparison of methods, one row per method."""

    rows: tuple[MethodResult, ...]

    def table(self) -> Table:
        """Return the rows as a printable table."""
        number = Field[MethodResult].number
        return Table.of(self.rows, [
            Field[MethodResult].of("method", lambda row: row.method),
            number("members", lambda row: row.members),
            number("CPU time", lambda row: f"{row.time:.2f}x"),
            number("parameters", lambda row: f"{row.parameters:.2f}x"),
            number("accuracy", lambda row: f"{row.quality.accuracy:.2%}"),
            number("NLL", lambda row: f"{row.quality.nll:.4f}"),
            number("calibration error", lambda row: f"{row.quality.ece:.4f}"),
            number("disagreement", lambda row: f"{row.quality.disagreement:.2%}"),
        ], notes=["CPU time and parameters: relative to one training of the model"])  # fmt: skip


def compare(
    model: nn.Module, train: Train, x: torch.Tensor, labels: torch.Tensor, *,
    methods: Sequence[Method] = METHODS, members: int = 4, sample: Sequence[torch.Tensor] = (),
    trunk: int = 1, seed: int = 0,
) -> EnsembleComparison:  # fmt: skip
    """Build an ensemble by each method, and one model, and evaluate all on the same inputs.

    Args:
        x, labels: held-out inputs and their labels.
        model, train, members, sample, trunk, seed: see `build`.

    Raises:
        InvalidArgumentError, SlipstreamError: see `build` and `evaluate`.
    """
    rows: list[MethodResult] = []
    single, size = 1.0, sum(p.numel() for p in model.parameters())
    for method in (None, *methods):
        ensembles: list[Ensemble] = []

        def run(trained: list[Ensemble] = ensembles, method: Method | None = method) -> None:
            count = 1 if method is None else members
            trained.append(build(
                model, train, members=count, method=method or "independent", sample=sample,
                trunk=trunk, seed=seed,
            ))  # fmt: skip

        elapsed = time_function(run)["cpu"]
        single = elapsed if method is None else single
        ensemble = ensembles[0]
        total = sum(p.numel() for p in ensemble.parameters())
        rows.append(MethodResult(
            method or "one model", len(ensemble), elapsed / single, total / size,
            evaluate(ensemble, x, labels),
        ))  # fmt: skip
    return EnsembleComparison(tuple(rows))
