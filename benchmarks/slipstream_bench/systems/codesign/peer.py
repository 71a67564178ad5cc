"""Latencies of ZigZag (zigzag-dse 3.9.1, Mei et al., IEEE TC 2021), measured once, 2026-11-29.

Its chip ``edge_tpu_like``: 8 x 8 x 4 x 4 multipliers of int8 for output channels, input channels
and positions, 2 MB of memory, 8 bytes per cycle of DRAM, optimised for latency.

To measure again, install zigzag-dse==3.9.1 and six in a separate environment, and time this
call for each network::

    from zigzag.api import get_hardware_performance_zigzag

    folder = Path(zigzag.__file__).parent / "inputs"
    *_, found = get_hardware_performance_zigzag(
        workload=f"{folder}/workload/resnet18.onnx",
        accelerator=f"{folder}/hardware/edge_tpu_like.yaml",
        mapping=f"{folder}/mapping/edge_tpu_like.yaml", opt="latency",
    )
    for cost, _ in found[0][1]:
        print(cost.layer.layer_dim_sizes.data, cost.latency_total2)

A row of the table below has G, K * G, C * G, OX and FX of a layer, and ``latency_total2`` as its
cycles. The stride is that of the network: a convolution in ``found`` has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.hardware import LayerShape

SECONDS = {"resnet18": 222.3, "mobilenetv2": 241.6, "alexnet": 495.9}
"""Wall time of the call for a network on one chip, on one core."""
# Groups, output channels, input channels, output width, kernel, stride, cycles, layers.
_LAYERS = {
    "resnet18": """
        1 64 3 112 7 2 326146 1
        1 64 64 56 3 1 137986 4
        1 128 64 28 3 2 81538 1
        1 128 64 28 1 2 18817 1
        1 128 128 28 3 1 125442 3
        1 256 128 14 3 2 83730 1
        1 256 128 14 1 2 10498 1
        1 256 256 14 3 1 155264 3
        1 512 256 7 3 2 154017 1
        1 512 256 7 1 2 19329 1
        1 512 512 7 3 1 299585 3
        1 1000 512 1 1 1 64447 1
    """,
    "mobilenetv2": """
        1 32 3 112 3 2 68993 1
        32 32 32 112 3 1 275970 1
        1 16 32 112 1 1 75265 1
        1 96 16 112 1 1 175617 1
        96 96 96 56 3 2 319874 1
        1 24 96 56 1 1 47041 1
        1 144 24 56 1 1 65857 2
        144 144 144 56 3 1 310466 1
        1 24 144 56 1 1 67034 1
        144 144 144 28 3 2 119954 1
        1 32 144 28 1 1 17642 1
        1 192 32 28 1 1 21953 3
        192 192 192 28 3 1 103490 2
        1 32 192 28 1 1 23522 2
        192 192 192 14 3 2 42650 1
        1 64 192 14 1 1 6050 1
        1 384 64 14 1 1 9986 4
        384 384 384 14 3 1 64706 4
        1 64 384 14 1 1 10946 3
        1 96 384 14 1 1 12864 1
        1 576 96 14 1 1 19009 3
        576 576 576 14 3 1 97058 2
        1 96 576 14 1 1 18578 2
        576 576 576 7 3 2 32906 1
        1 160 576 7 1 1 13681 1
        1 960 160 7 1 1 23922 3
        960 960 960 7 3 1 40442 3
        1 160 960 7 1 1 22321 2
        1 320 960 7 1 1 43201 1
        1 1280 320 7 1 1 57761 1
        1 1000 1280 1 1 1 160227 1
    """,
    "alexnet": """
        1 96 3 54 11 4 296079 1
        2 256 96 26 5 1 242702 1
        1 384 256 12 3 1 130320 1
        2 384 384 12 3 1 100226 1
        2 256 384 12 3 1 69122 1
        1 4096 9216 1 1 1 4719298 1
        1 4096 4096 1 1 1 2097730 1
        1 1000 4096 1 1 1 512207 1
    """,
}


def layers(network: str) -> Iterator[tuple[LayerShape, int]]:
    """Yield the shape of each layer, and ZigZag's cycles."""
    for line in filter(None, map(str.strip, _LAYERS[network].splitlines())):
        groups, outputs, inputs, width, kernel, stride, cycles, count = map(int, line.split())
        size = (width - 1) * stride + kernel
        shape = LayerShape(
            1, inputs, outputs, size, size, kernel, kernel, (stride, stride), groups=groups
        )
        for _ in range(count):
            yield shape, cycles
