"""Tiles, batch-norm groups and evaluations on real ranks, compared with one process."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from model_uses import check_uses
from slipstream.errors import ChildError, InvalidArgumentError, SlipstreamError
from slipstream.ranks.group import process_group
from slipstream.technique import parse
from slipstream.techniques.spatial.evaluation import Evaluation
from slipstream.techniques.spatial.nn import group_batch_norm, partition
from slipstream.techniques.spatial.window import Window
from slipstream.workload.built import build_from

HEIGHT, WIDTH = 29, 34


class Net(nn.Module):
    """A residual block with a gate from pooled features, then pooling and a linear layer."""

    def __init__(self, first: nn.Conv2d, pool: nn.Module, end: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.pool, self.norm = first, pool, nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Sigmoid())
        self.end = nn.Sequential(*end)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        x = x + self.inner(x)
        return self.end(x * self.gate(x))


def pooled(classes: int = 3) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)


NETS: dict[str, Any] = {
    "1x1": lambda: Net(nn.Conv2d(3, 4, 1), nn.Identity(), pooled()),
    "3x3": lambda: Net(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), pooled()),
    "5x5, stride 2": lambda: Net(nn.Conv2d(3, 4, 5, 2, 2), nn.AvgPool2d(3, 1, 1), pooled()),
    "7x7, stride 2": lambda: Net(
        nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(2), (nn.Flatten(), nn.LazyLinear(3))
    ),
    "dilation": lambda: Net(
        nn.Conv2d(3, 4, (3, 5), padding="same", dilation=2),
        nn.AvgPool2d(2),
        (nn.AdaptiveAvgPool2d(2),),
    ),
    "1x1, stride 2": lambda: Net(nn.Conv2d(3, 4, 1, 2), nn.Identity(), (nn.Conv2d(4, 1, 3),)),
}


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 3, HEIGHT, WIDTH)


def trained(name: str, tiles: tuple[int, int] | None) -> tuple[Any, ...]:
    """Return output, gradients and statistics of one step."""
    torch.manual_seed(0)
    model, x = NETS[name](), images()
    model(x)  # Lazy layers get their size.
    model.load_state_dict(
        {k: v + 0.05 if "num" not in k else v for k, v in model.state_dict().items()}
    )
    keys = list(model.state_dict())
    call: nn.Module = model
    if tiles is not None:
        partition(model, x, *tiles)
        call = DistributedDataParallel(model)
        assert list(model.state_dict()) == keys
    output = call(x)
    (output.flatten(1) * torch.linspace(-1, 1, output[0].numel())).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return output.detach(), gradients, [b.double() for b in model.buffers()]


@pytest.mark.parametrize("tiles", [(2, 1), (1, 3), (2, 2)])
def test_tiles_give_the_numbers_of_one_process(tiles: tuple[int, int]) -> None:
    work = lambda rank: [trained(name, tiles) for name in NETS]  # noqa: E731
    for answer in run_ranks(tiles[0] * tiles[1], work):
        if isinstance(answer, Exception):
            raise answer
        for name, (output, gradients, statistics) in zip(NETS, answer, strict=True):
            expected, theirs, others = trained(name, None)
            largest = max(float(g.abs().max()) for g in theirs)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
            for ours, reference in zip(gradients, theirs, strict=True):
                assert float((ours - reference).abs().max()) <= 1e-5 * largest, name
            for ours, reference in zip(statistics, others, strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def padded(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 2, 1, padding=40), nn.AdaptiveAvgPool2d(1)), images()
    expected = model(x).detach()
    partition(model, x, 1, 3)
    return model(x).detach(), expected


def test_a_tile_may_need_padding_alone() -> None:
    for output, expected in run_ranks(3, padded):
        torch.testing.assert_close(output, expected)


def replicated(rank: int) -> list[torch.Tensor | None]:
    """Return gradients of two replicas with two tiles each."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    torch.manual_seed(0)
    model = NETS["3x3"]()
    partition(model, images(), 2, 1, groups[rank // 2])
    replica = DistributedDataParallel(model)
    replica(images() + rank // 2).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_replicas_of_tiles_give_the_mean_gradients_of_whole_images() -> None:
    expected = []
    for replica in range(2):
        torch.manual_seed(0)
        model = NETS["3x3"]()
        model(images() + replica).square().sum().backward()
        expected.append([p.grad for p in model.parameters()])
    for gradients in run_ranks(4, replicated):
        for ours, first, second in zip(gradients, *expected, strict=True):
            torch.testing.assert_close(ours, (first + second) / 2, rtol=1e-4, atol=1e-4)


def sent(kernel: int, stride: int, tiles: tuple[int, int], rank: int) -> tuple[int, int]:
    """Return bytes sent in the forward pass, and in the backward pass."""
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(3, 2, kernel, stride, kernel // 2)
    model, x = nn.Sequential(layer), images().requires_grad_()
    partition(model, x.detach(), *tiles)
    rows, columns = layer.tiles.own(x.shape[-2:])
    wire = process_group(None).wire
    began = wire.payload_bytes
    tile, size = x[..., rows, columns], (HEIGHT, WIDTH)
    part = layer.on_tile(tile, size)
    middle = wire.payload_bytes
    extended, padding = layer.tiles.extend(tile.detach(), size, layer.windows(), 0.0)
    # Convolutions would copy another layout, and pad an axis of one tile themselves.
    assert extended.is_contiguous()
    assert padding == [0, 0 if tiles[1] > 1 else kernel // 2]
    returned = wire.payload_bytes
    part.sum().backward()
    return middle - began, wire.payload_bytes - returned


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (7, 2), (5, 1)])
@pytest.mark.parametrize("tiles", [(3, 1), (2, 2)])
def test_halos_have_the_bytes_of_the_formula(
    kernel: int, stride: int, tiles: tuple[int, int]
) -> None:
    window = Window(kernel, stride, kernel // 2)
    found = run_ranks(tiles[0] * tiles[1], functools.partial(sent, kernel, stride, tiles))
    each = 5 * 3 * 4
    for rank, bytes_sent in enumerate(found):
        row, column = divmod(rank, tiles[1])
        width = (column + 1) * WIDTH // tiles[1] - column * WIDTH // tiles[1]
        (low, high) = window.needs(HEIGHT, tiles[0])[row]
        rows, columns = window.halo(HEIGHT, tiles[0], row), window.halo(WIDTH, tiles[1], column)
        assert bytes_sent[0] == each * (rows * width + columns * (high - low))
    # What one rank sends in the forward pass comes back as gradients.
    assert sum(b for _, b in found) == sum(f for f, _ in found)


def brute_force(window: Window, size: int, tiles: int, tile: int) -> int:
    """Count the rows of a tile that each other tile reads."""
    bounds = [t * size // tiles for t in range(tiles + 1)]
    output = [t * window.output(size) // tiles for t in range(tiles + 1)]
    owned = set(range(bounds[tile], bounds[tile + 1]))
    count = 0
    for other in set(range(tiles)) - {tile}:
        first = output[other] * window.stride - window.padding
        end = (output[other + 1] - 1) * window.stride - window.padding
        count += len(owned & set(range(first, end + window.dilation * (window.kernel - 1) + 1)))
    return count


@pytest.mark.parametrize("window", [Window(3, 1, 1), Window(7, 2, 3), Window(3, 1, 2, 2)])
def test_the_formula_counts_rows(window: Window) -> None:
    for size in (24, 25, 31):
        for tile in range(3):
            assert window.halo(size, 3, tile) == brute_force(window, size, 3, tile)


def test_a_halo_ends_at_the_neighbouring_tiles() -> None:
    assert Window(5, 1, 2).needs(6, 3) == [(-2, 4), (0, 6), (2, 8)]
    with pytest.raises(InvalidArgumentError, match="3 tiles of 6 rows or columns are smaller"):
        Window(9, 1, 4).needs(6, 3)
    for wrong in (lambda: Window(0, 1, 0), lambda: Window(3, 1, 1).halo(8, 2, 2)):
        with pytest.raises(InvalidArgumentError):
            wrong()


def after_small_images(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    model, x = NETS["3x3"]().eval(), images()
    expected = model(x)
    partition(model, x, 2, 1)
    with contextlib.suppress(InvalidArgumentError):
        model(x[..., :1, :])
    return model(x).detach(), expected.detach()


def test_images_that_are_too_small_do_not_affect_others() -> None:
    for found, expected in run_ranks(2, after_small_images):
        torch.testing.assert_close(found, expected)


def refused(case: str, rank: int) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    if case == "mean":
        partition(nn.Sequential(conv, nn.GroupNorm(2, 4)), images(), 2, 1)
    if case == "world":
        partition(conv, images(), 2, 2)
    if case == "small":
        partition(nn.Sequential(nn.Conv2d(3, 4, 9, padding=4)), images()[..., :1, :], 2, 1)
    if case == "halved":
        layers = [nn.Conv2d(3, 3, 3, 2, 1) for _ in range(6)]
        partition(nn.Sequential(*layers), images(), 2, 1)
    if case == "circular":
        partition(nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode="circular")), images(), 2, 1)
    if case == "groups":
        group_batch_norm(nn.BatchNorm1d(3), 3)
    if case == "none":
        group_batch_norm(conv, 2)
    if case == "unbatched":
        partition(conv, images()[0], 2, 1)
    if case == "keyword":
        partition(conv, images(), 2, 1)(input=images())
    if case == "twice":
        partition(partition(nn.Sequential(conv), images(), 2, 1), images(), 2, 1)
    if case in ("no tensor", "ragged"):
        rows = (lambda i: list(i)) if case == "no tensor" else (lambda i: torch.ones(len(i), i[-1]))
        with Evaluation(lambda model, i: rows(i), 8, 2, np.mean) as evaluation:
            evaluation.start(conv)
    if case == "pickle":
        pickle.dumps(partition(nn.Sequential(conv), images(), 2, 1))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mean", "combines pixels outside of layers that exchange halos"),
        ("world", "2 x 2 tiles are not the group's 2 ranks"),
        ("small", "1 x 34 pixels do not make 2 x 1 tiles"),
        ("halved", "2 tiles of 2 rows or columns are smaller than the halo"),
        ("circular", "layer '0' cannot compute tiles: its padding mode is circular"),
        ("groups", "2 ranks do not make groups of 3"),
        ("none", "has no batch norm"),
        ("unbatched", "is a tensor of shape [3, 29, 34]"),
        ("keyword", "the first positional argument of the model is missing"),
        ("twice", "is divided already"),
        ("no tensor", "returned scores of type list for 2 examples"),
        ("ragged", "returned different shapes or dtypes per example: ["),
        ("pickle", "cannot be pickled"),
    ],
)
def test_what_cannot_be_divided_is_refused(case: str, message: str) -> None:
    for error in run_ranks(2, functools.partial(refused, case)):
        assert isinstance(error, SlipstreamError)
        assert message in str(error)


def normalised(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer, x = nn.BatchNorm1d(3), torch.randn(16, 3)
    group_batch_norm(layer, 2)
    return layer(x[4 * rank : 4 * rank + 4]).detach(), layer.running_var


def test_batch_norm_groups_normalise_the_samples_of_their_ranks() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    found = run_ranks(4, normalised)
    for group in range(2):
        layer = nn.BatchNorm1d(3)
        expected = layer(x[8 * group : 8 * group + 8])
        ours = torch.cat([found[2 * group][0], found[2 * group + 1][0]])
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[2 * group][1], layer.running_var, rtol=1e-5, atol=1e-6)


def used(kind: str, rank: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = NETS["3x3"]()
        if kind == "groups":
            return group_batch_norm(model, 2)
        return partition(model, images(), 2, 1)

    # DDP is tested above; pickling is refused, and batch norm takes batches only.
    check_uses(make, images(), except_=("DDP", "pickle", "unbatched", "torch.compile"))


@pytest.mark.parametrize("kind", ["tiles", "groups"])
def test_changed_models_bear_common_uses(kind: str) -> None:
    for error in run_ranks(2, functools.partial(used, kind)):
        if error is not None:
            raise error


def score(model: nn.Module, indices: Sequence[int]) -> torch.Tensor:
    torch.manual_seed(2)
    x, targets = torch.randn(23, 8), torch.randint(0, 3, (23,))
    chosen = list(indices)
    return nn.functional.cross_entropy(model(x[chosen]), targets[chosen], reduction="none")


def broken(scores: Any) -> float:
    raise ValueError("no references")


def evaluated(examples: int, metric: Any, rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout())
    with Evaluation(score, examples, 4, metric) as evaluation:
        first, second = evaluation.start(model), evaluation.start(model)
        assert model.training
        return [second.result(), first.result()]


@pytest.mark.parametrize(("ranks", "examples"), [(2, 23), (3, 7)])
def test_metrics_are_exactly_those_of_one_process(ranks: int, examples: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout()).eval()
    batches = [range(at, min(at + 4, examples)) for at in range(0, examples, 4)]
    with torch.no_grad():
        scores = torch.cat([score(model, batch) for batch in batches])
    expected = float(np.mean(scores.double().numpy()))
    # With 3 ranks, one has no batch.
    for answer in run_ranks(ranks, functools.partial(evaluated, examples, np.mean)):
        assert answer == [expected, expected]


def test_a_failed_metric_is_reported_on_all_ranks() -> None:
    for error in run_ranks(2, functools.partial(evaluated, 4, broken)):
        assert isinstance(error, ChildError)
        assert "no references" in str(error)
    for error in run_ranks(1, functools.partial(evaluated, 4, lambda scores: 0.0)):
        assert "cannot be imported in another process" in str(error)


def parts() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *pooled(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, (images(), torch.randint(0, 2, (5,))), nn.functional.cross_entropy, optimizer


def stepped(text: str, rank: int) -> tuple[list[float], int]:
    built = build_from(parts(), parse(text), 0, "test")
    return [float(built.step()) for _ in range(4)], built.samples


@pytest.mark.parametrize("text", ["spatial:2", "ddp:2+batch_norm_groups:2"])
def test_techniques_train_like_one_process(text: str) -> None:
    built = build_from(parts(), (), 0, "test")
    losses = [float(built.step()) for _ in range(4)]
    for answer in run_ranks(2, functools.partial(stepped, text)):
        assert answer[0] == pytest.approx(losses, rel=1e-4)
