"""A bucket of gradients, and what error feedback keeps of it between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Layout:
    """Which parameters a bucket holds, and where.

    Attributes:
        names: of the parameters, as in ``model.named_parameters()``.
        shapes: theirs.
        offsets: of their first numbers in the bucket.
        numel: of the bucket.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Parameters one after another."""
        offsets, at = [], 0
        for shape in shapes.values():
            offsets.append(at)
            at += torch.Size(shape).numel()
        return cls(tuple(shapes), tuple(shapes.values()), tuple(offsets), at)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Offset and length of every parameter."""
        lengths = [torch.Size(shape).numel() for shape in self.shapes]
        return list(zip(self.offsets, lengths, strict=True))


@dataclass(frozen=True)
class Bucket:
    """One worker's gradients of some parameters, float32 [layout.numel].

    Attributes:
        idle: parameters whose gradient is zero in this step, as where nobody used them: what is
            kept of them stays kept, because their decoded gradient may not be taken.
    """

    flat: torch.Tensor
    layout: Layout
    idle: tuple[str, ...] = ()


@dataclass
class Memory:
    """What one worker keeps between steps, by parameter: buckets may be rebuilt.

    Attributes:
        step: of how many steps gradients were exchanged.
        vectors: PowerSGD's right factors, float32 [rank, columns].
    """

    step: int = 0
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)
    _flat: dict[Layout, torch.Tensor] = field(default_factory=dict)

    def residual(self, layout: Layout) -> torch.Tensor:
        """What was not sent yet of the bucket's parameters, float32 [layout.numel]; in place.

        Where parameters were in other buckets before, what is kept of them moves along.
        """
        known = self._flat.get(layout)
        if known is not None:
            return known
        flat = torch.zeros(layout.numel)
        moved = set(layout.names)
        for name, (at, count) in zip(layout.names, layout.spans, strict=True):
            view = flat[at : at + count]
            if name in self._kept:
                view.copy_(self._kept[name])
            self._kept[name] = view
        self._flat = {one: kept for one, kept in self._flat.items() if moved.isdisjoint(one.names)}
        self._flat[layout] = flat
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything, by parameter."""
        return {
            "step": self.step,
            "residual": {name: kept.clone() for name, kept in self._kept.items()},
            "vectors": {name: kept.clone() for name, kept in self.vectors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Take what `state_dict` gave.

        Args:
            sizes: how many numbers each parameter of the model has.

        Raises:
            InvalidArgumentError: another model's, or numbers that are not finite.
        """
        for name, kept in state["residual"].items():
            if sizes.get(name) != kept.numel():
                has = f"{sizes[name]} numbers" if name in sizes else "no such parameter"
                raise InvalidArgumentError(
                    "state", f"it keeps {kept.numel()} numbers of '{name}', the model has {has}",
                    remedy="load the state that was saved beside this model",
                )  # fmt: skip
            if not bool(kept.isfinite().all()):
                raise InvalidArgumentError(
                    "state", f"what it keeps of '{name}' is not finite",
                    remedy="load an earlier checkpoint",
                )  # fmt: skip
        self.step = int(state["step"])
        self._flat = {}
        self._kept = {name: kept.clone() for name, kept in state["residual"].items()}
        # Encoders read these as they lie in memory.
        self.vectors = {
            name: kept.float().clone(memory_format=torch.contiguous_format)
            for name, kept in state["vectors"].items()
        }
