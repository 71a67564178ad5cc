"""`FusedLAMB`: the update of a tensor in two passes over memory.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
ICLR 2020, algorithm 2.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from slipstream.codegen import load, why_no_compiler
from slipstream.errors import InvalidArgumentError

_SOURCE = r"""
#include <stdint.h>
using i64 = int64_t;
struct Tensor { i64 count; float *w; const float* g; float *m, *v; };
struct Settings { float scale, beta1, beta2, fix1, fix2, eps, decay, rate; };

extern "C" void lamb(i64 tensors, const Tensor* tensor, const Settings* settings) {
  for (i64 t = 0; t < tensors; ++t) {
    const Settings s = settings[t];
    const i64 n = tensor[t].count;
    float* __restrict w = tensor[t].w;
    const float* __restrict g = tensor[t].g;
    float* __restrict m = tensor[t].m;
    float* __restrict v = tensor[t].v;
    double ww = 0, uu = 0;
    for (i64 begin = 0; begin < n; begin += 4096) {
      const i64 end = begin + 4096 < n ? begin + 4096 : n;
      float w2 = 0, u2 = 0;
      for (i64 i = begin; i < end; ++i) {
        const float gradient = g[i] * s.scale;
        const float first = m[i] = s.beta1 * m[i] + (1 - s.beta1) * gradient;
        const float second = v[i] = s.beta2 * v[i] + (1 - s.beta2) * gradient * gradient;
        const float root = __builtin_sqrtf(second) * s.fix2 + s.eps;
        const float u = first * s.fix1 / root + s.decay * w[i];
        w2 += w[i] * w[i];
        u2 += u * u;
      }
      ww += w2;
      uu += u2;
    }
    const bool adapts = s.decay > 0 && ww > 0 && uu > 0;
    const float rate = s.rate * (adapts ? static_cast<float>(__builtin_sqrt(ww / uu)) : 1.0f);
    // Backwards: what the first pass touched last is still in the caches.
    for (i64 begin = (n - 1) / 4096 * 4096; begin >= 0; begin -= 4096) {
      const i64 end = begin + 4096 < n ? begin + 4096 : n;
      for (i64 i = begin; i < end; ++i)
        w[i] -= rate * (m[i] * s.fix1 / (__builtin_sqrtf(v[i]) * s.fix2 + s.eps) + s.decay * w[i]);
    }
  }
}
"""
# Sums of vectors, without the start-up code of -ffast-math, which flushes denormals everywhere.
_FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-freciprocal-math")


@functools.cache
def _kernel() -> Any:
    function = load(_SOURCE, _FLAGS).lamb
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


class FusedLAMB(Optimizer):
    """LAMB with one kernel per pass; parameters without weight decay have a trust ratio of 1.

    float32 parameters on a CPU use compiled kernels; others, or without a C++ compiler, several
    operators per list of tensors.

    Args:
        params: as for ``torch.optim.Optimizer``; pass biases and norms in a group with
            ``weight_decay=0``.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, inside the trust ratio.
        max_grad_norm: norm to which gradients of all parameters together are clipped; None for no
            clipping.

    Raises:
        InvalidArgumentError: a setting out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
    ) -> None:
        limits: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        pair: Any = betas
        for name, value in limits.items():
            number = isinstance(value, (Real, torch.Tensor))
            if not number or not 0 <= value < math.inf:
                raise InvalidArgumentError(name, f"{value} is not a finite number of at least 0")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgumentError("betas", f"{betas} are not two numbers")
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidArgumentError("betas", f"{betas} are not in [0, 1)")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidArgumentError("max_grad_norm", f"{max_grad_norm} is not above 0")
        defaults = {**limits, "betas": tuple(betas), "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)

    @classmethod
    def like(cls, optimizer: Optimizer) -> FusedLAMB:
        """Return the optimizer with groups, settings and moments of a user's LAMB."""
        names = ("params", "lr", "betas", "eps", "weight_decay", "max_grad_norm")
        made = cls([{k: v for k, v in g.items() if k in names} for g in optimizer.param_groups])
        for parameter, state in optimizer.state.items():
            if "exp_avg" in state and "exp_avg_sq" in state:
                step = int(state.get("step", 0))
                m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
                made.state[parameter] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
        return made

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fused: list[tuple[Any, dict[str, Any], tuple[float, ...]]] = []
        for group in self.param_groups:
            scale = self._clipping(group["max_grad_norm"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
                state["step"] += 1
                settings = _settings(group, state["step"])
                if _is_fast(p, state):
                    fused.append((p, state, (scale, *settings, group["lr"])))
                else:
                    _update_one(p, state, scale, settings, group["lr"])
        if fused:
            _update_fused(fused)
        return loss

    def _clipping(self, limit: float | None) -> float:
        """Return the factor of all gradients."""
        if limit is None:
            return 1.0
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        values = [x.coalesce().values() if x.is_sparse else x for x in gradients]
        norm = float(torch.nn.utils.get_total_norm(values))
        return min(1.0, limit / (norm + 1e-6))


def updates_like_lamb(optimizer: Optimizer) -> bool:
    """Whether two updates by the optimizer's class can be computed and equal those of `FusedLAMB`.

    Some classes of this name limit norms or leave out the correction of bias. The trial has its own
    parameters with large values and gradients; the optimizer does not change.
    """
    results = []
    for fused in (False, True):
        # Neither hooks nor a step that a scheduler has replaced are called.
        trial: Any = object.__new__(type(optimizer))
        vars(trial).update({k: v for k, v in vars(optimizer).items() if k != "step"})
        trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = {}, {}
        trial.state = defaultdict(dict)
        parameters = [
            torch.nn.Parameter(torch.linspace(-20.0, 30.0, 8, device=group["params"][0].device))
            for group in optimizer.param_groups
        ]
        trial.param_groups = [
            {**group, "lr": 0.01, "params": [parameter]}
            for group, parameter in zip(optimizer.param_groups, parameters, strict=True)
        ]
        if fused:
            trial = FusedLAMB.like(trial)
        for first, last in ((3.0, 24.0), (-90.0, 200.0)):
            for parameter in parameters:
                parameter.grad = torch.linspace(first, last, 8, device=parameter.device)
            try:
                type(trial).step(trial)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError):
                return False
        results.append(torch.cat([parameter.detach().cpu() for parameter in parameters]))
    theirs, ours = results
    return torch.allclose(theirs, ours, rtol=1e-5)


def _is_fast(p: Any, state: dict[str, Any]) -> bool:
    tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
    return why_no_compiler() is None and all(
        x.dtype == torch.float32 and x.device.type == "cpu" and x.layout == torch.strided
        and x.is_contiguous()
        for x in tensors
    )  # fmt: skip


def _settings(group: dict[str, Any], step: int) -> tuple[float, float, float, float, float, float]:
    """Return beta1, beta2, both corrections of bias, eps and weight decay."""
    beta1, beta2 = group["betas"]
    fixes = 1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    return beta1, beta2, *fixes, group["eps"], group["weight_decay"]


def _update_fused(rows: list[tuple[Any, dict[str, Any], tuple[float, ...]]]) -> None:
    """Update (parameter, state, settings of the kernel) of many tensors, on torch's threads."""
    threads = min(torch.get_num_threads(), len(rows))
    shares: list[list[Any]] = [[] for _ in range(threads)]
    loads = [0] * threads
    # A tensor is one thread's, since its trust ratio needs both norms.
    for row in sorted(rows, key=lambda row: -row[0].numel()) if threads > 1 else rows:
        least = loads.index(min(loads))
        shares[least].append(row)
        loads[least] += row[0].numel()

    def run(share: list[Any]) -> None:
        table = [
            (p.numel(), *(x.data_ptr() for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])))
            for p, state, _ in share
        ]
        pointers = np.array(table, np.int64)
        settings = np.array([settings for *_, settings in share], np.float32)
        _kernel()(len(share), pointers.ctypes.data, settings.ctypes.data)

    list(_pool(threads).map(run, shares) if threads > 1 else map(run, shares))


def _update_one(
    p: Any, state: dict[str, Any], scale: float, settings: tuple[float, ...], rate: float
) -> None:
    """Update a parameter by operators of torch."""
    beta1, beta2, fix1, fix2, eps, decay = settings
    gradient = (p.grad.to_dense() if p.grad.layout != torch.strided else p.grad) * scale
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    u = m * fix1 / (v.sqrt() * fix2 + eps) + decay * p
    w_norm, u_norm = p.norm(), u.norm()
    adapts = (w_norm > 0) & (u_norm > 0) & (decay > 0)
    p.sub_(u * torch.where(adapts, w_norm / u_norm, 1.0) * rate)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
