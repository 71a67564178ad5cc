"""A small residual network that classifies noisy discs, squares, crosses and rings.

    python examples/image_classifier.py --steps 100
    slipstream advise examples/image_classifier.py:make_workload

The images are drawn from a seed, so nothing is downloaded. `make_inference` is the same model
as a service would run it: in eval mode, without a loss or an optimizer.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SHAPES = ("disc", "square", "cross", "ring")
SIDE = 32


class Residual(nn.Module):
    """Two convolutions with a shortcut; a stride halves the image."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def make_model(width):
    """Three stages of residual blocks, the average over the image, one linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width),
        Residual(width, 2 * width, stride=2),
        Residual(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, len(SHAPES)),
    )


def draw(batch_size):
    """Images [batch, 1, 32, 32] with one shape each, and which shape it is, int64 [batch]."""
    labels = torch.randint(len(SHAPES), (batch_size,))
    radius = torch.randint(5, 10, (batch_size, 1, 1))
    centre = torch.randint(10, SIDE - 10, (2, batch_size, 1, 1))
    across = torch.arange(SIDE)[None, None, :] - centre[0]
    down = torch.arange(SIDE)[None, :, None] - centre[1]
    distance = (across**2 + down**2).float().sqrt()
    inside = (across.abs() <= radius) & (down.abs() <= radius)
    bars = (across.abs() <= 1) | (down.abs() <= 1)
    shapes = torch.stack(
        [distance <= radius, inside, inside & bars, (distance - radius).abs() <= 1.5]
    )
    images = shapes[labels, torch.arange(batch_size)].float()
    return (images + 0.5 * torch.randn_like(images)).unsqueeze(1), labels


def make_workload(batch_size=16, width=16):
    """The model, one batch, the loss and the optimizer."""
    model = make_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return model, draw(batch_size), cross_entropy, optimizer


def make_inference(batch_size=1, width=16):
    """The model in eval mode, and images to classify."""
    model = make_model(width).eval()
    images, _ = draw(batch_size)
    return model, images


def main():
    parser = argparse.ArgumentParser(description="Train a small residual network.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, _, loss_of, optimizer = make_workload(options.batch_size)
    for step in range(1, options.steps + 1):
        images, labels = draw(options.batch_size)
        optimizer.zero_grad()
        scores = model(images)
        loss = loss_of(scores, labels)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 20 == 0:
            right = (scores.argmax(1) == labels).float().mean().item()
            print(f"step {step:4d}  loss {loss.item():.3f}  right {100 * right:.0f} %")


if __name__ == "__main__":
    main()
