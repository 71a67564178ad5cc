"""Training scripts as users write them, in many styles; slipstream must handle every one.

Each file is complete and runs alone in seconds. None of them mentions slipstream, and their
style is their own: neither ruff nor mypy checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """A script and what a profile of it shows.

    Attributes:
        name: file name without its suffix.
        kind: ``"training"`` and ``"inference"`` are profiled by their steps; in ``"none"`` no step
            can be found.
        arguments: command-line arguments of the script itself.
        sentence: part of the error for kind ``"none"``; otherwise empty.
        packages: packages that it imports in addition to torch and numpy.
        technique: a technique that can be applied to it, quick to predict and to measure.
        same_step: name of the script that trains the same model on the same batches, without a
            closure; empty if there is none.
    """

    name: str
    kind: Literal["training", "inference", "none"] = "training"
    arguments: tuple[str, ...] = ()
    sentence: str = ""
    packages: tuple[str, ...] = ()
    technique: str = "fused_optimizer:fused"
    same_step: str = ""

    @property
    def path(self) -> Path:
        """Path of the file."""
        return FOLDER / f"{self.name}.py"


SCRIPTS = (
    Script("bare_loop"),
    Script("argparse_main", arguments=("--epochs", "6", "--hidden", "256"), technique="amp:bf16"),
    Script("trainer_class"),
    Script("dict_batches_workers"),
    Script("amp_scaler"),
    Script("compiled_model"),
    Script("gan"),
    Script("gradient_accumulation", technique="amp:bf16"),
    Script("click_stream", technique="allocator:keep"),
    Script("ema"),
    Script("checkpoints"),
    Script("gcn_full_batch"),
    Script("lstm_packed"),
    Script("cnn_channels_last"),
    Script("transformer_groups"),
    Script("lbfgs", technique="allocator:keep"),
    Script("plain_closure", same_step="bare_loop"),
    Script("lightning_automatic", packages=("lightning",), same_step="lightning_manual"),
    Script("lightning_manual", packages=("lightning",)),
    Script("hf_trainer", packages=("transformers",), technique="amp:bf16"),
    Script("accelerate_loop", packages=("accelerate",)),
    Script("fabric", packages=("lightning",), technique="amp:bf16"),
    Script("custom_function"),
    Script("actor_critic"),
    Script("ten_steps"),
    Script("inference", "inference", technique="amp:bf16"),
    Script("manual_sgd", "none", sentence="the steps of a script are counted by optimizer.step()"),
    Script(
        "child_process",
        "none",
        sentence="training in processes that the script starts is not observed",
    ),
)
"""All scripts; no step can be found in the last two."""
