"""Scripts that train through a framework are edited in the framework's arguments."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from scripts import ACCELERATE, FABRIC, HUGGING_FACE, LIGHTNING

from slipstream.source import EditLocationError, Source, locate
from slipstream.technique import CodeChange, parse
from slipstream.workload import Workload, build_from

TEXTS = {
    "hugging_face": HUGGING_FACE, "lightning": LIGHTNING, "accelerate": ACCELERATE,
    "fabric": FABRIC,
}  # fmt: skip


def change(path: Path, text: str, technique: str) -> CodeChange:
    path.write_text(text)
    (parsed,) = parse(technique)
    found = parsed.code(Workload.parse(str(path)))
    assert found is not None
    return found


def changed(found: CodeChange) -> list[str]:
    """Return the lines that a diff adds, without indentation."""
    lines = found.diff.splitlines()[2:]
    return [line[1:].strip() for line in lines if line.startswith("+")]


def edited(path: Path, text: str, techniques: str) -> str:
    """Return the text after the edits of all techniques."""
    source = Source.of(text.encode(), path)
    for technique in techniques.split("+"):
        edit = change(path, text, technique).edit
        assert edit is not None
        source = edit(locate(source, None)).reparse()
    return source.text


def run(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the script's variables after it ran."""
    import torch

    torch.set_num_threads(1)
    monkeypatch.chdir(path.parent)
    path.write_text(text)
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_an_edited_trainer_script_trains_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    techniques = "amp:bf16+accumulation:2+checkpointing+batch_size:x2"
    trainer = run(path, edited(path, HUGGING_FACE, techniques), monkeypatch)["trainer"]
    assert trainer.args.bf16
    assert trainer.args.gradient_accumulation_steps == 2
    assert trainer.args.per_device_train_batch_size == 4
    assert trainer.model.is_gradient_checkpointing
    assert trainer.state.global_step == 2


@pytest.mark.filterwarnings("ignore")
def test_an_edited_lightning_script_trains_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    techniques = "amp:bf16+accumulation:2+fused_optimizer+batch_size:x2"
    trainer = run(path, edited(path, LIGHTNING, techniques), monkeypatch)["trainer"]
    assert trainer.precision == "bf16-mixed"
    assert trainer.accumulate_grad_batches == 2
    assert trainer.train_dataloader.batch_size == 4
    assert trainer.optimizers[0].param_groups[0]["fused"]
    assert trainer.global_step == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("looped", [True, False], ids=["accumulate", "plain"])
def test_an_edited_accelerate_script_trains_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looped: bool
) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    path = tmp_path / "train.py"
    text = (
        ACCELERATE if looped else ACCELERATE.replace("with accelerator.accumulate(model)", "if 1")
    )
    found = run(path, edited(path, text, "amp:bf16+accumulation:2+fused_optimizer"), monkeypatch)
    assert found["accelerator"].mixed_precision == "bf16"
    assert found["accelerator"].gradient_accumulation_steps == 2
    # Of four batches, every second one updates.
    assert all(state["step"] == 2 for state in found["optimizer"].state.values())
    AcceleratorState._reset_state(True)


@pytest.mark.filterwarnings("ignore")
def test_an_edited_fabric_script_trains_that_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    text = edited(path, FABRIC, "amp:bf16+accumulation:2+fused_optimizer")
    assert "fabric.backward(torch.nn.functional.cross_entropy(model(x), y) / 2)" in text
    found = run(path, text, monkeypatch)
    assert found["fabric"]._precision.precision == "bf16-mixed"
    assert found["optimizer"].param_groups[0]["fused"]
    # Of four batches, every second one updates.
    assert all(state["step"] == 2 for state in found["optimizer"].state.values())


@pytest.mark.filterwarnings("ignore")
def test_amp_is_applied_to_the_wrapper_of_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = run(tmp_path / "train.py", FABRIC, monkeypatch)["model"]
    x = torch.randn(2, 4)
    plain = model(x)
    build_from((model, x, None, None), parse("amp:bf16"), 0, "train.py")
    assert model(x).dtype == torch.float32
    assert not torch.equal(model(x), plain)


@pytest.mark.parametrize(
    ("framework", "technique", "lines"),
    [
        ("hugging_face", "fused_optimizer", ['optim="adamw_torch_fused",']),
        ("hugging_face", "compile:reduce_overhead", ['torch_compile_mode="reduce-overhead",']),
        ("hugging_face", "tf32", ["tf32=True,"]),
        ("hugging_face", "dataloader:3", ["dataloader_num_workers=3,"]),
        ("hugging_face", "fusion", ['model.compile(backend="slipstream_fusion", dynamic=False)']),
        ("lightning", "compile", ["model = Classifier()", "model.net.compile()"]),
        ("lightning", "dataloader:3", ["loader = DataLoader(data, batch_size=2, num_workers=3"]),
        ("accelerate", "compile", ["model = torch.compile(model)"]),
        ("fabric", "amp", ['fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-']),
        ("fabric", "compile", ["model = torch.compile(model)"]),
    ],
)  # fmt: skip
def test_the_switch_of_a_technique(
    tmp_path: Path, framework: str, technique: str, lines: list[str]
) -> None:
    found = changed(change(tmp_path / "train.py", TEXTS[framework], technique))
    for line in lines:
        assert any(text.startswith(line) for text in found), found


@pytest.mark.parametrize(
    ("framework", "old", "new", "technique", "lines"),
    [
        # The arguments are found through names, subclasses and other libraries.
        (
            "hugging_face", "Trainer(model", "Mine(model", "amp", ["bf16=True,"],
        ),
        (
            "hugging_face", "BertForSequenceClassification, Trainer, TrainingArguments\n",
            "Bert\nfrom trl import SFTTrainer as Trainer, SFTConfig as TrainingArguments\n",
            "amp", ["bf16=True,"],
        ),
        # Options that exclude the switch are turned off.
        (
            "hugging_face", "max_steps=2", "max_steps=2,\n    fp16=True", "amp",
            ["fp16=False,", "bf16=True,"],
        ),
        # A changed default is named.
        (
            "hugging_face", "per_device_train_batch_size=2,", "", "batch_size:x2",
            ["per_device_train_batch_size=16,"],
        ),
        # An optimizer that the script creates is fused there.
        (
            "hugging_face", "trainer.train()",
            "optimizer = torch.optim.SGD(model.parameters(), 0.1)\ntrainer.train()",
            "fused_optimizer",
            ["optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)"],
        ),
        # Of two loaders, the one used for training.
        (
            "lightning", "trainer.fit(Classifier(), loader)",
            "other = DataLoader(data)\ntrainer.fit(Classifier(), loader, other)", "batch_size:x2",
            ["loader = DataLoader(data, batch_size=4)"],
        ),
        (
            "lightning", "    def training_step",
            "    def train_dataloader(self):\n        return DataLoader(data, batch_size=8)\n\n"
            "    def training_step", "batch_size:x2", None,
        ),
        (
            "lightning", "trainer.fit(Classifier(), loader)",
            "class Data(L.LightningDataModule):\n    def train_dataloader(self):\n"
            "        return DataLoader(data, batch_size=8)\n"
            "trainer.fit(Classifier(), Data())", "batch_size:x2",
            ["return DataLoader(data, batch_size=16)"],
        ),
        # The module that the steps call, rather than the one used for evaluation.
        (
            "lightning", "self.net = nn.Linear(4, 2)",
            "self.net = nn.Linear(4, 2)\n        self.loss = nn.CrossEntropyLoss()", "compile",
            ["model = Classifier()", "model.net.compile()"],
        ),
        # Gradients are clipped before the update.
        (
            "accelerate", "with accelerator.accumulate(model):",
            "if accelerator.sync_gradients:\n"
            "        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n    if 1:",
            "accumulation:4", ["accelerator = Accelerator(gradient_accumulation_steps=4)",
            "with accelerator.accumulate(model):"],
        ),
        (
            "lightning", "self.net(x)", "self(x)", "compile",
            ["model = Classifier()", "model.compile()"],
        ),
    ],
)  # fmt: skip
def test_other_spellings_are_found(
    tmp_path: Path, framework: str, old: str, new: str, technique: str, lines: list[str] | None
) -> None:
    text = TEXTS[framework]
    assert old in text
    text = text.replace(old, new)
    if "Mine" in new:
        text = text.replace("arguments =", "class Mine(Trainer):\n    pass\n\narguments =")
    found = change(tmp_path / "train.py", text, technique)
    assert changed(found)[: len(lines or [])] == (lines or []), found.note


@pytest.mark.parametrize(
    ("framework", "old", "new", "technique", "reason", "by_hand"),
    [
        (
            "hugging_face", "arguments = TrainingArguments(",
            "from transformers import HfArgumentParser\n"
            "arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
            "unused = dict(", "accumulation:4", "command line", "--gradient_accumulation_steps 4",
        ),
        (
            "hugging_face", "arguments = TrainingArguments(",
            "from transformers import HfArgumentParser\n"
            "arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
            "unused = dict(", "amp", "command line", "--bf16 True --use_cpu True",
        ),
        (
            "hugging_face", "max_steps=2", 'max_steps=2, optim="sgd"', "fused_optimizer",
            'optim="sgd"', "optimizers=(torch.optim.SGD(",
        ),
        (
            "hugging_face", "max_steps=2", "max_steps=2, gradient_accumulation_steps=8",
            "accumulation:4", "gradient_accumulation_steps=8", "gradient_accumulation_steps=4)",
        ),
        (
            "hugging_face", "max_steps=2", "max_steps=2, **settings", "amp", r"\*\*settings",
            "TrainingArguments(..., bf16=True, use_cpu=not torch.cuda.is_available())",
        ),
        ("hugging_face", "", "", "channels_last", "no switch", "data_collator"),
        ("hugging_face", "", "", "fused_optimizer:foreach", "no switch", "foreach=True"),
        (
            "lightning", "trainer.fit", "from lightning.pytorch.cli import LightningCLI\n"
            "LightningCLI(Classifier)\ntrainer.fit", "amp", "command line",
            "--trainer.precision bf16-mixed",
        ),
        (
            "lightning", "super().__init__()",
            "super().__init__()\n        self.automatic_optimization = False",
            "accumulation:4", "optimizes manually", "self.manual_backward(loss / 4)",
        ),
        ("lightning", "", "", "channels_last", "no switch", "training_step"),
        (
            "accelerate", "with accelerator.accumulate(model):",
            "if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0):",
            "accumulation:4", "clipped", "accelerator.sync_gradients",
        ),
    ],
)  # fmt: skip
def test_options_without_a_switch_are_refused_with_suitable_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    framework: str,
    old: str,
    new: str,
    technique: str,
    reason: str,
    by_hand: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = TEXTS[framework]
    assert old in text
    found = change(tmp_path / "train.py", text.replace(old, new) if old else text, technique)
    assert not found.diff
    sentence, _, lines = found.note.partition("; by hand:")
    assert sentence.startswith("no edit of your file: ")
    assert re.search(reason, sentence), sentence
    assert by_hand in lines
    assert found.edit is not None
    with pytest.raises(EditLocationError):
        found.edit(locate(Source.read(tmp_path / "train.py"), None))


def test_a_loop_that_counts_batches_itself_is_not_put_under_accumulate(tmp_path: Path) -> None:
    head, _, _ = ACCELERATE.partition("for x, y in data")
    text = (
        f"{head}for step, (x, y) in enumerate(data):\n"
        "    accelerator.backward(model(x).sum())\n"
        "    if step % steps == 0:\n"
        "        optimizer.step()\n"
    )
    found = change(tmp_path / "train.py", text, "accumulation:4")
    assert found.diff == ""
    assert found.note.startswith("already so: the loop accumulates gradients")
    assert found.note.endswith("train.py:12)")


@pytest.mark.parametrize("framework", TEXTS)
def test_a_switch_already_set_is_reported(tmp_path: Path, framework: str) -> None:
    path = tmp_path / "train.py"
    text = edited(path, TEXTS[framework], "amp+accumulation:4")
    for technique in ("amp", "accumulation:4"):
        found = change(path, text, technique)
        assert found.diff == ""
        assert found.note.startswith("already so: ")


def test_a_function_of_such_a_file_is_edited_directly(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        LIGHTNING + "\ndef make():\n    model = nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return model, (torch.ones(2, 4), torch.ones(2, 2)), nn.MSELoss(), optimizer\n"
    )
    found = parse("compile")[0].code(Workload.parse(f"{path}:make"))
    assert found is not None
    assert changed(found) == ["model = torch.compile(model)"]
