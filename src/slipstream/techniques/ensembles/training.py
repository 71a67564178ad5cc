"""Train ensembles: from nothing, from one trained network, on its first layers, or along one run.

Source: peers: the purpose of CODE, "Compiler-based Neuron-aware Ensemble Training", MLSys 2021,
read in our own way; snapshots: Huang et al., "Snapshot Ensembles: Train 1, Get M for Free", ICLR
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
from slipstream.measure import timed
from slipstream.surgery import removable_units
from slipstream.tables import Field, Table
from slipstream.techniques.ensembles.compaction import compact
from slipstream.techniques.ensembles.members import Ensemble, Quality, evaluate, probabilities
from slipstream.techniques.ensembles.stacking import Stacked, redrawn

Train = Callable[[nn.Module, float, int], object]
"""Trains a model in place: of a share of the main schedule's epochs, with a seed."""
Method = Literal["independent", "peers", "trunk", "batch", "snapshot"]
_FROM_WHOLE: tuple[Method, ...] = ("independent", "peers", "trunk")
# Members in a row that make an ensemble less accurate before the training of others is given up.
_WORSE = 2
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
    """An ensemble of `members`.

    Args:
        model: untrained; a copy is trained for each member, or once for all.
        train: see `Train`; called with a share of 1.0 for a whole training.
        method: ``independent`` trains every member from the start. ``peers`` trains one, compacts
            it (`compact`), and lets others start from that with some units drawn anew. ``trunk``
            trains one, keeps the first `trunk` children of it for all, and lets the others' rest
            start from its, with some units drawn anew. ``batch`` trains all at once, with shared
            weights and factors of their own. ``snapshot`` takes a member after each `members`-th of
            one training.
        sample: inputs that peers are compacted with; without any they keep their width.
        correlation: see `compact`.
        fresh: share of a hidden layer's units that a peer draws anew.
        share: of a whole training that a peer, or a rest, gets.
        trunk: children of an ``nn.Sequential``.
        directory: where each member is written when it is trained, and read when this is called
            again after it was interrupted; with the same arguments.
        validation: inputs and labels that no training sees and no result is judged on. Training
            stops when members make the ensemble less accurate on them twice in a row, and if it is
            less accurate than its best member in the end, that member alone is returned, with a
            warning. Without, nothing says whether the ensemble is worth it: members that start
            from a compacted network may make it worse than the first.

    Raises:
        InvalidArgumentError: fewer than one member, a share that is none, or not one label for
            every validation input.
        SlipstreamError: what lies in `directory` is of other members.
    """
    if members < 1:
        raise InvalidArgumentError("members", f"{members} is less than one")
    if method not in METHODS:
        raise InvalidArgumentError("method", f"'{method}' is none of {', '.join(METHODS)}")
    for name, value in (("fresh", fresh), ("share", share)):
        if not 0.0 < value <= 1.0:
            raise InvalidArgumentError(name, f"{value} is not in (0, 1]")
    splits = isinstance(model, nn.Sequential) and 0 < trunk < len(model)
    if method == "trunk" and not splits:
        raise InvalidArgumentError("trunk", f"no nn.Sequential has {trunk} children and a rest")
    judge = None if validation is None else _Judge(*validation)
    starts = _Starts(model, members, sample, correlation, fresh, trunk, seed)
    models: list[nn.Module] = []
    last = starts.last
    for number, (one, amount) in enumerate(getattr(starts, method)(share)):
        path = None if directory is None else Path(directory) / f"{method}-{number}.pt"
        if path is not None and path.exists():
            _read(one, path)
        else:
            train(one, amount, seed + number)
            if path is not None:
                _write(one, path)
        last.append(one)
        models.append(copy.deepcopy(one) if method == "snapshot" else one)
        if judge is not None and method in _FROM_WHOLE and judge.stops(models[-1]):
            break
    ensemble = Ensemble(models)
    if method == "trunk":
        first = models[0]
        assert isinstance(first, nn.Sequential)
        rests = [first[trunk:], *(rest.get_submodule("1") for rest in models[1:])]
        ensemble = Ensemble(rests, first[:trunk])
    return ensemble if judge is None else judge.best(ensemble)


class _Judge:
    """Accuracy on held-out data, of members and of their mean."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        if len(x) != len(labels) or not len(labels):
            raise InvalidArgumentError(
                "validation", f"has {len(labels)} labels for {len(x)} inputs",
                remedy="validation=(x, labels)",
            )  # fmt: skip
        self._x, self._labels = x, labels
        self._each: list[torch.Tensor] = []
        self._worse = 0

    def stops(self, member: nn.Module) -> bool:
        """Add a trained member; return whether the last two made the ensemble less accurate."""
        before = self._accuracy(self._each)
        self._each.append(probabilities(Ensemble([member]), self._x)[0])
        self._worse = self._worse + 1 if self._accuracy(self._each) < before else 0
        return self._worse >= _WORSE

    def best(self, ensemble: Ensemble) -> Ensemble:
        """Return the ensemble, or its most accurate member if the ensemble is less accurate."""
        each = list(probabilities(ensemble, self._x))
        alone, together = [self._accuracy([one]) for one in each], self._accuracy(each)
        top = max(range(len(alone)), key=alone.__getitem__)
        if together >= alone[top]:
            return ensemble
        shared = len(ensemble.members) != len(each)
        warnings.warn(
            f"the ensemble of {len(each)} is {together:.1%} accurate on the validation data, its "
            f"member {top} alone {alone[top]:.1%}: "
            + ("they share their weights, so none can be used alone" if shared
               else "it alone is returned; method='independent' or a larger share may help"),
            SlipstreamWarning, stacklevel=3,
        )  # fmt: skip
        return ensemble if shared else Ensemble([ensemble.members[top]], ensemble.trunk)

    def _accuracy(self, each: Sequence[torch.Tensor]) -> float:
        """Of the mean of members' probabilities, [N, classes]; 0 of no member."""
        if not each:
            return 0.0
        return float((torch.stack(list(each)).mean(0).argmax(-1) == self._labels).float().mean())


@dataclass
class _Starts:
    """What each member starts as, and for what share it is trained.

    Attributes:
        last: members as they were trained, each before the next is asked for.
    """

    model: nn.Module
    members: int
    sample: Sequence[torch.Tensor]
    correlation: float
    fresh: float
    children: int
    seed: int

    def __post_init__(self) -> None:
        self.last: list[nn.Module] = []

    def independent(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        for number in range(self.members):
            yield redrawn(self.model, self.seed + number), 1.0

    def snapshot(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        one = copy.deepcopy(self.model)
        for _ in range(self.members):
            yield one, 1.0 / self.members

    def batch(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            yield Stacked([copy.deepcopy(self.model)] * self.members, "shared"), 1.0

    def peers(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        yield copy.deepcopy(self.model), 1.0
        start = self.last[0]
        if self.members > 1 and len(self.sample):
            start = compact(start, self.sample, self.correlation).model
        for number in range(1, self.members):
            yield self._partly_anew(start, number), share

    def trunk(self, share: float) -> Iterator[tuple[nn.Module, float]]:
        yield copy.deepcopy(self.model), 1.0
        first = self.last[0]
        assert isinstance(first, nn.Sequential)
        fixed = _Fixed(first[: self.children])
        for number in range(1, self.members):
            yield nn.Sequential(fixed, self._partly_anew(first[self.children :], number)), share

    def _partly_anew(self, start: nn.Module, number: int) -> nn.Module:
        one = copy.deepcopy(start)
        _draw_units(one, self.fresh, self.seed + number)
        return one


class _Fixed(nn.Module):
    """Layers that are not trained, in eval mode whatever is said."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self._layers = [copy.deepcopy(layers).eval()]  # a list: no parameters for an optimizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = self._layers[0](x)
            return output


def _draw_units(model: nn.Module, share: float, seed: int) -> None:
    """Some units of every hidden layer as at the start: what they read, and what reads them."""
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
            "is no member of this ensemble", where=str(path),
            remedy="another directory, or the arguments that it was made with",
        ) from error  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One way to make an ensemble, beside one training of the model.

    Attributes:
        time: CPU time of making it, analysis included, over that of one training.
        parameters: of all members, over the model's.
        quality: on inputs it was not made with.
    """

    method: str
    members: int
    time: float
    parameters: float
    quality: Quality


@dataclass(frozen=True)
class Compared:
    """Ways to make an ensemble, row by row."""

    rows: tuple[Row, ...]

    def table(self) -> Table:
        """To be printed."""
        number = Field[Row].number
        return Table.of(self.rows, [
            Field[Row].of("method", lambda row: row.method),
            number("members", lambda row: row.members),
            number("CPU time", lambda row: f"{row.time:.2f}x"),
            number("parameters", lambda row: f"{row.parameters:.2f}x"),
            number("accuracy", lambda row: f"{row.quality.accuracy:.2%}"),
            number("NLL", lambda row: f"{row.quality.nll:.4f}"),
            number("calibration error", lambda row: f"{row.quality.ece:.4f}"),
            number("disagreement", lambda row: f"{row.quality.disagreement:.2%}"),
        ], notes=["time and parameters: over those of one training of the model"])  # fmt: skip


def compare(
    model: nn.Module, train: Train, x: torch.Tensor, labels: torch.Tensor, *,
    methods: Sequence[Method] = METHODS, members: int = 4, sample: Sequence[torch.Tensor] = (),
    trunk: int = 1, seed: int = 0,
) -> Compared:  # fmt: skip
    """Make an ensemble in every way, and one model, and judge each on the same inputs.

    Args:
        x, labels: that no training has seen.
        others: as of `build`.

    Raises:
        as `build` and `evaluate`.
    """
    rows: list[Row] = []
    one_s, size = 1.0, sum(p.numel() for p in model.parameters())
    for method in (None, *methods):
        ensembles: list[Ensemble] = []

        def run(trained: list[Ensemble] = ensembles, method: Method | None = method) -> None:
            count = 1 if method is None else members
            trained.append(build(
                model, train, members=count, method=method or "independent", sample=sample,
                trunk=trunk, seed=seed,
            ))  # fmt: skip

        took = timed(run)["cpu"]
        one_s = took if method is None else one_s
        ensemble = ensembles[0]
        total = sum(p.numel() for p in ensemble.parameters())
        rows.append(Row(
            method or "one model", len(ensemble), took / one_s, total / size,
            evaluate(ensemble, x, labels),
        ))  # fmt: skip
    return Compared(tuple(rows))
