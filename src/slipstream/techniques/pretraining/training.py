"""Pre-training on several ranks: phases, checkpoints, and restarts on fewer ranks.

The global batch, its masks and the learning rate depend on the step alone, so that the number of
ranks may change at any checkpoint. Losses are sums over labelled tokens of all ranks, divided by
their number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import textwrap
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

from slipstream.errors import ChildError, InvalidArgumentError, SlipstreamError
from slipstream.files import replacing, temporary_folder, write_text
from slipstream.ranks.launch import Host, WorkerProcesses, join
from slipstream.schema import Readers, build
from slipstream.technique import parse
from slipstream.units import parse_bytes, parse_duration_ns
from slipstream.workload import BuiltWorkload, Workload, drive

_MAX_BAD_LOSSES = 3
_CHECKPOINT, _LOSSES = "checkpoint.pt", "losses.json"
_trainers: list[_Trainer] = []
"""The trainer of this process; empty before the first segment."""


@dataclass(frozen=True)
class TrainingPhase:
    """Steps with sequences of a length.

    Attributes:
        steps: number of updates.
        global_batch: sequences of an update, over all ranks and micro-batches.
        length: longest sequence in tokens.
        lr: peak learning rate; None for the optimizer's.
        warmup: updates of linear growth from 0; the rate then falls linearly to 0.
        corpus: folder of `write_shards`; empty for that of the configuration.
    """

    steps: int
    global_batch: int
    length: int = 128
    lr: float | None = None
    warmup: int = 0
    corpus: str = ""


_READERS: Readers = {
    TrainingPhase: lambda value, place: build(TrainingPhase, value, place, "phase", {})
}


@dataclass(frozen=True)
class PretrainingConfig:
    """Settings of ``slipstream plan`` and ``slipstream pretrain``, read from a TOML file.

    Attributes:
        workload: ``train.py:function`` that returns ``(model, batch, loss, optimizer)``.
        corpus: folder of `write_shards`; only to train.
        output: folder of the checkpoint and the losses.
        mask_token: id of the mask token.
        special: ids below are never masked.
        techniques: a combination, such as ``masked_head+unpad``; if empty, ``plan`` chooses one and
            ``pretrain`` uses none.
        ranks: processes on this machine that train together.
        micro_batch: sequences of a forward pass at most; if 0, ``plan`` chooses them and
            ``pretrain`` uses those of the workload's batch.
        save_every: updates between checkpoints.
        seed: of weights, order and masks.
        cluster: preset, file or short form of the cluster to plan for.
        price_per_hour: dollars per device; 0 for the cluster's price.
        memory: of a device, such as ``16GiB``; empty for that of the cluster's device.
        budget: dollars to spend at most; 0 for no limit.
        deadline: time to finish within, such as ``72 h``; empty for no limit.
    """

    workload: str
    phases: tuple[TrainingPhase, ...]
    corpus: str = ""
    output: str = "pretraining"
    mask_token: int = 4
    special: int = 5
    techniques: str = ""
    ranks: int = 1
    micro_batch: int = 0
    save_every: int = 100
    seed: int = 0
    cluster: str = ""
    price_per_hour: float = 0.0
    memory: str = ""
    budget: float = 0.0
    deadline: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("ranks", "save_every") else 0
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                problem = f"less than {least}" if value < least else "not a finite number"
                raise InvalidArgumentError(field.name, f"{value} is {problem}")
        if not self.phases:
            raise InvalidArgumentError("phases", "there is none", remedy="add a table [[phases]]")
        if self.seed >= 1 << 63:
            raise InvalidArgumentError("seed", f"{self.seed} has more than 63 bits")
        for name in ("workload", "output"):
            if not getattr(self, name):
                raise InvalidArgumentError(name, "is empty")
        for number, phase in enumerate(self.phases):
            place = f"phases[{number}]"
            for name in ("steps", "global_batch", "length"):
                if (value := getattr(phase, name)) < 1:
                    raise InvalidArgumentError(f"{place}.{name}", f"{value} is less than 1")
            if not 0 <= phase.warmup <= phase.steps:
                raise InvalidArgumentError(
                    f"{place}.warmup", f"{phase.warmup} is not between 0 and {phase.steps} steps"
                )
            if phase.lr is not None and not 0 <= phase.lr < math.inf:
                raise InvalidArgumentError(f"{place}.lr", f"{phase.lr} is not at least 0")
        if self.deadline:
            parse_duration_ns(self.deadline, "deadline")
        if self.memory:
            parse_bytes(self.memory, "memory")
        if self.techniques:
            parse(self.techniques)
        if self.ranks > min(phase.global_batch for phase in self.phases):
            raise InvalidArgumentError("ranks", f"{self.ranks} is more than a global batch")

    @classmethod
    def read(cls, path: Path) -> PretrainingConfig:
        """Read a file; paths in it are relative to its folder.

        Raises:
            SlipstreamError: it is missing or malformed; names the setting.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SlipstreamError(
                f"the configuration cannot be read: {error}", where=str(path),
                remedy="write a TOML file with workload and [[phases]]",
            ) from error  # fmt: skip
        listed = table.get("phases")
        phases = listed if isinstance(listed, list) else []
        for part in (table, *(phase for phase in phases if isinstance(phase, dict))):
            for name in ("workload", "corpus", "output"):
                if isinstance(part.get(name), str) and part[name]:
                    part[name] = str(path.parent / part[name])
        cluster = table.get("cluster")
        if isinstance(cluster, str) and (path.parent / cluster).is_file():
            table["cluster"] = str(path.parent / cluster)
        return build(cls, table, "", "configuration", _READERS)

    @property
    def steps(self) -> int:
        """Updates of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> tuple[TrainingPhase, int, int]:
        """Return an update's phase, its number in it, and the sequences of earlier phases.

        Only phases with the same corpus count.
        """
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                earlier = [p for p in self.phases[:number] if p.corpus == phase.corpus]
                return phase, step, sum(p.steps * p.global_batch for p in earlier)
            step -= phase.steps
        raise InvalidArgumentError("step", "it is after the last phase")


def pretrain(
    config: PretrainingConfig,
    *,
    resume: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[float]:
    """Train to the end of the last phase, and return the loss of every update.

    If a rank dies, the others continue from the last checkpoint without it.

    Args:
        resume: continue from the checkpoint of `config.output`.

    Raises:
        SlipstreamError: another job uses the folder; it has a checkpoint and `resume` is False;
            the last rank failed; losses are not finite.
    """
    output, ranks = Path(config.output), config.ranks
    with _locked(output):
        if not resume and (output / _CHECKPOINT).exists():
            raise SlipstreamError(
                "the folder has a checkpoint", where=str(output),
                remedy="pass --resume to continue it, or name another output",
            )  # fmt: skip
        while True:
            try:
                return _run(config, ranks, report)
            except ChildError as error:
                if ranks == 1:
                    raise
                ranks -= 1
                report(f"a rank failed ({error.what}); {ranks} continue from the last checkpoint")


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Create the output folder, and exclude other jobs from it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / "lock").open("w")
    except OSError as error:
        raise SlipstreamError(
            f"the output folder cannot be written: {error.strerror}", where=str(output),
            remedy="name another output",
        ) from error  # fmt: skip
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(
                "another job trains in this folder", where=str(output),
                remedy="wait for it, or name another output",
            ) from error  # fmt: skip
        yield


def _run(config: PretrainingConfig, ranks: int, report: Callable[[str], None]) -> list[float]:
    from slipstream.techniques.pretraining.shards import CorpusError, ShardedTokens

    # Fail before ranks start.
    if Workload.parse(config.workload).function is None:
        raise SlipstreamError(
            "the workload is a script", where=config.workload,
            remedy="name a function that returns (model, batch, loss, optimizer)",
        )  # fmt: skip
    for number, phase in enumerate(config.phases):
        if not (folder_name := phase.corpus or config.corpus):
            raise SlipstreamError("no corpus is named", remedy="add a line corpus = FOLDER")
        # Ranks verify the checksums.
        corpus = ShardedTokens(Path(folder_name), rank=1)
        for name in ("mask_token", "special"):
            if getattr(config, name) >= corpus.vocabulary:
                raise InvalidArgumentError(
                    name,
                    f"{getattr(config, name)} is not below the corpus's {corpus.vocabulary} tokens",
                )
        if corpus.longest > phase.length:
            raise CorpusError(
                f"the longest sequence has {corpus.longest} tokens, more than phases[{number}]."
                f"length = {phase.length}", where=folder_name,
                remedy="raise the length, or write a corpus of shorter sequences and set corpus in "
                "the phase",
            )  # fmt: skip
    with (
        temporary_folder("pretraining") as folder,
        WorkerProcesses(
            "pretraining", [Host()] * ranks, environment={"OMP_NUM_THREADS": "1"}
        ) as processes,
    ):
        shared = {
            "config": {**vars(config), "phases": [vars(phase) for phase in config.phases]},
            "ranks": ranks, "folder": str(folder),
        }  # fmt: skip
        while True:
            losses: list[float] = processes.call(
                "slipstream.techniques.pretraining.training:segment", None,
                lambda rank: {**shared, "rank": rank},
            )[0]  # fmt: skip
            finite = [loss if math.isfinite(loss) else None for loss in losses]
            write_text(Path(config.output, _LOSSES), json.dumps(finite))
            report(f"update {len(losses)} of {config.steps}: loss {losses[-1]:.4f}")
            if len(losses) >= config.steps:
                return losses


# The code below runs in a rank's process.


def segment(config: Mapping[str, Any], rank: int, ranks: int, folder: str) -> list[float]:
    """Train up to the next checkpoint; return all losses."""
    if not _trainers:
        settings = build(PretrainingConfig, dict(config), "", "configuration", _READERS)
        _trainers.append(_Trainer(settings, rank, ranks, folder))
    return _trainers[0].segment()


class _Trainer:
    """A rank's model, optimizer and place in the training."""

    def __init__(self, config: PretrainingConfig, rank: int, ranks: int, folder: str) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from slipstream.techniques.pretraining.shards import ShardedTokens

        self.config, self.rank, self.ranks = config, rank, ranks
        techniques = parse(config.techniques) if config.techniques else ()
        workload = Workload.parse(config.workload).with_technique(*techniques)

        def keep(built: BuiltWorkload) -> Generator[None, Any, BuiltWorkload]:
            yield from ()
            return built

        built = drive(workload, keep, _no_script, keep_in=Path(folder), seed=config.seed)
        if built.optimizer is None or built.model is None or not built.from_parts:
            raise SlipstreamError(
                "the workload does not return its parts", where=config.workload,
                remedy="return (model, batch, loss, optimizer)",
            )  # fmt: skip
        self.named = isinstance(built.batch, Mapping)
        self.micro = config.micro_batch or built.rows
        self.corpora = {
            name: ShardedTokens(Path(name or config.corpus), rank, ranks)
            for name in dict.fromkeys(phase.corpus for phase in config.phases)
        }
        self.module, self.built = built.model, built
        _check_vocabulary(built.model, max(c.vocabulary for c in self.corpora.values()))
        unused = self._check_length(max(phase.length for phase in config.phases))
        self.rates = [group["lr"] for group in built.optimizer.param_groups]
        self.losses: list[float] = []
        self.unmasked = 0
        path = Path(config.output, _CHECKPOINT)
        if path.exists():
            try:
                saved = torch.load(path, weights_only=True)
                self.module.load_state_dict(saved["model"])
                built.optimizer.load_state_dict(saved["optimizer"])
                self.losses, self.rates = saved["losses"], saved["rates"]
                self._check_data(saved.get("data", {}), path)
            except (
                RuntimeError, LookupError, TypeError, ValueError, OSError, EOFError, UnpicklingError
            ) as error:  # fmt: skip
                reason = textwrap.shorten(str(error) or type(error).__name__, 200)
                raise SlipstreamError(
                    f"the checkpoint is damaged or does not fit the model: {reason}",
                    where=str(path), remedy="continue with the workload that wrote it, or name "
                    "another output",
                ) from error  # fmt: skip
        join(rank, ranks, f"{folder}/store", 60.0)
        built.model = DistributedDataParallel(built.model, find_unused_parameters=unused)

    def segment(self) -> list[float]:
        """Train up to the next checkpoint, and write it."""
        import torch.distributed as dist

        config = self.config
        end = min(config.steps, (len(self.losses) // config.save_every + 1) * config.save_every)
        while len(self.losses) < end:
            loss = self._update(len(self.losses))
            self.losses.append(loss)
            latest = self.losses[-_MAX_BAD_LOSSES:]
            if len(latest) == _MAX_BAD_LOSSES and not any(map(math.isfinite, latest)):
                raise SlipstreamError(
                    f"{_MAX_BAD_LOSSES} losses in a row are not finite, up to update "
                    f"{len(self.losses) - 1}", where=config.workload,
                    remedy="set a lower lr in [[phases]] and pass --resume, or name another output",
                )  # fmt: skip
        # After a loss that is not finite, the weights may be useless: keep the earlier checkpoint.
        if self.rank == 0 and (math.isfinite(self.losses[-1]) or end == config.steps):
            self._save()
        dist.barrier()
        return self.losses

    def _save(self) -> None:
        import torch

        saved = {
            "model": self.module.state_dict(), "losses": self.losses, "rates": self.rates,
            "optimizer": self.built.optimizer.state_dict(), "data": self._data(),
        }  # fmt: skip
        path = Path(self.config.output, _CHECKPOINT)
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                torch.save(saved, file)
        except (OSError, RuntimeError) as error:
            # torch hides the error of the file.
            reason = error if isinstance(error, OSError) else error.__context__ or error
            raise SlipstreamError(
                f"the checkpoint cannot be written: {reason}", where=str(path),
                remedy="free some disk space, and pass --resume",
            ) from error  # fmt: skip

    def _data(self) -> dict[str, Any]:
        """Return the settings that determine the batches, by name; they are saved."""
        config = self.config
        return {
            **{f"corpus {name}".strip(): c.identity for name, c in self.corpora.items()},
            "mask_token": config.mask_token, "special": config.special, "seed": config.seed,
        }  # fmt: skip

    def _check_data(self, saved: Mapping[str, Any], path: Path) -> None:
        for name, value in self._data().items():
            if saved.get(name, value) != value:
                raise SlipstreamError(
                    f"the checkpoint was written with another {name}", where=str(path),
                    remedy=f"restore the {name}, or name another output",
                )  # fmt: skip

    def _update(self, step: int) -> float:
        """Run one update; return the mean loss of the global batch's labelled tokens."""
        import torch
        import torch.distributed as dist

        from slipstream.techniques.pretraining.shards import MaskedBatches
        from slipstream.workload.built import training_loss

        built, config = self.built, self.config
        phase, number, start = config.phase(step)
        batches = MaskedBatches(
            self.corpora[phase.corpus], phase.global_batch, phase.length, config.mask_token,
            config.special, seed=config.seed, start=start,
        )  # fmt: skip
        rows = batches.numbers(number, self.rank, self.ranks)
        places = range(0, len(rows), self.micro)
        parts = [batches.batch(rows[at : at + self.micro]) for at in places]
        counts = [int((part["labels"] >= 0).sum()) for part in parts]
        for part, count in zip(parts, counts, strict=True):
            if not count:
                # A mean over no token would not be a number; this one has the weight 0.
                part["labels"][0, 0] = part["input_ids"][0, 0]
        total = torch.tensor([float(sum(counts)), 0.0])
        dist.all_reduce(total)
        self._check_masked(int(total[0]), phase)
        labelled = max(float(total[0]), 1.0)
        torch.manual_seed(hash((config.seed, step, self.rank)) % 2**31)
        built.optimizer.zero_grad()
        whole = torch.zeros(1, dtype=torch.float64)
        for place, (part, count) in enumerate(zip(parts, counts, strict=True), start=1):
            self._set_batch(part)
            last = place == len(parts)
            with contextlib.nullcontext() if last else built.model.no_sync():
                # DistributedDataParallel divides the sum of gradients by the ranks.
                loss = training_loss(built)
                (loss * (self.ranks * count / labelled)).backward()
            whole += loss.detach().double() * count / labelled
        dist.all_reduce(whole)
        if math.isfinite(float(whole)):
            self._set_rates(phase, number)
            built.optimizer.step()
        return float(whole)

    def _check_masked(self, tokens: int, phase: TrainingPhase) -> None:
        """Refuse to train on batches without masked tokens, whose loss would be 0."""
        self.unmasked = 0 if tokens else self.unmasked + 1
        if self.unmasked == _MAX_BAD_LOSSES:
            raise SlipstreamError(
                f"{_MAX_BAD_LOSSES} global batches in a row have no masked token",
                where=phase.corpus or self.config.corpus,
                remedy=f"tokens below special = {self.config.special} are never masked: lower it, "
                "or raise global_batch",
            )  # fmt: skip

    def _set_batch(self, part: dict[str, Any]) -> None:
        inputs = part["input_ids"], part["attention_mask"]
        self.built.batch = part if self.named else (inputs, part["labels"])

    def _check_length(self, length: int) -> bool:
        """Run the longest sequence of the phases, which may come late in the training.

        Returns:
            Whether the loss does not depend on some parameters.
        """
        import torch

        from slipstream.techniques.pretraining.hooks import IGNORED
        from slipstream.workload.built import training_loss

        ids = torch.full((1, length), self.config.special)
        labels = torch.where(torch.arange(length) > 0, IGNORED, ids)
        self._set_batch({"input_ids": ids, "attention_mask": ids * 0 + 1, "labels": labels})
        try:
            loss = training_loss(self.built)
        except (RuntimeError, IndexError) as error:
            raise SlipstreamError(
                f"the model fails on a sequence of {length} tokens: {error}",
                where=self.config.workload, remedy="lower length in [[phases]] to its positions",
            ) from error  # fmt: skip
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if not trained or not loss.requires_grad:
            raise SlipstreamError(
                "the loss depends on no parameter that requires a gradient",
                where=self.config.workload, remedy="set requires_grad of the layers to train",
            )  # fmt: skip
        loss.backward()
        unused = any(p.grad is None for p in trained)
        for parameter in trained:
            parameter.grad = None
        return unused

    def _set_rates(self, phase: TrainingPhase, number: int) -> None:
        warm = min(1.0, (number + 1) / phase.warmup) if phase.warmup else 1.0
        left = (phase.steps - number) / max(phase.steps - phase.warmup, 1)
        for group, rate in zip(self.built.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = (phase.lr or rate) * min(warm, left)


def _no_script(result: object) -> NoReturn:
    """Never called: functions return."""
    raise AssertionError


def _check_vocabulary(model: Any, vocabulary: int) -> None:
    from torch import nn

    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if tables and max(tables) < vocabulary:
        raise SlipstreamError(
            f"the corpus has {vocabulary} tokens, the model's largest embedding {max(tables)} rows",
            remedy="use the vocabulary that the corpus was written with",
        )
