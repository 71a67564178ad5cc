"""The same small training in the shapes people write it in, and its losses as a workload."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

from slipstream.workload import build_from

STEPS = 4

_MAKE = """\
import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))

"""

FUNCTION = (
    _MAKE
    + """
def make(rate=1e-2):
    model = Net()
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return model, (images, labels), F.cross_entropy, optimizer
"""
)

INLINE = (
    _MAKE
    + """
def make(rate=1e-2):
    return {
        "model": (net := Net()),  # the one that is trained
        "batch": (torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))),
        "loss": lambda output, labels: F.cross_entropy(output, labels),
        "optimizer": torch.optim.Adam(
            net.parameters(),
            lr=rate,
        ),
    }
"""
)

PLAIN = (
    _MAKE
    + f"""
model = Net()
images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range({STEPS}):
    optimizer.zero_grad()
    output = model(images)
    loss = F.cross_entropy(output, labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
)

MAIN = (
    _MAKE
    + f"""
from torch import optim
losses = []

def train(net, batches, opt):
    for x, y in batches:
        prediction = net(x)
        # What is compared
        loss = F.cross_entropy(
            prediction, y
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))

def main():
    model = Net()
    batch = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))
    optimizer = optim.Adam(model.parameters(), 1e-2)
    train(model, [batch] * {STEPS}, optimizer)

if __name__ == "__main__":
    main()
"""
)

CLASS = (
    _MAKE
    + f"""
losses = []

class Trainer:
    def __init__(self, rate):
        self.net = Net()
        self.batch = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=rate)

    def train(self):
        step = 0
        for step in range({STEPS}):
            x, y = self.batch
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())

Trainer(1e-2).train()
"""
)

_BLOCKS = """\
from functools import partial

import torch
from torch import nn
from torch.nn import Dropout as Drop
import torch.nn.functional as F

Act = nn.ReLU


class Still(nn.Dropout):
    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self, width, drop=nn.Dropout):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.drop: nn.Dropout = drop(0.1)
        self.last = Drop(p=0.2)
        assert isinstance(self.last, nn.Dropout)

    def forward(self, x):
        return x + self.last(self.second(self.drop(F.relu(self.first(x)))))


def head(width, drop=partial(nn.Dropout, 0.1)):
    layers = [drop(), Still()]
    layers.append(nn.Linear(width, 4))
    return nn.Sequential(*layers)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.head = head(8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

"""

BLOCKS = (
    _BLOCKS
    + """
def make():
    teacher = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    model = Net()
    images, labels = torch.randn(6, 3), torch.randint(0, 4, (6,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, (images, labels), F.cross_entropy, optimizer
"""
)
"""A model of several blocks, each of several parts of one class, and another model."""

SCRIPTS = {"plain": PLAIN, "main": MAIN, "class": CLASS}
_ADAM = "torch.optim.Adam([{'params': large}, {'params': small}], lr=1e-2)\n"
_METHOD = f"""\

    def make_optimizer(self):
        named = {{name: p for name, p in self.named_parameters() if p.requires_grad}}
        large = [p for _, p in named.items() if p.ndim > 1]
        small = [p for _, p in named.items() if p.ndim <= 1]
        optimizer = {_ADAM}
        return optimizer

"""
_GROUPS = {
    "list": "large = [p for p in model.parameters() if p.ndim > 1]\n"
    "small = [p for n, p in model.named_parameters() if p.ndim <= 1]\n"
    f"optimizer = {_ADAM}",
    "loop": "large, small = [], []\n"
    "for module in model.modules():\n    for p in module.parameters(recurse=False):\n"
    f"        (large if p.ndim > 1 else small).append(p)\noptimizer = {_ADAM}",
    "function": "def groups(net):\n    return [{'params': net.parameters()}]\n"
    "optimizer = torch.optim.Adam(groups(model), lr=1e-2)\n",
    "parts": "optimizer = torch.optim.Adam([{'params': model.head.parameters()},\n"
    "    {'params': model.conv.parameters()}, {'params': model.norm.parameters()}], lr=1e-2)\n",
    "other": "teacher = model.head\nfor p in teacher.parameters():\n    p.requires_grad_(True)\n"
    "optimizer = torch.optim.Adam([{'params': [p for p in model.parameters()]}], lr=1e-2)\n",
    "method": "optimizer = model.make_optimizer()\n",
}
_OPTIMIZER = "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
GROUPS = {
    name: (
        PLAIN.replace(_MAKE, _MAKE.rstrip() + "\n" + _METHOD) if name == "method" else PLAIN
    ).replace(_OPTIMIZER, text)
    for name, text in _GROUPS.items()
}
"""The plain script, its optimizer given the same parameters as groups."""
TWO_OPTIMIZERS = (
    PLAIN.replace(
        _OPTIMIZER,
        "head = torch.optim.Adam(model.head.parameters(), lr=1e-2)\n"
        "rest = torch.optim.Adam([*model.conv.parameters(), *model.norm.parameters()], lr=1e-2)\n",
    )
    .replace("    optimizer.zero_grad()\n", "    head.zero_grad()\n    rest.zero_grad()\n")
    .replace("    optimizer.step()\n", "    head.step()\n    rest.step()\n")
)
"""The plain script, its parameters shared out between two optimizers."""
_NAMED = """\
    output = model(images)
    loss = F.cross_entropy(output, labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
_UNNAMED = {
    "call": "criterion(model(images), labels).backward()",
    "lines": "criterion(\n        model(images), labels  # of all\n    ).backward()",
    "mean": "criterion(model(images), labels).mean().backward(retain_graph=False)",
    "divided": "(criterion(model(images), labels) / 2).backward(torch.tensor(2.0))",
    "multiplied": "loss = criterion(model(images), labels)\n    (1.0 * loss).backward()",
    "sum": "(0.0 + criterion(model(images), labels)).backward()",
    "apart": "output = model(images)\n    criterion(output, labels).backward()",
    "name divided": "loss = criterion(model(images), labels)\n"
    "    (loss / len(losses[-1:])).backward()",
    "twice": "loss = criterion(model(images), labels)\n    half = loss / 2\n"
    "    half.backward(retain_graph=True)\n    half.backward()",
    "scaled": "scaler.scale(criterion(model(images), labels)).backward()\n"
    "    scaler.step(optimizer)",
}
UNNAMED = {
    name: PLAIN.replace(
        _NAMED, f"    {text}\n" + "    optimizer.step()\n" * ("optimizer" not in text)
    ).replace(
        "losses = []\n",
        """\
losses = []
scaler = torch.amp.GradScaler(enabled=False)

def criterion(output, labels):
    loss = F.cross_entropy(output, labels)
    losses.append(loss.item())
    return loss

""",
    )
    for name, text in _UNNAMED.items()
}
"""The plain script, ``backward`` called on something that has no name or is scaled."""
GAN = f"""\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
train_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
train_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
losses = []
for step in range({STEPS}):
    critic.zero_grad()
    critic(torch.randn(6, 8)).mean().backward()
    fake = generator(torch.randn(6, 4))
    loss = -critic(fake.detach()).mean()
    loss.backward()
    train_critic.step()
    losses.append(loss.item())
    if step % 2:
        generator.zero_grad()
        loss = critic(fake).mean()
        loss.backward()
        train_generator.step()
        losses.append(loss.item())
"""
"""Two models, each with an optimizer, and three calls of ``backward``."""
CLOSURE = (
    _MAKE
    + f"""
model = Net()
images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []

def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss

for _ in range({STEPS}):
    losses.append(optimizer.step(closure).item())
"""
)
INFERENCE = (
    _MAKE
    + f"""
model = Net().eval().to("cpu")
images = torch.randn(6, 3, 8, 8)
losses = []
with torch.inference_mode():
    for _ in range({STEPS}):
        scores = model(images).softmax(-1)
        losses.append(scores.float().var().item())
"""
)
FUNCTIONS = {"function": FUNCTION, "inline": INLINE}


def function_losses(path: Path, *techniques: Any, steps: int = STEPS) -> list[float]:
    """Return the losses of the first steps of the workload ``make`` in a file."""
    torch.manual_seed(0)
    make = runpy.run_path(str(path))["make"]
    torch.manual_seed(0)
    built = build_from(make(), techniques, 0, path.name)
    return [float(built.step()) for _ in range(steps)]


def script_losses(path: Path) -> list[float]:
    """Return the losses of a script that runs on its own."""
    torch.manual_seed(0)
    losses: list[float] = runpy.run_path(str(path), run_name="__main__")["losses"]
    return losses


HUGGING_FACE = """\
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(16)]
config = BertConfig(
    vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    max_steps=2,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
"""

LIGHTNING = """\
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
loader = DataLoader(data, batch_size=2)
trainer = L.Trainer(
    max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Classifier(), loader)
"""

FABRIC = """\
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
x, y = torch.randn(2, 4), torch.randint(0, 2, (2,))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
for _ in range(4):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))), batch_size=2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x, y in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
