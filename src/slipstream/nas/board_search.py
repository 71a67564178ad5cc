"""Search for the most accurate int8 network that fits a microcontroller.

Candidates that do not fit are never trained: proposals are drawn from candidates that fit by their
`Footprint`, and each gets a plan of its arena before its training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.nas.footprint import Footprint
from slipstream.nas.searching import first_failure
from slipstream.nas.space import derive_space
from slipstream.nas.supernet import Supernet
from slipstream.provenance import Provenance
from slipstream.search import Asha, Budget, Candidate, Estimator, Study, study
from slipstream.search.metrics import SCORED, Trial
from slipstream.search.strategies import Evolution
from slipstream.ship import DoesNotFitError, boards
from slipstream.ship.boards import Board, Fit
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.export.modules import load_model
from slipstream.ship.firmware import Forecast, export_firmware, forecast
from slipstream.ship.stability.int8 import as_int8, following_norms
from slipstream.tables import Table
from slipstream.units import format_bytes

Data = tuple[torch.Tensor, torch.Tensor]
_UNITS = {"ram": "B", "flash": "B", "instructions": ""}
_POOL, _BATCH, _CALIBRATION, _VERIFIED = 1 << 16, 64, 128, 8
# Exponents that draw small choices more often, for boards that few candidates fit.
_SKEWS = (1.0, 2.0, 4.0, 8.0)
# Fraction of the epochs, at the end, in which layers compute as int8.
_QUANTIZED = 1 / 3
# Only the larger candidates among those that fit start the search: they are more accurate.
_LARGEST = 1 / 4


def limits_of(board: Board, latency_ms: float | None = None) -> dict[str, float]:
    """Return the limits of a board for `Footprints.fit`."""
    limits: dict[str, float] = {"ram": board.ram, "flash": board.flash}
    return limits | ({} if latency_ms is None else {"instructions": board.instructions(latency_ms)})


def _drawn(footprint: Footprint, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Draw candidates at random, half of them among small ones, int64 [candidates] by name."""
    skew = np.repeat(_SKEWS, _POOL // len(_SKEWS))
    return {
        leaf.path: np.array(choices)[
            np.floor(rng.random(len(skew)) ** skew * len(choices)).astype(np.int64)
        ]
        for leaf in footprint.space.leaves
        if (choices := footprint.net.space.choices[leaf.path].choices)
    }


def nearest_fit(footprint: Footprint, limits: Mapping[str, float]) -> dict[str, int] | None:
    """Return the configuration that fits with the fewest changes, and of these the largest.

    None if no candidate of some 65,000 fits.
    """
    rng = np.random.default_rng(0)
    full, choices = footprint.net.space.full, footprint.net.space.choices
    columns = _drawn(footprint, rng)
    names = list(columns)
    if not names:
        return None
    # One parameter changed, then two, and so on.
    n = len(columns[names[0]])
    changed = rng.random((len(names), n)).argsort(0) < 1 + np.arange(n) % len(names)
    single = [(name, choice) for name in names for choice in choices[name].choices]
    for row, name in enumerate(names):
        column = np.where(changed[row], columns[name], full[name])
        ones = [choice if name == other else full[name] for other, choice in single]
        columns[name] = np.concatenate([column, ones, [choices[name].choices[0]]])
    found = footprint.predict_many(columns)
    changes = sum(columns[name] != full[name] for name in names)
    order = np.lexsort((-found.macs, changes))
    for at in order[found.fit(limits)[order]][:_VERIFIED].tolist():
        config = {name: int(columns[name][at]) for name in names}
        if _keeps(footprint, config, limits):
            return config
    return None


def _keeps(footprint: Footprint, config: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    predicted = _costs(footprint, config)
    return all(predicted[name] <= limit for name, limit in limits.items())


def _costs(footprint: Footprint, config: Mapping[str, Any]) -> dict[str, float]:
    return _by_limit(footprint.predict(config, plan_s=0.0))


def _by_limit(found: Forecast) -> dict[str, float]:
    return {"ram": found.ram, "flash": found.flash, "instructions": found.instructions}


def describe_change(footprint: Footprint, config: Mapping[str, int]) -> str:
    """Describe a configuration by the parameters that it changes."""
    choices, full = footprint.net.space.choices, footprint.net.space.full
    return ", ".join(
        f"{name} {full[name]} -> {value} (at {choices[name].path or 'the model'})"
        for name, value in config.items()
        if value != full[name]
    )


def nearest_in_file(
    path: str, name: str, calibration: str, weights: str, board: str, latency_ms: float | None
) -> str:
    """Return the nearest change that makes a user's model fit, as text; runs in a child process."""
    model, inputs = load_model(path, name, calibration, weights)
    chosen = boards.board(board)
    net = Supernet(derive_space(model, inputs[:2], channel_multiple=4))
    footprint, limits = Footprint(net, inputs, device=chosen.target), limits_of(chosen, latency_ms)
    config = nearest_fit(footprint, limits)
    if config is None:
        return f"no narrower version of the model fits: {_shortage(footprint, chosen, limits)}"
    return f"nearest change that fits: {describe_change(footprint, config)}"


def _shortage(footprint: Footprint, board: Board, limits: Mapping[str, float]) -> str:
    """Describe what the smallest network needs beyond the limits."""
    found = footprint.predict(footprint.net.space.smallest)
    needs, peaks = _by_limit(found), Fit(board, found).peaks()
    rows = {"ram": "RAM", "flash": "flash", "instructions": "latency"}
    over = [
        f"{_shown(board, name, needs[name])} of {rows[name]} (largest at {peaks[rows[name]]}), and "
        f"{board.name} has {_shown(board, name, limit)}"
        for name, limit in limits.items()
        if needs[name] > limit
    ]
    return "the smallest needs " + ("; ".join(over) or "a combination that no candidate has")


def _shown(board: Board, name: str, value: float) -> str:
    if name == "instructions":
        return f"{board.latency_ms(value):.4g} ms"
    return format_bytes(value)


class FittingEvolution(Evolution):
    """Evolution whose proposals fit.

    Args:
        pool: the first proposals, in order.
        fits: whether a candidate fits.
    """

    name = "fitting evolution"

    def __init__(self, pool: Sequence[Candidate], fits: Callable[[Candidate], bool]) -> None:
        super().__init__(population=32, sample=5)
        self._pool, self._fits = pool, fits
        self._attempt = 0

    def rng(self) -> np.random.Generator:
        """Return the generator of the current attempt at a proposal."""
        return np.random.Generator(np.random.PCG64((self.seed, self.ask_count, self._attempt)))

    def ask(self, number: int) -> Candidate | None:
        """Return a mutant of a good trial that fits, or one of the pool."""
        if len(self._living) >= self.sample and self.ask_count >= self.sample:
            for self._attempt in range(50):
                candidate = super().ask(number)
                if candidate is not None and self._fits(candidate):
                    return candidate
        return self._pool[self.ask_count % len(self._pool)]


@dataclass(frozen=True)
class BoardResult:
    """The best network of a search for a board.

    Attributes:
        study: all trials; rejected candidates were not trained.
        config: its configuration.
        module: the network with trained weights.
        model: its int8 ``.tflite`` file.
        fit: its firmware on the board, after conversion.
        accuracy: on the validation data, computing as int8.
    """

    study: Study
    config: Mapping[str, int]
    module: GraphModule
    model: bytes
    fit: Fit
    accuracy: float

    def to_json(self) -> dict[str, Any]:
        """Return the accuracy, the configuration and the fit."""
        return {
            "accuracy": self.accuracy, "config": dict(self.config),
            "trained": len(_trained(self.study)), "fit": self.fit.to_json(),
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Return the fit, with the accuracy and the number of trainings as notes."""
        table = self.fit.table()
        trained = _trained(self.study)
        notes = [
            f"accuracy as int8: {self.accuracy:.2%} of the validation data; "
            f"{self.fit.forecast.firmware.program.macs:,} multiply-accumulates",
            f"{len(trained)} trainings, all of networks that fit",
        ]
        return [replace(table, notes=[*notes, *table.notes])]


def _trained(study: Study) -> list[Trial]:
    return [trial for trial in study.trials if trial.state in SCORED]


def search_for_board(
    model: nn.Module,
    train: Data,
    valid: Data,
    *,
    board: str | Board,
    latency_ms: float | None = None,
    budget: str = "15min",
    epochs: int = 24,
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
    seed: int = 0,
    store: str | Path | None = None,
    progress: Callable[[Study], None] = lambda study: None,
) -> BoardResult:
    """Search the narrower versions of a classifier for the most accurate one that fits a board.

    Short trainings select the candidates of longer ones (asynchronous halving, 1/9 of the epochs
    first); the last third of the epochs of each is quantization-aware. Follows MicroNets (Banbury
    et al., MLSys 2021, arXiv 2010.11267) in the limits, with evolution instead of gradients.

    Args:
        model: its widths, kernels and depths are searched; weights are starting values.
        train, valid: inputs float32 [n, ...] and classes int64 [n]; candidates are ranked on
            `valid`, so test data should be separate.
        board: a `Board`, or its name.
        latency_ms: limit by the board's assumed cycles per instruction; None for no limit.
        budget: duration, such as ``"15min"``, or number of trainings.
        epochs: of the longest trainings.
        augment: function of a batch of inputs, applied in training.
        store: file of the study; None keeps it in memory.
        progress: called with the study about four times per second.

    Raises:
        DoesNotFitError: no candidate fits the board; the error names the limit, before any
            training.
        WorkloadError: every training failed.
        InvalidArgumentError: data are not pairs of finite float32 inputs and classes, their shapes
            differ, or the model has no output for a class.
    """
    chosen = board if isinstance(board, Board) else boards.board(board)
    for name, data in (("train", train), ("valid", valid)):
        _check(name, data)
    epochs = as_integer("epochs", epochs)
    net = Supernet(derive_space(model, train[0][:2], channel_multiple=4))
    _check_outputs(net, {"train": train, "valid": valid})
    footprint = Footprint(net, train[0][:_CALIBRATION], device=chosen.target)
    limits = limits_of(chosen, latency_ms)
    pool = _pool(footprint, limits, seed)
    if not pool:
        raise DoesNotFitError(
            f"no network of the space fits: {_shortage(footprint, chosen, limits)}",
            where=chosen.name, remedy="choose a larger board, a longer latency, or smaller inputs",
        )  # fmt: skip

    def evaluate(config: Mapping[str, Any], run: Any) -> dict[str, float]:
        module = net.export(config)
        train_classifier(module, train, max(1, round(run.fidelity)), seed=seed, augment=augment)
        return {"accuracy": int8_accuracy(module, valid), **_costs(footprint, config)}

    found = study(
        "board", footprint.space, {"accuracy": "max"},
        estimator=Estimator(evaluate, {"accuracy": "", **_UNITS}),
        analytic=[Estimator(partial(_costs, footprint), _UNITS, Provenance.SIMULATED)],
        constraints={name: f"<= {limit:.0f} {_UNITS[name]}" for name, limit in limits.items()},
        strategy=FittingEvolution(pool, lambda c: _keeps(footprint, c.values, limits)),
        rungs=Asha(max(1.0, epochs / 9), epochs), seed=seed, store=store,
    ).run(budget=Budget.parse(budget), progress=progress)  # fmt: skip
    trained = _trained(found)
    if not trained:
        raise WorkloadError(
            f"no candidate was trained: {first_failure(found)}",
            remedy="check the data, or pass a larger budget",
        )
    best = max(trained, key=lambda trial: (trial.fidelity, trial.values["accuracy"]))
    module = net.export(best.candidate)
    train_classifier(module, train, epochs, seed=seed, augment=augment)
    content = write_network(quantize_model(module, [train[0][:_CALIBRATION]], name="network"))
    firmware = export_firmware(
        content, name="network", device=chosen.target, ram_bytes=chosen.ram,
        flash_bytes=chosen.flash,
    )  # fmt: skip
    predicted = forecast(firmware, ram_bytes=chosen.ram, flash_bytes=chosen.flash)
    return BoardResult(
        found, dict(best.candidate.values), module, content, Fit(chosen, predicted, latency_ms),
        int8_accuracy(module, valid),
    )  # fmt: skip


def _check(name: str, data: Any) -> None:
    is_pair = isinstance(data, (tuple, list)) and len(data) == 2
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in data):
        raise InvalidArgumentError(name, "it is not a pair of tensors, inputs and classes")
    inputs, classes = data
    if len(inputs) != len(classes) or not len(inputs) or classes.dtype != torch.int64:
        raise InvalidArgumentError(
            name, f"it has {len(inputs)} inputs and {len(classes)} classes of {classes.dtype}",
            remedy="pass inputs [n, ...] and int64 classes [n]",
        )  # fmt: skip
    if inputs.dtype != torch.float32 or not inputs.isfinite().all():
        kind = "NaN or infinity" if inputs.dtype == torch.float32 else f"inputs of {inputs.dtype}"
        raise InvalidArgumentError(name, f"it has {kind}", remedy="pass finite float32 inputs")


def _check_outputs(net: Supernet, data: Mapping[str, Data]) -> None:
    """Check that the model maps the inputs to scores of all classes."""
    with torch.no_grad():
        for name, (inputs, classes) in data.items():
            try:
                scores = net(inputs[:2])
            except InvalidArgumentError as error:
                what = error.what.removeprefix("inputs: ")
                raise InvalidArgumentError(name, what, remedy="pass inputs of one shape") from error
            if not isinstance(scores, torch.Tensor) or scores.dim() != 2:
                raise InvalidArgumentError(
                    "model", "its output is not a tensor of scores [n, classes]",
                    remedy="wrap the model so that it returns one score per class",
                )  # fmt: skip
            count, low, high = scores.shape[1], int(classes.min()), int(classes.max())
            if low < 0 or high >= count:
                raise InvalidArgumentError(
                    name, f"classes are {low} to {high}, but the model scores 0 to {count - 1}",
                    remedy="number the classes from 0, or give the last layer more outputs",
                )  # fmt: skip


def _pool(footprint: Footprint, limits: Mapping[str, float], seed: int) -> list[Candidate]:
    """Return candidates that fit, in random order, among them mostly large ones."""
    rng = np.random.default_rng(seed)
    columns = _drawn(footprint, rng)
    found = footprint.predict_many(columns)
    fitting = np.flatnonzero(found.fit(limits))
    fitting = fitting[np.argsort(-found.macs[fitting], kind="stable")]
    largest = fitting[: max(64, round(_LARGEST * len(fitting)))]
    pool: dict[bytes, Candidate] = {}
    for at in rng.permutation(largest).tolist():
        candidate = footprint.space.candidate(
            {name: int(column[at]) for name, column in columns.items()}
        )
        if candidate.id not in pool and _keeps(footprint, candidate.values, limits):
            pool[candidate.id] = candidate
        if len(pool) == 64:
            break
    return list(pool.values())


def train_classifier(
    module: nn.Module,
    data: Data,
    epochs: int,
    *,
    seed: int = 0,
    augment: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Train a classifier, the last third of the epochs as int8 (Jacob et al., arXiv 1712.05877)."""
    inputs, classes = data
    optimizer = torch.optim.AdamW(module.parameters(), 2e-3, weight_decay=1e-3)
    batches = max(1, len(inputs) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * batches)
    norms = following_norms(module, inputs[:1])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module.train()
        for epoch in range(epochs):
            quantized = epoch >= epochs * (1 - _QUANTIZED)
            for batch in torch.randperm(len(inputs))[: batches * _BATCH].split(_BATCH):
                x = inputs[batch] if augment is None else augment(inputs[batch])
                optimizer.zero_grad()
                with as_int8(module, norms) if quantized else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(
                        module(x), classes[batch], label_smoothing=0.1
                    )
                loss.backward()
                optimizer.step()
                schedule.step()
    module.eval()


def int8_accuracy(module: nn.Module, data: Data) -> float:
    """Return the fraction of inputs that a classifier gets right, computing as int8."""
    inputs, classes = data
    norms = following_norms(module, inputs[:1])
    right = 0
    with torch.no_grad(), as_int8(module, norms):
        for part, expected in zip(inputs.split(256), classes.split(256), strict=True):
            right += int((module(part).argmax(1) == expected).sum())
    return right / len(inputs)
