"""Neural variable risk minimization around any optimizer."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar import noise as noise_
from neuvar._validate import one_of
from neuvar.noise import Draw, Term
from neuvar.optim.auto_b import AutoB, Reports, inner_product, share
from neuvar.optim.forward import OWNERS, Noise, alive, not_compiled
from neuvar.optim.layout import is_sharded
from neuvar.optim.noisy_parameters import MODES, NoisyParameters, end_other_noise
from neuvar.optim.wrapper import PREFIX, Wrapper, is_real_step

RANKS = ("shared", "per_rank")
FUSED = ("cpu", "cuda", "mps", "xpu")
"""Devices for which torch has fused kernels."""


class NVRM(Wrapper):
    r"""Neural variable risk minimization with any optimizer.

    .. math:: \theta_t = \mathrm{inner}\big(\theta_{t-1},
              \nabla L(\theta_{t-1} + \epsilon_{t-1})\big), \qquad \epsilon_t \sim b \cdot
              \mathrm{noise}

    If you pass the model, only forward passes in training mode with gradients on have noise. The
    model always holds the clean weights :math:`\theta`. :meth:`step` updates :math:`\theta` (with
    weight decay) by the gradient at :math:`\theta + \epsilon` and draws new noise. The first
    gradient is taken at :math:`\theta_0`, without noise.

    If you pass parameters alone, the optimizer does not know when the model is trained. The
    parameters then hold :math:`\theta + \epsilon` between steps, as in the paper's code. Evaluate,
    save and change them inside :meth:`denoised`. If weights were changed elsewhere, the next call
    raises an error. Changes through ``parameter.data`` or a NumPy view are detected when the noise
    is removed and after draws 1, 2, 4, 8 and so on; in replay mode they are not detected.

    Xie et al., "Artificial Neural Variability for Deep Learning", Neural Computation 2021.

    Args:
        inner: any optimizer that evaluates the loss once per step.
        model: the module that is trained, or one that wraps it (DDP, FSDP2, ``torch.compile``). It
            must have all parameters of ``inner`` whose b is not 0.
        b: scale of the noise: Gaussian N(0, b²), Laplace(0, b) or uniform(-b, b), or "auto" to
            set it during training; see :class:`neuvar.optim.auto_b.AutoB`. A parameter group
            may have its own ``b`` and ``noise``, which may be changed between steps and apply
            from the next draw on. With b = 0 its weights get no noise. Frozen weights get none.
        std: standard deviation of the noise, in place of ``b``; also for a group.
        noise: ``"gaussian"``, ``"laplace"`` or ``"uniform"``.
        seed: noise depends on the seed, the number of the draw and the position of a weight. The
            global generator is not used. Two optimizers with the same seed draw the same noise:
            use different seeds for the two networks of a GAN.
        mode: ``"exact"`` keeps the clean weights to the bit, with a buffer as large as the
            parameters. ``"replay"`` needs no buffer: it subtracts the noise again, with a rounding
            error per step of at most one unit in the last place of ``abs(θ) + abs(ε)``. Half
            precision needs ``"exact"``.
        sampler: ``"table"`` reads a table of precomputed draws at a random offset; ``"fresh"``
            draws new numbers.
        ranks: under data parallelism, ``"shared"`` gives all processes the same noise.
            ``"per_rank"`` gives each its own, so that the averaged gradient averages over noise.
        relative_to: multiply b by the root mean square of each ``"tensor"`` or ``"filter"`` (a row
            of a matrix, a filter of a convolution), or by each ``"weight"``. The noise of a layer
            then scales with its weights. A parameter group may have its own. Needs ``model``,
            ``mode="exact"`` and a number for b.

    >>> model = torch.nn.Linear(4, 2)
    >>> before = model.weight.detach().clone()
    >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, b=0.05)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(3, 4)).sum().backward()  # at θ + ε, from the second step on
    ...     optimizer.step()
    >>> torch.allclose(model.weight, before - 2 * 0.1 * model.weight.grad)  # θ
    True
    """

    controls_b = True
    _picks_fused = False
    _sharded = False
    _reports: Reports

    def __init__(
        self,
        inner: Optimizer,
        *,
        model: nn.Module | None = None,
        b: float | str | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
        relative_to: str | None = None,
    ) -> None:
        one_of("mode", mode, MODES)
        one_of("ranks", ranks, RANKS)
        if ranks == "per_rank" and mode == "replay":
            raise ValueError(
                "ranks='per_rank' needs mode='exact': if each process subtracted different noise, "
                "their clean weights would drift apart"
            )
        self._mode, self._ranks, self._reports = mode, ranks, Reports()
        super().__init__(
            inner,
            b=b,
            std=std,
            noise=noise,
            seed=seed,
            sampler=sampler,
            rank=_own_rank() if ranks == "per_rank" else 0,
            model=model,
            relative_to=relative_to,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _OPTIMIZERS[id(self)] = self

    def __getstate__(self) -> dict[str, Any]:
        own = {"_mode": self._mode, "_ranks": self._ranks, "_sharded": self._sharded}
        return super().__getstate__() | own | {"_reports": Reports()}

    @not_compiled(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the clean weights with the gradient at the perturbed ones, then draw new noise.

        Without gradients, or with lr=0, the noise is kept. A closure is called once, at the
        perturbed weights. ``b="auto"`` uses the loss that it returns, unless the closure calls
        :meth:`report_loss`.
        """
        loss = None if closure is None else self._closure_loss(closure)
        if not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.inner.step()
            self._weights.use()
            return loss
        draws, eps = self._begin_step()
        try:
            self.inner.step()
        except BaseException:
            self._weights.end_update(None)
            raise
        self._end_step(draws, eps)
        return loss

    @not_compiled()
    def _begin_step(self) -> tuple[list[Draw] | None, Noise | None]:
        """Give the inner optimizer the clean weights; return the next draws and noise.

        With lr=0 both are None, and the present noise is kept.
        """
        groups, weights = self.param_groups, self._weights
        draws, eps = None, None
        if self._picks_fused and not self._sharded:
            # Fused kernels need dense gradients, and momentum buffers for all weights or for none.
            for group in groups:
                trained = [p for p in group["params"] if p.grad is not None]
                momenta = {bool(self.inner.state.get(p)) for p in trained if group.get("momentum")}
                group["fused"] = len(momenta) < 2 and all(
                    (p.is_cpu or p.device.type in FUSED) and p.grad.layout is torch.strided
                    for p in trained
                )
        if is_real_step(groups):
            if weights.holds and weights.held:
                raise RuntimeError(
                    "step() was called after eval() or inside denoised(), so the gradient may not "
                    "be that of perturbed weights; call optimizer.train() or leave denoised() first"
                )
            if weights.model is not None and weights.eps and not weights.passes:
                warnings.warn(
                    "the gradients were computed without noise: since the last step, the model of "
                    "this optimizer had no forward pass in training mode; call model.train(), "
                    "create the optimizer with the model that is trained, and call step() once "
                    "per backward pass",
                    stacklevel=_level_of_caller(),
                )
            if any("auto" in group for group in groups):
                self._control_b()
            draws, eps = self._next_noise()
        if len(OWNERS) > 1:
            end_other_noise(self._parameters(), weights)
        weights.begin_update()
        return draws, eps

    @not_compiled()
    def _end_step(self, draws: list[Draw] | None, eps: Noise | None) -> None:
        if draws is not None:
            self._record(draws)
        self._weights.end_update(eps)
        if any("auto" in group for group in self.inner.param_groups):
            self._reports.close()
            self._drop_reports()
        self._weights.use()

    def report_loss(self, loss: Tensor, *, scale: float | Tensor = 1.0) -> None:
        """Report a loss to ``b="auto"``, before its ``backward()``; no-op if b is a number.

        Report each loss of a step, divided by the number of micro-batches or not. Gradient
        scaling and clipping make no difference.

        Args:
            loss: scalar tensor from which the gradients are computed.
            scale: factor of a gradient scaler, if ``loss`` was already multiplied by it.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), model=model, b="auto")
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(3, 4)).square().mean()
        ...     optimizer.report_loss(loss)
        ...     loss.backward()
        ...     optimizer.step()
        """
        is_tensor = isinstance(loss, Tensor)
        if not is_tensor or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"loss must be the tensor of one number that backward() is called on, got {loss!r}"
            )
        if self._auto_groups():
            self._check_gradients()
            self._watch_gradients()
            self._reports.expect(loss, scale)

    def noise_metrics(self) -> dict[str, float]:
        r"""Return b and an estimate of δ, for logs. Call it between ``backward()`` and ``step()``.

        δ is how much the noise raises the loss, :math:`L(\theta + \epsilon) - L(\theta)`. It is
        estimated from the gradient at the perturbed weights, without another forward pass:

        .. math:: \delta \approx \tfrac12\, \epsilon \cdot \nabla L(\theta + \epsilon).

        For a quadratic loss both have the same mean, :math:`\tfrac12 b^2\,\mathrm{tr}\,H`. The
        value of one step is noisy. Gradients must be unscaled and not yet clipped. b is that of the
        first parameter group.
        """
        weights = self._weights
        costs = [
            inner_product(term, p.grad, weights.size(p))
            for p, term in weights.eps.items()
            if p.grad is not None
        ]
        delta = 0.5 * float(torch.stack(costs).sum()) if costs else 0.0
        return {"b": float(self.param_groups[0]["b"]), "delta": delta}

    @property
    def losses_reported(self) -> int:
        """Number of losses that were reported since the last step."""
        return self._reports.count + self._reports.waiting

    def _check_gradients(self) -> None:
        """Drop reports whose gradients were zeroed; gradients without a report are an error."""
        groups, reports = self._auto_groups(), self._reports
        control = AutoB(*groups[0]["auto"])
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if not grads and (control.reported or reports.count):
            self._drop_reports()
            return
        unreported = control.due and not (control.reported or reports.count or reports.waiting)
        if unreported and any(bool(g.any()) for g in grads):
            raise RuntimeError(
                'b="auto" needs all losses of a step, but there are gradients of one that was not '
                "reported; call optimizer.report_loss(loss) before each backward(), or zero_grad() "
                "before the first"
            )

    def _watch_gradients(self) -> None:
        groups = self._auto_groups()
        control = AutoB(*groups[0]["auto"])
        if control.due:  # not at every step: reading a number waits for the device
            params = [p for group in groups for p in group["params"]]
            self._reports.watch(params, self._weights.eps, sizes=not control.begun)

    def _closure_loss(self, closure: Callable[[], Any]) -> Any:
        if not self._auto_groups():
            return super()._closure_loss(closure)
        self._watch_gradients()
        before = self._reports.count
        loss = super()._closure_loss(closure)
        if loss is not None and self._reports.count == before and not self._reports.waiting:
            if max(self._reports.backwards.values(), default=1) > 1:
                raise RuntimeError(
                    'b="auto" needs all losses of a step, but the closure called backward() more '
                    "than once and returned one loss; call optimizer.report_loss(loss) in the "
                    "closure before each backward()"
                )
            self._reports.add(loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients and drop the reported losses."""
        self.inner.zero_grad(set_to_none)
        if any("auto" in group for group in self.inner.param_groups):
            self._drop_reports()
        self._weights.drop_perturbed()  # writes through p.data leave no other trace
        self._weights.use()

    def _drop_reports(self) -> None:
        self._reports.waiting = 0
        self._reports.clear()
        for group in self._auto_groups():
            group["auto"] = tuple(AutoB(*group["auto"]).reset())

    def _read_reports(self) -> None:
        """Move the reports into the groups, which a checkpoint contains."""
        for group in self._auto_groups():
            group["auto"] = tuple(AutoB(*group["auto"]).accumulate(self._reports))
        self._reports.clear()

    def _auto_groups(self) -> list[dict[str, Any]]:
        """The groups with ``b="auto"``; they share one control."""
        return [group for group in self.param_groups if "auto" in group]

    @not_compiled()
    def _control_b(self) -> None:
        """Update b every few steps, from the cost of noise and what has been learned."""
        groups = self._auto_groups()
        waiting, unreported = self._reports.waiting, self._reports.unreported
        self._read_reports()
        control, drawn = AutoB(*groups[0]["auto"]), Draw(*self._options["drawn"])
        if waiting or not control.reported:
            raise RuntimeError(
                'b="auto" needs the loss: call optimizer.report_loss(loss) before loss.backward(), '
                "or give step() a closure that returns it"
            )
        if unreported:
            raise RuntimeError(
                'b="auto" needs all losses of a step, but backward() was called on more losses '
                "than were reported; call optimizer.report_loss(loss) before each backward()"
            )
        if (drawn.number, drawn.sign) != (control.drawn, 1):
            raise RuntimeError(
                'b="auto" needs one draw of noise for the whole gradient, but resample() has drawn '
                "new noise; give a number for b"
            )
        b = groups[0]["b"]
        if control.due:
            # Weights other than 1 are those of a gradient scaler or of micro-batches.
            plain = control.new_weight == control.reported
            updates, weight = control.updates, 1.0 if plain else control.new_weight
            size = max(0.0, *control.new_sizes) if control.new_sizes else 0.0
            new = control.new_cost / weight, control.new_loss / weight, size / weight
            control = control.update(*self._agreed(*new))
            b = control.applied(b) if control.updates > updates else b
        control = control.reset()._replace(drawn=drawn.number + 1, steps=control.steps + 1)
        share(groups, b, tuple(control))

    def _agreed(self, cost: float, loss: float, size: float) -> tuple[float, float, float]:
        """Means over all processes, so that they use the same b."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        count = torch.distributed.get_world_size() if distributed else 1
        if count > 1:
            sums = torch.tensor([cost, loss, size], device=self._parameters()[0].device)
            torch.distributed.all_reduce(sums)
            cost, loss, size = (sums / count).tolist()
        return cost, loss, size

    def resample(self, *, antithetic: bool = False) -> None:
        """Draw new noise without a step, for example between the parts of a large batch.

        Args:
            antithetic: negate the present noise instead of drawing new noise.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), b=0.05)
        >>> for k, part in enumerate(torch.ones(8, 4).split(2)):
        ...     optimizer.resample(antithetic=k % 2 == 1)  # ε, -ε, ε', -ε'
        ...     model(part).mean().backward()
        >>> optimizer.step()
        """
        if antithetic:
            old = [Draw(*group["drawn"]) for group in self.param_groups]
            draws = [draw._replace(sign=-draw.sign) for draw in old]
            eps = {
                p: term._replace(draw=term.draw._replace(sign=-term.draw.sign))
                for p, term in self._weights.eps.items()
            }
        else:
            draws, eps = self._next_noise()
        self._weights.replace(eps)
        self._record(draws)

    def accept_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Accept weights that were changed while they carried noise as the clean weights.

        Use it after an error about such a change. All other parameters keep their clean weights.

        Args:
            params: the parameters; by default those that were changed.
        """
        self._weights.accept(params)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer and of the noise, in torch's usual form.

        An optimizer created from parameters alone saves the clean weights as well (in replay mode a
        fingerprint), so that the model's state may be saved clean or perturbed.
        """
        self._weights.check_untouched()
        if self._auto_groups():
            self._read_reports()
        return super().state_dict()

    def _own_keys(self) -> list[str]:
        return [PREFIX + key for key in ("b", *self._weights.keys)]

    def _own_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        term = self._weights.eps.get(p)
        if term is None and not group["b"]:
            return {PREFIX + "b": 0.0}
        values = (term.b if term else 0.0, *self._weights.saved(p))
        return dict(zip(NVRM._own_keys(self), values, strict=True))

    def _check_own_state(self, own: list[dict[str, Any]], draws: list[Draw]) -> Callable[[], None]:
        """Check that the model holds the weights that the state was saved with."""
        slots, rank = self._number_parameters(), Draw(*self._options["drawn"]).rank
        # In a distributed checkpoint each parameter may have been written by another rank.
        writers = range(torch.distributed.get_world_size()) if self._ranks == "per_rank" else ()
        terms: dict[Tensor, Term] = {}
        saved: dict[Tensor, list[Any]] = {}
        kinds: dict[Tensor, str | None] = {}
        for p, state, draw in zip(self._parameters(), own, draws, strict=True):
            if p.requires_grad and PREFIX + "b" not in state and draw.number:
                raise ValueError(f"the state dict has no keys that begin with {PREFIX!r}")
            b = noise_.scale(PREFIX + "b", state.get(PREFIX + "b", 0.0))
            if b and draw.number:
                terms[p] = Term(slots[p], draw, b)
                saved[p] = _values(state, NVRM._own_keys(self)[1:], self._mode)
                if self._weights.model is not None:
                    continue  # its weights are clean
                others = [Term(slots[p], draw._replace(rank=writer), b) for writer in writers]
                assert isinstance(self._weights, NoisyParameters)
                kinds[p] = self._weights.recognize(p, saved[p], terms[p], others)
        # Each process uses the noise of its own rank, whichever rank saved the state.
        after = {p: t._replace(draw=t.draw._replace(rank=rank)) for p, t in terms.items()}
        weights = self._weights
        if isinstance(weights, NoisyParameters) and weights.model is None:
            return lambda: weights.load(saved, kinds, before=terms, after=after)
        return lambda: weights.replace(after)

    def _check_parameters(self, params: list[Tensor]) -> None:
        super()._check_parameters(params)
        self._sharded = any(map(is_sharded, params))
        for index, p in enumerate(params):
            what = f"parameter {index} of shape {tuple(p.shape)}"
            if self._mode == "replay" and p.element_size() < 4:
                raise ValueError(
                    f"{what} has dtype {p.dtype}, too coarse for mode='replay': the weights "
                    "would drift; use mode='exact'"
                )
            if self._ranks == "per_rank" and is_sharded(p):
                raise ValueError(f"{what} is sharded, but ranks='per_rank' needs whole parameters")


def optimizer_of(model: nn.Module) -> NVRM:
    """The NVRM optimizer of a model; if there are several, the last one used.

    Use it where a framework has wrapped the optimizer, or where only the model is known.

    >>> from neuvar import NVRMSGD
    >>> model = nn.Linear(4, 2)
    >>> optimizer = NVRMSGD(model, lr=0.1, b="auto")
    >>> loss = model(torch.ones(3, 4)).square().mean()
    >>> optimizer_of(model).report_loss(loss)
    """
    optimizers = optimizers_of(model)
    if not optimizers:
        raise ValueError("no NVRM optimizer has parameters of this model")
    return optimizers[-1]


def optimizers_of(model: nn.Module) -> list[NVRM]:
    """All NVRM optimizers with parameters of a model; the last one used is last."""
    params = set(model.parameters())
    optimizers = [o for o in alive(_OPTIMIZERS) if not params.isdisjoint(o._parameters())]
    return sorted(optimizers, key=lambda optimizer: optimizer._weights.used)


_OPTIMIZERS: weakref.WeakValueDictionary[int, NVRM] = weakref.WeakValueDictionary()


def _values(state: dict[str, Any], keys: list[str], mode: str) -> list[Any]:
    if missing := [key for key in keys if key not in state]:
        raise ValueError(
            f"the state dict has no {missing[0]!r}: it was not saved with mode={mode!r} by an "
            "optimizer created from parameters alone, as this one is"
        )
    if not keys and len(state) > 1:
        raise ValueError(
            "the state dict is that of an optimizer created from parameters alone; create this one "
            "in the same way, without the model"
        )
    return [state[key] for key in keys]


def _level_of_caller() -> int:
    """The ``stacklevel`` of the first caller that is not code of torch or of this package."""
    files = (torch.__file__, noise_.__file__)
    inside = tuple(str(Path(file).parent) + os.sep for file in files if file)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _own_rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed:
        raise ValueError("ranks='per_rank' needs an initialized torch.distributed process group")
    return torch.distributed.get_rank()
