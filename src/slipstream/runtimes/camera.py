"""Simulate a camera: sensor, demosaicing, white balance, tone and sharpening.

The scene is an sRGB image. It is converted to linear light, sampled through a Bayer filter, and
developed by an image signal processor, whose settings differ between phones. No stage moves edges.

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
# Response of a typical sensor to daylight, RGB.
_NEUTRAL = (0.5, 1.0, 0.625)
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Camera(Stage):
    """Simulated camera of a phone; a stage between decoding and the codec.

    The default settings leave an image unchanged.

    Attributes:
        demosaic: interpolation of a pixel's two missing colours; ``none`` for a sensor with all
            three per pixel.
        warmth: white balance error in stops between red and blue; positive is warm.
        exposure: exposure in stops.
        contrast: strength of an S curve on sRGB values; 0 is none, 1 doubles the middle slope.
        saturation: factor of the saturation.
        denoise: standard deviation in pixels of a Gaussian blur of the raw colours.
        sharpen: weight of an unsharp mask of one pixel.
        noise: standard deviation of shot noise at white, relative to white; depends on `seed` only.
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
        image: NDArray[np.uint8] = self.develop(value[None])[0]
        return image

    def develop(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return images uint8 [N, H, W, 3] of scenes uint8 [N, H, W, 3]."""
        import torch

        if replace(self, seed=0) == Camera():
            return images.copy()
        scene = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
        image = self._developed(self._raw(_to_light(scene)))
        codes = (image.clamp(0, 1) * 255).round().to(torch.uint8)
        return np.ascontiguousarray(codes.permute(0, 2, 3, 1).numpy())

    def _raw(self, light: Tensor) -> Tensor:
        """Simulate the sensor: [N, 1, H, W] in RGGB order, or [N, 3, H, W] without a filter."""
        import torch

        raw = light * _channels(_NEUTRAL)
        if self.demosaic != "none":
            raw = torch.stack([_cells(raw[:, c], (c,)) for c in range(3)]).sum(0)[:, None]
        if self.noise:
            generator = torch.Generator().manual_seed(self.seed)
            spread = torch.randn(raw.shape[1:], generator=generator)
            raw = raw + self.noise * raw.clamp_min(1e-4).sqrt() * spread
        return (raw.clamp(0, 1) * _LEVELS).round() / _LEVELS

    def _developed(self, raw: Tensor) -> Tensor:
        """Develop raw data to sRGB [N, 3, H, W]."""
        colours = _DEMOSAIC[self.demosaic](raw) if self.demosaic != "none" else raw
        if self.denoise:
            colours = _blurred(colours, self.denoise)
        error = 2.0 ** (self.warmth / 2), 1.0, 2.0 ** (-self.warmth / 2)
        gains = [e / n * 2.0**self.exposure for e, n in zip(error, _NEUTRAL, strict=True)]
        image = _to_srgb((colours * _channels(gains)).clamp(0, 1))
        if self.contrast:
            x = image
            image = x + self.contrast * 2 * x * (1 - x) * (2 * x - 1)
        if self.saturation != 1:
            grey = (image * _channels(_LUMA)).sum(1, keepdim=True)
            image = grey + self.saturation * (image - grey)
        if self.sharpen:
            image = image + self.sharpen * (image - _blurred(image, 1.0))
        return image


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
    """Return `plane` [N, H, W] at the filter's cells of `colours`, and 0 elsewhere."""
    import torch

    cells = torch.zeros_like(plane)
    places = {0: ((0, 0),), 1: ((0, 1), (1, 0)), 2: ((1, 1),)}
    for row, column in (place for colour in colours for place in places[colour]):
        cells[:, row::2, column::2] = plane[:, row::2, column::2]
    return cells


def _filtered(planes: Tensor, kernel: Tensor) -> Tensor:
    """Filter planes [N, C, H, W] with one kernel; mirrored borders preserve the Bayer pattern."""
    import torch.nn.functional as f

    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = f.pad(planes, (left, left, up, up), mode="reflect")
    return f.conv2d(padded.flatten(0, 1)[:, None], kernel[None, None]).view_as(planes)


def _blurred(planes: Tensor, sigma: float) -> Tensor:
    import torch

    radius = max(1, min(round(3 * sigma), min(planes.shape[-2:]) - 1))
    line = torch.exp(-(torch.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
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
    """Interpolate bilinearly, corrected by the gradient of the pixel's own colour."""
    import torch

    at_green = _kernel((0, 0, -1, 0, 0), (0, 0, 2, 0, 0), (-1, 2, 4, 2, -1),
                       (0, 0, 2, 0, 0), (0, 0, -1, 0, 0)) / 8  # fmt: skip
    along_row = _kernel((0, 0, 0.5, 0, 0), (0, -1, 0, -1, 0), (-1, 4, 5, 4, -1),
                     (0, -1, 0, -1, 0), (0, 0, 0.5, 0, 0)) / 8  # fmt: skip
    diagonal_kernel = _kernel((0, 0, -1.5, 0, 0), (0, 2, 0, 2, 0), (-1.5, 0, 6, 0, -1.5),
                     (0, 2, 0, 2, 0), (0, 0, -1.5, 0, 0)) / 8  # fmt: skip
    green, horizontal, vertical, diagonal = (
        _filtered(raw, k)[:, 0]
        for k in (at_green, along_row, along_row.T.contiguous(), diagonal_kernel)
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
    """Interpolate green along the smoother direction, and red and blue by colour differences."""
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
