"""A bucket of gradients, and the residuals of error feedback between steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True)
class Layout:
    """Parameters of a bucket and their offsets.

    Attributes:
        names: parameter names, as in ``model.named_parameters()``.
        shapes: shapes of the parameters.
        offsets: offset of each parameter in the bucket, in elements.
        numel: number of elements of the bucket.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Return the layout of contiguous parameters."""
        offsets, at = [], 0
        for shape in shapes.values():
            offsets.append(at)
            at += torch.Size(shape).numel()
        return cls(tuple(shapes), tuple(shapes.values()), tuple(offsets), at)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Offset and length of every parameter, in elements."""
        lengths = [torch.Size(shape).numel() for shape in self.shapes]
        return list(zip(self.offsets, lengths, strict=True))


@dataclass(frozen=True)
class Bucket:
    """One worker's gradients of some parameters, float32 [layout.numel].

    Attributes:
        idle: parameters with a zero gradient in this step, for example unused ones: their
            residuals are not sent, because their decoded gradient may be discarded.
    """

    flat: torch.Tensor
    layout: Layout
    idle: tuple[str, ...] = ()


@dataclass
class Memory:
    """State of one worker between steps, by parameter, since buckets may be rebuilt.

    Attributes:
        step: number of steps with exchanged gradients.
        vectors: PowerSGD's right factors, float32 [rank, columns].
    """

    step: int = 0
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    _residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    _flat: dict[Layout, torch.Tensor] = field(default_factory=dict)

    def residual(self, layout: Layout) -> torch.Tensor:
        """Return the unsent residual of a bucket, float32 [layout.numel], to be modified in place.

        If parameters were in other buckets before, their residuals move to this one.
        """
        cached = self._flat.get(layout)
        if cached is not None:
            return cached
        flat = torch.zeros(layout.numel)
        moved = set(layout.names)
        for name, (at, count) in zip(layout.names, layout.spans, strict=True):
            view = flat[at : at + count]
            if name in self._residuals:
                view.copy_(self._residuals[name])
            self._residuals[name] = view
        self._flat = {k: v for k, v in self._flat.items() if moved.isdisjoint(k.names)}
        self._flat[layout] = flat
        return flat

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all state, by parameter."""
        return {
            "step": self.step,
            "residual": {name: t.clone() for name, t in self._residuals.items()},
            "vectors": {name: t.clone() for name, t in self.vectors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Restore a `state_dict`.

        Args:
            sizes: number of elements of each parameter of the model.

        Raises:
            InvalidArgumentError: the state is from another model, or not finite.
        """
        for name, residual in state["residual"].items():
            if sizes.get(name) != residual.numel():
                expected = f"{sizes[name]} elements" if name in sizes else "no such parameter"
                raise InvalidArgumentError(
                    "state",
                    f"it has {residual.numel()} elements of '{name}', the model has {expected}",
                    remedy="load the state that was saved with this model",
                )  # fmt: skip
            if not bool(residual.isfinite().all()):
                raise InvalidArgumentError(
                    "state", f"its residual of '{name}' is not finite",
                    remedy="load an earlier checkpoint",
                )  # fmt: skip
        self.step = int(state["step"])
        self._flat = {}
        self._residuals = {name: t.clone() for name, t in state["residual"].items()}
        # Encoders require contiguous vectors.
        self.vectors = {
            name: vector.float().clone(memory_format=torch.contiguous_format)
            for name, vector in state["vectors"].items()
        }
