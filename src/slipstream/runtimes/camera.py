"""A camera between the scene and the file: sensor, demosaicing, white balance, tone, sharpening.

What stands before a picture here is a picture: it is taken back to light, sampled through a Bayer
filter, and developed as a phone's image signal processor does. Phones differ in these settings, and
that is what a model sees of them. Geometry stays: no stage moves an edge by a part of a pixel.

Source of the gradient-corrected filters: Malvar, He and Cutler, "High-quality linear interpolation
for demosaicing of Bayer-patterned color images", ICASSP 2004; of the edge-directed rule: Hamilton
and Adams, US patent 5,629,734, 1997. The sRGB curve is IEC 61966-2-1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes.preprocessing import Stage

if TYPE_CHECKING:
    from torch import Tensor

Demosaic = Literal["none", "bilinear", "malvar", "edge"]
_LEVELS = 1023.0
# Of daylight, as a usual sensor sees it: green counts most.
_NEUTRAL = (0.5, 1.0, 0.625)
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Camera(Stage):
    """How a phone develops what its sensor saw; a stage between decoding and the codec.

    With every setting at its default it leaves a picture unchanged.

    Attributes:
        demosaic: how the two colours that a pixel lacks are found; ``none`` for a sensor that has
            all three in every pixel.
        warmth: error of the white balance, in stops between red and blue; above 0 is warm.
        exposure: in stops.
        contrast: of an S curve on the sRGB values; 0 is none, 1 doubles the slope in the middle.
        saturation: of colours; 1 leaves them.
        denoise: standard deviation of a Gaussian over the raw colours, in pixels.
        sharpen: share of an unsharp mask of one pixel that is added.
        noise: standard deviation of shot noise at white, as a share of white; drawn by `seed`, the
            same for the same picture.
    """

    name = "camera"
    family = "image"
    order = 3
    demosaic: Demosaic = "none"
    warmth: float = 0.0
    exposure: float = 0.0
    contrast: float = 0.0
    saturation: float = 1.0
    denoise: float = 0.0
    sharpen: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.demosaic not in get_args(Demosaic):
            raise UnknownNameError("demosaicing", self.demosaic, get_args(Demosaic))
        for name in ("saturation", "denoise", "sharpen", "noise"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(name, f"{getattr(self, name):g} is negative")

    def __call__(self, value: NDArray[np.uint8]) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self.develop(value[None])[0]
        return picture

    def develop(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Pictures uint8 [N, H, W, 3] of these scenes uint8 [N, H, W, 3]."""
        import torch

        if replace(self, seed=0) == Camera():
            return images.copy()
        scene = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
        picture = self._developed(self._raw(_to_light(scene)))
        codes = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
        return np.ascontiguousarray(codes.permute(0, 2, 3, 1).numpy())

    def _raw(self, light: Tensor) -> Tensor:
        """What the sensor gives, white at 1: [N, 1, H, W] with red at even rows and columns, or
        [N, 3, H, W] without a filter."""
        import torch

        raw = light * _channels(_NEUTRAL)
        if self.demosaic != "none":
            raw = torch.stack([_cells(raw[:, c], (c,)) for c in range(3)]).sum(0)[:, None]
        if self.noise:
            drawn = torch.Generator().manual_seed(self.seed)
            spread = torch.randn(raw.shape[1:], generator=drawn)
            raw = raw + self.noise * raw.clamp_min(1e-4).sqrt() * spread
        return (raw.clamp(0, 1) * _LEVELS).round() / _LEVELS

    def _developed(self, raw: Tensor) -> Tensor:
        """sRGB [N, 3, H, W] of what `_raw` gives."""
        colours = _DEMOSAIC[self.demosaic](raw) if self.demosaic != "none" else raw
        if self.denoise:
            colours = _blurred(colours, self.denoise)
        error = 2.0 ** (self.warmth / 2), 1.0, 2.0 ** (-self.warmth / 2)
        gains = [e / n * 2.0**self.exposure for e, n in zip(error, _NEUTRAL, strict=True)]
        picture = _to_srgb((colours * _channels(gains)).clamp(0, 1))
        if self.contrast:
            x = picture
            picture = x + self.contrast * 2 * x * (1 - x) * (2 * x - 1)
        if self.saturation != 1:
            grey = (picture * _channels(_LUMA)).sum(1, keepdim=True)
            picture = grey + self.saturation * (picture - grey)
        if self.sharpen:
            picture = picture + self.sharpen * (picture - _blurred(picture, 1.0))
        return picture


def _channels(values: object) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)[None, :, None, None]


def _to_light(srgb: Tensor) -> Tensor:
    import torch

    return torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _to_srgb(light: Tensor) -> Tensor:
    import torch

    return torch.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def _cells(plane: Tensor, colours: tuple[int, ...]) -> Tensor:
    """`plane` [N, H, W] where the filter has one of `colours`, else 0."""
    import torch

    kept = torch.zeros_like(plane)
    places = {0: ((0, 0),), 1: ((0, 1), (1, 0)), 2: ((1, 1),)}
    for row, column in (place for colour in colours for place in places[colour]):
        kept[:, row::2, column::2] = plane[:, row::2, column::2]
    return kept


def _filtered(planes: Tensor, kernel: Tensor) -> Tensor:
    """Planes [N, C, H, W], each with one kernel; the border mirrored, which keeps the pattern."""
    import torch.nn.functional as f

    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = f.pad(planes, (left, left, up, up), mode="reflect")
    return f.conv2d(padded.flatten(0, 1)[:, None], kernel[None, None]).view_as(planes)


def _blurred(planes: Tensor, sigma: float) -> Tensor:
    import torch

    reach = max(1, min(round(3 * sigma), min(planes.shape[-2:]) - 1))
    line = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    line = (line / line.sum()).float()
    return _filtered(_filtered(planes, line[None]), line[:, None])


def _kernel(*rows: tuple[float, ...]) -> Tensor:
    import torch

    return torch.tensor(rows, dtype=torch.float32)


def _bilinear(raw: Tensor) -> Tensor:
    import torch

    cross = _kernel((0, 1, 0), (1, 4, 1), (0, 1, 0)) / 4
    square = _kernel((1, 2, 1), (2, 4, 2), (1, 2, 1)) / 4
    planes = [_filtered(_cells(raw[:, 0], (c,))[:, None], k)
              for c, k in ((0, square), (1, cross), (2, square))]  # fmt: skip
    return torch.cat(planes, 1)


def _malvar(raw: Tensor) -> Tensor:
    """Bilinear, corrected by the gradient of the colour that the pixel has."""
    import torch

    at_green = _kernel((0, 0, -1, 0, 0), (0, 0, 2, 0, 0), (-1, 2, 4, 2, -1),
                       (0, 0, 2, 0, 0), (0, 0, -1, 0, 0)) / 8  # fmt: skip
    beside = _kernel((0, 0, 0.5, 0, 0), (0, -1, 0, -1, 0), (-1, 4, 5, 4, -1),
                     (0, -1, 0, -1, 0), (0, 0, 0.5, 0, 0)) / 8  # fmt: skip
    across = _kernel((0, 0, -1.5, 0, 0), (0, 2, 0, 2, 0), (-1.5, 0, 6, 0, -1.5),
                     (0, 2, 0, 2, 0), (0, 0, -1.5, 0, 0)) / 8  # fmt: skip
    green, horizontal, vertical, diagonal = (
        _filtered(raw, k)[:, 0] for k in (at_green, beside, beside.T.contiguous(), across)
    )
    mosaic = raw[:, 0]
    red, blue = mosaic.clone(), mosaic.clone()
    red[:, 0::2, 1::2] = horizontal[:, 0::2, 1::2]
    red[:, 1::2, 0::2] = vertical[:, 1::2, 0::2]
    red[:, 1::2, 1::2] = diagonal[:, 1::2, 1::2]
    blue[:, 1::2, 0::2] = horizontal[:, 1::2, 0::2]
    blue[:, 0::2, 1::2] = vertical[:, 0::2, 1::2]
    blue[:, 0::2, 0::2] = diagonal[:, 0::2, 0::2]
    return torch.stack([red, _cells(mosaic, (1,)) + _cells(green, (0, 2)), blue], 1)


def _edge(raw: Tensor) -> Tensor:
    """Green along the direction that changes less; red and blue by their difference to green."""
    import torch

    mosaic = raw[:, 0]
    first = _kernel((1, 0, -1))
    second = _kernel((-1, 0, 2, 0, -1))
    mean, correct = _kernel((1, 0, 1)) / 2, second / 4
    across = _filtered(raw, mean) + _filtered(raw, correct)
    down = _filtered(raw, mean.T) + _filtered(raw, correct.T)
    rough_across = _filtered(raw, first).abs() + _filtered(raw, second).abs()
    rough_down = _filtered(raw, first.T).abs() + _filtered(raw, second.T).abs()
    chosen = torch.where(rough_across < rough_down, across, down)
    chosen = torch.where(rough_across == rough_down, (across + down) / 2, chosen)[:, 0]
    green = _cells(mosaic, (1,)) + _cells(chosen, (0, 2))
    square = _kernel((1, 2, 1), (2, 4, 2), (1, 2, 1)) / 4
    red, blue = (
        green + _filtered(_cells(mosaic - green, (c,))[:, None], square)[:, 0] for c in (0, 2)
    )
    return torch.stack([red, green, blue], 1)


_DEMOSAIC = {"bilinear": _bilinear, "malvar": _malvar, "edge": _edge}
