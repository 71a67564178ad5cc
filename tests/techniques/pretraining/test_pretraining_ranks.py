"""Pre-training on real ranks: the same curve on fewer ranks and after a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.pretraining import training, write_shards
from slipstream.techniques.pretraining.training import PretrainingConfig, pretrain

_WORKLOAD = """
import sys
sys.path.insert(0, {folder!r})
import encoders, torch
from slipstream.techniques.pretraining import FusedLAMB

def make():
    model, batch, loss, _ = encoders.plain()
    return model, batch, loss, FusedLAMB(model.parameters(), lr=2e-2)

def diverging():
    model, batch, _, optimizer = encoders.plain()
    return model, batch, lambda output, targets: (output * float("nan")).sum(), optimizer

def unused():
    model, batch, loss, optimizer = make()
    model.pooler = torch.nn.Linear(2, 2)
    return model, batch, loss, optimizer

def frozen():
    model, batch, loss, optimizer = make()
    return model.requires_grad_(False), batch, loss, optimizer
"""
_TOML = """
workload = "work.py:make"
corpus = "corpus"
output = "run"
mask_token = 3
techniques = "masked_head+unpad"
ranks = 2
save_every = 4
micro_batch = 3
[[phases]]
steps = 8
global_batch = 7
length = 12
warmup = 2
[[phases]]
steps = 4
global_batch = 5
length = 12
lr = 0.01
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted run on one rank, dense and padded."""
    return pretrain(replace(configured(tmp_path_factory.mktemp("alone")), ranks=1, techniques=""))


@pytest.fixture
def config(tmp_path: Path) -> PretrainingConfig:
    return configured(tmp_path)


def configured(tmp_path: Path) -> PretrainingConfig:
    (tmp_path / "work.py").write_text(_WORKLOAD.format(folder=str(Path(__file__).parent)))
    (tmp_path / "pretrain.toml").write_text(_TOML)
    rng = np.random.default_rng(0)
    texts = (rng.integers(5, 20, rng.integers(1, 13)).tolist() for _ in range(40))
    write_shards(texts, tmp_path / "corpus", 3, 61)
    return PretrainingConfig.read(tmp_path / "pretrain.toml")


def test_a_restart_on_fewer_ranks_continues_the_curve(
    config: PretrainingConfig, expected: list[float]
) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith("update 8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(config, report=interrupt)
    with pytest.raises(SlipstreamError, match="has a checkpoint"):
        pretrain(config)
    losses = pretrain(replace(config, ranks=1), resume=True, report=lines.append)
    assert len(losses) == 12
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert json.loads(Path(config.output, "losses.json").read_text()) == losses
    assert [line.split(":")[0] for line in lines] == [f"update {n} of 12" for n in (4, 8, 12)]


def test_a_killed_rank_is_left_out(config: PretrainingConfig, expected: list[float]) -> None:
    lines: list[str] = []

    def kill(line: str) -> None:
        lines.append(line)
        if line.startswith("update 4"):
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            with pytest.raises(SlipstreamError, match="another job trains in this folder"):
                pretrain(config, resume=True)

    losses = pretrain(config, report=kill)
    assert len(losses) == 12
    assert any("1 continue from the last checkpoint" in line for line in lines)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_bad_input_is_named(config: PretrainingConfig, tmp_path: Path) -> None:
    bad = replace(config, workload=f"{tmp_path}/work.py:diverging", techniques="", ranks=1)
    with pytest.raises(SlipstreamError, match="losses in a row are not finite"):
        pretrain(replace(bad, save_every=2, output=str(tmp_path / "bad")))
    assert json.loads((tmp_path / "bad" / "losses.json").read_text()) == [None, None]
    assert not (tmp_path / "bad" / "checkpoint.pt").exists()
    with pytest.raises(SlipstreamError, match="3 global batches in a row have no masked token"):
        pretrain(replace(config, special=60, ranks=1, output=str(tmp_path / "unmasked")))
    with pytest.raises(SlipstreamError, match="folder cannot be written"):
        pretrain(replace(config, output=str(tmp_path / "pretrain.toml")))
    for name in ("mask_token", "special"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: 61 is not below"):
            pretrain(replace(config, **{name: 61}))
    with pytest.raises(InvalidArgumentError, match=r"phases\[0\]\.lr: -1"):
        replace(config, phases=(replace(config.phases[0], lr=-1.0),))
    with pytest.raises(InvalidArgumentError, match=r"phases\[0\]\.steps: 0 is less than 1"):
        replace(config, phases=(replace(config.phases[0], steps=0),))
    with pytest.raises(InvalidArgumentError, match=r"warmup: 9 is not between 0 and 8 steps"):
        replace(config, phases=(replace(config.phases[0], warmup=9),))
    with pytest.raises(InvalidArgumentError, match=r"seed: .* has more than 63 bits"):
        replace(config, seed=1 << 63)
    with pytest.raises(InvalidArgumentError, match="output: is empty"):
        replace(config, output="")
    shorter = (config.phases[0], replace(config.phases[1], length=11))
    with pytest.raises(SlipstreamError, match=r"has 12 tokens, more than phases\[1\]"):
        pretrain(replace(config, phases=shorter))
    with pytest.raises(InvalidArgumentError, match="ranks"):
        replace(config, ranks=6)
    with pytest.raises(InvalidArgumentError, match="phases"):
        replace(config, phases=())
    with pytest.raises(InvalidArgumentError, match="budget: inf is not a finite number"):
        replace(config, budget=float("inf"))
    (tmp_path / "other").mkdir()
    torch.save({"model": {}}, tmp_path / "other" / "checkpoint.pt")
    with pytest.raises(SlipstreamError, match=r"does not fit the model: Error.* Missing key"):
        pretrain(replace(config, ranks=1, output=str(tmp_path / "other")), resume=True)
    (tmp_path / "other" / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(SlipstreamError, match="does not fit the model: EOFError"):
        pretrain(replace(config, ranks=1, output=str(tmp_path / "other")), resume=True)
    longer = (replace(config.phases[0], length=13),)
    with pytest.raises(SlipstreamError, match="the model fails on a sequence of 13 tokens"):
        pretrain(replace(config, phases=longer, ranks=1, output=str(tmp_path / "longer")))
    with pytest.raises(SlipstreamError, match="the workload is a script"):
        pretrain(replace(config, workload=f"{tmp_path}/work.py"))
    with pytest.raises(SlipstreamError, match="no corpus is named"):
        pretrain(replace(config, corpus=""))
    (tmp_path / "pretrain.toml").write_text("workload = 3")
    with pytest.raises(SlipstreamError, match="phases"):
        PretrainingConfig.read(tmp_path / "pretrain.toml")
    write_shards([[5, 60], [61]], tmp_path / "larger", 1, 70)
    with pytest.raises(SlipstreamError, match="largest embedding 61 rows"):
        pretrain(replace(config, corpus=str(tmp_path / "larger"), ranks=1))


def test_another_corpus_or_seed_than_that_of_the_checkpoint_is_refused(
    config: PretrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_group(monkeypatch)
    trainer = training._Trainer(config, 0, 1, str(tmp_path))
    trainer.losses = [1.0]
    Path(config.output).mkdir()
    trainer._save()
    assert training._Trainer(config, 0, 1, str(tmp_path)).losses == [1.0]
    write_shards([[5, 6]] * 9, tmp_path / "later", 1, 61)
    phases = (config.phases[0], replace(config.phases[1], corpus=str(tmp_path / "later")))
    assert training._Trainer(replace(config, phases=phases), 0, 1, str(tmp_path)).losses == [1.0]
    for name, changed in (
        ("corpus", replace(config, corpus=str(tmp_path / "later"))),
        ("seed", replace(config, seed=1)),
        ("mask_token", replace(config, mask_token=4)),
    ):
        with pytest.raises(SlipstreamError, match=f"was written with another {name}"):
            training._Trainer(changed, 0, 1, str(tmp_path))
    checkpoint = Path(config.output, "checkpoint.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    with pytest.raises(SlipstreamError, match="the checkpoint is damaged or"):
        training._Trainer(config, 0, 1, str(tmp_path))


def test_a_full_disk_is_named(
    config: PretrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(saved: object, file: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 534")  # noqa: B904

    _without_group(monkeypatch)
    trainer = training._Trainer(config, 0, 1, str(tmp_path))
    Path(config.output).mkdir()
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SlipstreamError, match=r"cannot be written: \[Errno 28\] No space left"):
        trainer._save()
    assert not list(Path(config.output).iterdir())


def test_parameters_without_a_gradient_are_found(
    config: PretrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _without_group(monkeypatch)
    for name in ("make", "unused"):
        changed = replace(config, workload=f"{tmp_path}/work.py:{name}")
        training._Trainer(changed, 0, 1, str(tmp_path))
    assert options == [{"find_unused_parameters": False}, {"find_unused_parameters": True}]
    frozen = replace(config, workload=f"{tmp_path}/work.py:frozen")
    with pytest.raises(SlipstreamError, match="no parameter that requires a gradient"):
        training._Trainer(frozen, 0, 1, str(tmp_path))


def _without_group(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """Let ranks train in this process; return the options of DistributedDataParallel."""
    options: list[dict[str, bool]] = []

    def distributed(model: torch.nn.Module, **arguments: bool) -> torch.nn.Module:
        options.append(arguments)
        return model

    monkeypatch.setattr(training, "join", lambda *group: None)
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel", distributed)
    return options


def test_files_of_phases_and_cluster_are_relative_to_the_configuration(tmp_path: Path) -> None:
    text = _TOML.replace("lr = 0.01", 'corpus = "longer"')
    (tmp_path / "pretrain.toml").write_text('cluster = "own.toml"\n' + text)
    (tmp_path / "own.toml").touch()
    config = PretrainingConfig.read(tmp_path / "pretrain.toml")
    assert config.cluster == str(tmp_path / "own.toml")
    assert config.phases[1].corpus == str(tmp_path / "longer")
    # A phase with its own corpus reads it from the start.
    assert [config.phase(step)[1:] for step in (3, 8, 11)] == [(3, 0), (0, 0), (3, 0)]
    same = replace(config, phases=(config.phases[0], replace(config.phases[1], corpus="")))
    assert same.phase(9)[1:] == (1, 56)


@pytest.mark.full
def test_kill_9_loses_nothing_before_the_checkpoint(
    config: PretrainingConfig, expected: list[float], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "slipstream", "pretrain", str(tmp_path / "pretrain.toml")]
    with subprocess.Popen(command, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not Path(config.output, "losses.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.kill()
    losses = pretrain(replace(config, ranks=1), resume=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
