"""`masked_head` and `unpad` in a user's model: rows of tokens without a use are left out.

Both survive ``copy.deepcopy``, ``torch.save`` and ``load_state_dict``; parameters do not change.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.surgery import outputs_of, tensors_in

IGNORED = -100
"""Target of a token that has no loss, as in ``torch.nn.functional.cross_entropy``."""
_MAX_TRIALS = 12
_SHORT = (torch.bfloat16, torch.float16)


class LabelledRows:
    """Selects rows of tokens with a target; shared by the hooks of a model.

    Attributes:
        takes_labels: whether the model has an argument ``labels``, from which rows are selected.
        positions: int64 [m], rows of the flattened batch for the next forward pass; None for all.
    """

    def __init__(self, takes_labels: bool) -> None:
        self.takes_labels = takes_labels
        self.positions: Tensor | None = None

    def select(self, targets: Tensor) -> Tensor:
        """Set the rows of the next forward pass, and return their targets.

        Args:
            targets: int64 [batch, length] or [batch * length]; `IGNORED` for tokens without one.

        Returns:
            int64 [1, m] or [m].
        """
        self.positions = labelled(targets)
        return labelled_targets(targets)

    def _attach(self, model: nn.Module, head: nn.Module) -> list[Any]:
        """Register the hooks of a model and its head; return their handles."""
        handles = [head.register_forward_pre_hook(self._gather)]
        if self.takes_labels:
            handles.append(model.register_forward_pre_hook(self._take_labels, with_kwargs=True))
        return [*handles, model.register_forward_hook(self._forget, always_call=True)]

    def _take_labels(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replace ``labels=`` of the model by those of labelled tokens."""
        labels = kwargs.get("labels")
        return None if labels is None else (args, kwargs | {"labels": self.select(labels)})

    def _gather(self, module: nn.Module, args: Any) -> Any:
        """Gather labelled rows of the head's input, [batch, length, width] to [1, m, width]."""
        positions = self.positions
        if positions is None:
            return None
        return args[0].flatten(0, -2).index_select(0, positions)[None], *args[1:]

    def _forget(self, module: nn.Module, args: Any, output: Any) -> None:
        self.positions = None


def labelled(targets: Tensor) -> Tensor:
    """Return the rows of flattened `targets` that are not `IGNORED`, int64 [m]."""
    return (targets.reshape(-1) != IGNORED).nonzero().squeeze(1)


def labelled_targets(targets: Tensor) -> Tensor:
    """Return the targets that are not `IGNORED`, [m]; or [1, m] of [batch, length]."""
    flat = targets.reshape(-1)[labelled(targets)]
    return flat if targets.dim() == 1 else flat[None]


def masked_head(model: nn.Module, run: Callable[[], object], targets: Tensor) -> LabelledRows:
    """Compute the head of a masked-language model at tokens with a target only, in place.

    The first module after which rows are computed independently becomes the place of the gather; it
    is found by trying, so that the outputs are known to be equal. A model that takes ``labels=``
    needs nothing else; its logits become [1, m, vocabulary]. For others, pass targets through the
    returned object before each forward pass::

        rows = masked_head(model, lambda: model(ids), targets)
        wanted = rows.select(targets)
        loss = cross_entropy(model(ids)[0], wanted[0])

    Args:
        run: one forward pass of `model`, for the comparison.
        targets: int64 [batch, length], targets of the tokens of `run`; `IGNORED` where none.

    Raises:
        InvalidArgumentError: `targets` is something else, or of all tokens or none.
        WorkloadError: no module computes logits from independent rows.
    """
    if not isinstance(targets, Tensor) or targets.dim() != 2 or targets.is_floating_point():
        raise InvalidArgumentError("targets", "is not an int64 tensor [batch, length]")
    if not 0 < len(labelled(targets)) < targets.numel():
        raise InvalidArgumentError(
            "targets", f"{len(labelled(targets))} of {targets.numel()} tokens have a target",
            remedy=f"pass a batch in which some tokens have the target {IGNORED}",
        )  # fmt: skip
    if _labelled_rows(model) is not None:
        raise WorkloadError("masked_head: the model computes its head at labelled tokens already")
    if isinstance(model.forward, _PackedForward):
        raise WorkloadError("masked_head: the model is packed", remedy="call it before unpad")
    rows = LabelledRows(takes_labels(model))
    shape = tuple(targets.shape)
    before = outputs_of(model, run)
    found: nn.Module | None = None
    for module in reversed(_row_modules(model, run, shape)[-_MAX_TRIALS:]):
        handles = rows._attach(model, module)
        same = _same_rows(before, model, run, rows, targets)
        for handle in handles:
            handle.remove()
        if same:
            found = module
        elif found is not None:
            # The decoder of a tied head may be a function: the modules before it are tried, too.
            break
    if found is None:
        raise WorkloadError(
            "masked_head: no module turns rows of hidden states into logits independently",
            remedy=_inside(model)
            or "make the head a module that gets hidden states [batch, length, width]",
        )
    rows._attach(model, found)
    return rows


def _labelled_rows(model: nn.Module) -> LabelledRows | None:
    """Return the rows at which the model computes its head; None if at every token."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, LabelledRows)), None)


def _inside(model: nn.Module) -> str | None:
    """Return the remedy for a model in a wrapper; None for any other."""
    names = ("module", "_orig_mod")
    name = next((n for n in names if isinstance(getattr(model, n, None), nn.Module)), None)
    return name and f"pass the model inside {type(model).__name__}: model.{name}"


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's forward has an argument ``labels``."""
    return "labels" in _arguments(model)


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _row_modules(
    model: nn.Module, run: Callable[[], object], shape: tuple[int, ...]
) -> list[nn.Module]:
    """Return the modules whose first input is [batch, length, width], in the order of calls."""
    called: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_floating_point():
            rows = tuple(first.shape[:-1])
            if rows in (shape, (shape[0] * shape[1],)):
                called.append(module)

    parts = [module for module in model.modules() if module is not model]
    handles = [module.register_forward_pre_hook(note) for module in parts]
    try:
        outputs_of(model, run)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _same_rows(
    before: Any, model: nn.Module, run: Callable[[], object], rows: LabelledRows, targets: Tensor
) -> bool:
    """Whether outputs are equal, at labelled rows for those with one row per token."""
    if not rows.takes_labels:
        rows.select(targets)
    try:
        after = outputs_of(model, run)
    except (RuntimeError, ValueError, IndexError):
        return False
    finally:
        rows.positions = None
    return _equal_at(before, after, labelled(targets), targets.numel()) is True


def _equal_at(before: Any, after: Any, rows: Tensor, count: int) -> bool | None:
    """Whether an output of the second lacks rows of tokens; None if outputs at `rows` differ.

    Args:
        rows: int64 [m], rows of tokens that the second has at least.
        count: rows of an output of the first with one row per token.
    """
    reduced = False
    ours, theirs = tensors_in(before), tensors_in(after)
    if len(ours) != len(theirs):
        return None
    for expected, actual in zip(ours, theirs, strict=True):
        width = expected.shape[-1] if expected.dim() > 1 else 0
        if width and expected.numel() == count * width and actual.numel() % width == 0:
            # What a model computes at other rows is arbitrary.
            expected, actual = expected.reshape(-1, width)[rows], actual.reshape(-1, width)
            if len(actual) == count:
                actual = actual[rows]
            else:
                reduced = True
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        if expected.shape != actual.shape or not torch.allclose(
            expected, actual, rtol=1e-3, atol=1e-4 * max(scale, 1e-6)
        ):
            return None
    return reduced


class PackedTokens(TorchFunctionMode):
    """A batch without its padding: token-wise operators see [1, n, ...] instead of [batch, length].

    Attention within it is computed per sequence, so that no sequence reads another one.

    Attributes:
        retained: int64 [n], rows of the flattened batch that are not padding.
        lengths: tokens of each sequence.
        positions: int64 [1, n], column of each token in the batch.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.shape = tuple(mask.shape)
        mask = mask != 0
        self.retained = mask.reshape(-1).nonzero().squeeze(1)
        self.lengths: list[int] = [n for n in mask.sum(1).tolist() if n]
        self.positions = (self.retained % self.shape[1])[None]
        self._counting = torch.arange(len(self.retained), device=self.retained.device)
        self._gradients = torch.is_grad_enabled()

    def place(self, rows: Tensor) -> Tensor:
        """Return the places of `rows` of the flattened batch among the remaining tokens.

        Raises:
            WorkloadError: one of them is padding.
        """
        places = torch.searchsorted(self.retained, rows)
        places_of = self.retained[places.clamp(max=len(self.retained) - 1)]
        if not torch.equal(places_of, rows):
            raise WorkloadError(
                "unpad: a token with a label is padding in the attention mask",
                remedy="set labels of padding to -100",
            )
        return places

    def pack(self, value: Any) -> Any:
        """Return a tensor [batch, length, ...] as [1, n, ...]; anything else unchanged."""
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == self.shape:
            return value.flatten(0, 1).index_select(0, self.retained)[None]
        return value

    def unpack(self, value: Tensor) -> Tensor:
        """Return a tensor [1, n, ...] as [batch, length, ...], with zeros at padding."""
        full = value.new_zeros(self.shape[0] * self.shape[1], *value.shape[2:])
        padded: Tensor = full.index_copy(0, self.retained, value[0]).unflatten(0, self.shape)
        return padded

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._check_recomputation()
            return packed_attention(self.lengths, *args, **kwargs)
        if func is functional.embedding:
            args = (self._positions(args[0]), *args[1:])
        return func(*args, **kwargs)

    def _positions(self, ids: Tensor) -> Tensor:
        """Return the tokens' positions for ``arange(n)``, which counts through the whole pack."""
        if ids.numel() == len(self.retained) and torch.equal(ids.reshape(-1), self._counting):
            return self.positions.reshape(ids.shape)
        return ids

    def _check_recomputation(self) -> None:
        """Refuse checkpointing, which would run attention again without this mode."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        recomputes = hooks is not None and "checkpoint" in hooks[0].__module__
        if self._gradients and (recomputes or not torch.is_grad_enabled()):
            raise WorkloadError(
                "unpad: attention runs inside activation checkpointing, which would run it again "
                "without the packed batch",
                remedy="switch checkpointing off; without padding less memory is needed",
            )


def packed_attention(
    lengths: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return attention within each of consecutive sequences, by the fused kernel of torch.

    A CPU computes 16-bit inputs in float32: the kernel's backward pass in bfloat16 took 2.6 times
    as long for sequences of up to 128 tokens.

    Args:
        lengths: tokens of each sequence; their sum is n.
        query, key, value: floating-point [1, heads, n, width].
        attn_mask: as in torch, [..., 1 or n, n].
    """
    parts = []
    begin = 0
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    inner = torch.float32 if device == "cpu" and dtype in _SHORT else dtype
    query, key, value = query.to(inner), key.to(inner), value.to(inner)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(inner)
    for q, k, v in zip(*(x.split(lengths, -2) for x in (query, key, value)), strict=True):
        end = begin + q.shape[-2]
        mask = attn_mask
        if mask is not None:
            mask = mask[..., begin:end]
            mask = mask if mask.shape[-2] == 1 else mask[..., begin:end, :]
        # Autocast would convert the inputs again.
        with torch.autocast(q.device.type, enabled=False):
            parts.append(
                functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **options
                )
            )
        begin = end
    return torch.cat(parts, -2).to(dtype)


class _PackedForward:
    """A model's forward that packs the batch, if it gets a mask of padding.

    A replaced forward and not hooks, because hooks do not run after an interrupt.

    Attributes:
        name: argument of the mask.
        first: position of a sequence's first token, if positions are an argument.
        rows: at which the model computes its head; None if at every token.
        sequences: number of sequences that the last forward pass packed; 0 if it packed none.
    """

    def __init__(
        self, forward: Callable[..., Any], name: str, first: int, rows: LabelledRows | None
    ) -> None:
        self.__wrapped__, self.name, self.first, self.sequences = forward, name, first, 0
        self.rows = rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.sequences = 0
        names = list(inspect.signature(self.__wrapped__).parameters)
        named = dict(zip(names, args, strict=False)) | kwargs
        mask = named.get(self.name)
        if not isinstance(mask, Tensor) or mask.numel() != mask.shape[0] * mask.shape[-1]:
            return self.__wrapped__(*args, **kwargs)
        packed = PackedTokens(mask.reshape(mask.shape[0], -1))
        if not packed.lengths:
            return self.__wrapped__(*args, **kwargs)
        labels = named.get("labels")
        if isinstance(labels, Tensor) and tuple(labels.shape) == packed.shape:
            packed.place(labelled(labels))
        self.sequences = len(packed.lengths)
        if self.name == "attention_mask" and "position_ids" in names:
            # Hugging Face: without a mask none is made, and positions are an argument.
            named[self.name], named["position_ids"] = None, named.get("position_ids")
            if named["position_ids"] is None:
                named["position_ids"] = self._positions(packed, named.get("input_ids"))
        else:
            named[self.name] = mask.reshape(1, *mask.shape[1:-1], -1)[..., packed.retained]
        gathered = 0
        if self.rows is not None and self.rows.positions is not None:
            self.rows.positions = packed.place(self.rows.positions)
            gathered = len(self.rows.positions)
        with packed:
            output = self.__wrapped__(**{key: packed.pack(value) for key, value in named.items()})
        if labels is not None or gathered == len(packed.retained):
            return output
        shape = (1, len(packed.retained))
        return tree_map_only(
            Tensor, lambda x: packed.unpack(x) if tuple(x.shape[:2]) == shape else x, output
        )

    def _positions(self, packed: PackedTokens, ids: Tensor | None) -> Tensor:
        """Return positions as Hugging Face computes them, int64 [1, n]."""
        if not self.first or ids is None:
            return packed.positions + self.first
        # RoBERTa counts tokens that are not padding, wherever the padding is.
        padding = self.first - 1
        tokens = ids != padding
        positions: Tensor = packed.pack(tokens.cumsum(1) * tokens + padding)
        return positions


def unpad(model: nn.Module, run: Callable[[], object], mask: Tensor) -> None:
    """Compute token-wise layers of `model` without padding, and attention per sequence, in place.

    A batch [batch, length] is packed to [1, n] inside the model if it gets a mask of padding, 1 for
    tokens. Outputs of a call with ``labels=`` stay packed, others have zeros at padding.

    Args:
        run: one forward pass of `model`, for the comparison.
        mask: [batch, length], the mask of `run`, with at least two sequences.

    Raises:
        InvalidArgumentError: `mask` is something else.
        WorkloadError: the model gets no mask of padding, or its outputs change.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or int((mask != 0).any(1).sum()) < 2:
        raise InvalidArgumentError(
            "mask", "is not a mask [batch, length] of at least two sequences",
            remedy="only a batch of several shows that no sequence reads another one",
        )  # fmt: skip
    before = outputs_of(model, run)
    names = [name for name in _arguments(model) if "mask" in name and "head" not in name]
    retained = mask.reshape(-1).nonzero().squeeze(1)
    own = vars(model).get("forward")
    # RoBERTa and its relatives number positions after that of padding.
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    firsts = (0,) if padding is None else (0, int(padding) + 1)
    for name, first in itertools.product(names, firsts):
        forward = _PackedForward(model.forward, name, first, _labelled_rows(model))
        model.forward = forward
        with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
            equal = _equal_at(before, outputs_of(model, run), retained, mask.numel()) is not None
            if equal and forward.sequences > 1:
                return
        del model.forward
        if own is not None:
            model.forward = own
    raise WorkloadError(
        "unpad: the model computes something else without padding"
        if names
        else "unpad: no argument of the model's forward is a mask of padding",
        remedy=_inside(model)
        or "pass attention_mask, 1 for tokens; call scaled_dot_product_attention (technique "
        "sdpa), and look positions up by nn.Embedding or position_ids",
    )
