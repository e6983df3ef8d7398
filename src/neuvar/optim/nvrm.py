"""Neural variable risk minimization around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar import noise as noise_
from neuvar.noise import Draw
from neuvar.optim.auto import AutoB, share
from neuvar.optim.keeping import Exact, Replay
from neuvar.optim.layout import is_sharded
from neuvar.optim.perturbation import Perturbation, Term
from neuvar.optim.wrapper import PREFIX, Wrapper, not_compiled

Drawn = tuple[list[Draw], Perturbation]
"""Noise, and its record for each group."""

MODES: dict[str, type[Exact] | type[Replay]] = {"exact": Exact, "replay": Replay}
RANKS = ("shared", "per_rank")


class NVRM(Wrapper):
    r"""Minimise the neural variable risk with any optimizer.

    .. math:: \theta_t = \mathrm{inner}\big(\theta_{t-1},
              \nabla L(\theta_{t-1} + \epsilon_{t-1})\big), \qquad \epsilon_t \sim b \cdot
              \mathrm{noise}

    Between steps the model holds :math:`\theta + \epsilon`, so an ordinary training loop takes its
    gradient there; :meth:`step` restores :math:`\theta`, lets the inner optimizer update it (its
    weight decay included) and draws fresh noise. The first gradient is taken at :math:`\theta_0`
    itself. Look at the weights inside :meth:`denoised`.

    Weights that were written to from outside while they carried noise are noticed and refused at
    the next call, because nobody can tell noise from weight in them. Writes that bypass PyTorch's
    version counter, through ``parameter.data`` or a NumPy view, are noticed when the noise is next
    taken off, and after draws 1, 2, 4, 8 and so on; between these they are lost, and in replay mode
    they are never noticed.

    Xie et al., "Artificial Neural Variability for Deep Learning", Neural Computation 2021.

    Args:
        inner: any optimizer that evaluates the loss once a step.
        b: scale of the noise: Gaussian N(0, b²), Laplace(0, b) or uniform(-b, b), or "auto" to
            have it set while training; see :class:`neuvar.optim.auto.AutoB`. A parameter group may
            have its own ``b`` and ``noise``; 0 leaves its weights alone. Both may be
            changed between steps and hold from the next draw on, as does freezing a weight, which
            then carries no noise.
        std: standard deviation of the noise, in place of ``b``; also for a group.
        noise: ``"gaussian"``, ``"laplace"`` or ``"uniform"``.
        seed: the noise is a function of it, of the number of the draw, and of the position of a
            weight; the global generator is never touched. Two optimizers with the same seed draw
            the same noise: give each of a pair, as of a GAN, its own.
        mode: ``"exact"`` keeps the clean weights to the bit in a buffer as large as the
            parameters; ``"replay"`` keeps no buffer and subtracts the noise again, which rounds
            each weight twice a step: an error of at most one unit in the last place of
            ``abs(θ) + abs(ε)``. Half precision needs ``"exact"``.
        sampler: ``"table"`` reads a table of precomputed draws at a random place, ``"fresh"``
            draws anew.
        ranks: under data parallelism, ``"shared"`` gives every process the same noise and
            ``"per_rank"`` each its own, so that the averaged gradient averages over noise, too.

    >>> model = torch.nn.Linear(4, 2)
    >>> before = model.weight.detach().clone()
    >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), b=0.05)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    >>> with optimizer.denoised():
    ...     torch.allclose(model.weight, before - 0.1 * model.weight.grad)
    True
    >>> torch.allclose(model.weight, before - 0.1 * model.weight.grad)
    False
    """

    controls_b = True
    _heard = False
    """Whether a loss was told while the closure of a step was running."""

    def __init__(
        self,
        inner: Optimizer,
        *,
        b: float | str | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if ranks not in RANKS:
            raise ValueError(f"ranks must be one of {', '.join(RANKS)}, got {ranks!r}")
        if ranks == "per_rank" and mode == "replay":
            raise ValueError(
                "ranks='per_rank' needs mode='exact': by subtracting different noise the clean "
                "weights of the processes would drift apart"
            )
        self._mode, self._ranks = mode, ranks
        super().__init__(
            inner,
            b=b,
            std=std,
            noise=noise,
            seed=seed,
            sampler=sampler,
            rank=_own_rank() if ranks == "per_rank" else 0,
            keep=MODES[mode](),
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_mode": self._mode, "_ranks": self._ranks}

    @not_compiled(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the clean weights with the gradient at the perturbed ones, then draw new noise.

        A step that can move nothing, for want of gradients or with a learning rate of 0, keeps
        the noise as it is. A closure is called once, at the perturbed weights, and its loss is told
        to ``b="auto"``. One that clips its gradients would hide their size: let it call
        :meth:`tell` itself, before it clips.
        """
        self._heard = False
        loss = self._closure_loss(closure)
        if not self._has_gradients():
            self.inner.step()
            return loss
        if loss is not None and not self._heard:
            self.tell(loss)
        self._control_b()
        lent, drawn = self._begin_update()
        try:
            self.inner.step()
        except BaseException:
            self._end_update(lent, None)
            raise
        self._end_update(lent, drawn)
        return loss

    def tell(self, loss: Tensor | float) -> None:
        """Tell ``b="auto"`` a loss, after its ``backward()``.

        Where a gradient is made up of parts, tell each loss that ``backward()`` is called on. Where
        it is scaled or clipped, tell after ``scaler.unscale_(optimizer)`` and before clipping. With
        a number for b this does nothing.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), b="auto")
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(3, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.tell(loss)
        ...     optimizer.step()
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be one number, got shape {tuple(loss.shape)}")
        groups = self._auto_groups()
        if not groups:
            return
        params = [p for group in groups for p in group["params"]]
        if all(p.grad is None for p in params):
            raise RuntimeError(
                "tell(loss) found no gradient in the groups whose b sets itself; call it after "
                "loss.backward() and before zero_grad()"
            )
        control = AutoB(*groups[0]["auto"])
        control = control._replace(told=control.told + 1)
        if control.due:  # reading a number makes a device wait
            cost = self._weights.carried.along_gradients(params)
            value = loss.detach() if isinstance(loss, Tensor) else loss
            control = control.hears(float(value), cost, 0.0 if control.begun else _size(params))
        for group in groups:
            group["auto"] = tuple(control)
        self._heard = True

    @property
    def controlled(self) -> bool:
        """Whether the b of a group sets itself."""
        return bool(self._auto_groups())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the losses that were told of them."""
        super().zero_grad(set_to_none)
        for group in self._auto_groups():
            group["auto"] = tuple(AutoB(*group["auto"]).forgets())

    def _auto_groups(self) -> list[dict[str, Any]]:
        """The groups whose b sets itself; they share one control."""
        return [group for group in self.param_groups if "auto" in group]

    @not_compiled()
    def _control_b(self) -> None:
        """Set b anew now and then, by what noise costs and what has been learned."""
        groups = self._auto_groups()
        if not groups or not self._is_real_step() or self._weights.holds:
            return
        control, drawn = AutoB(*groups[0]["auto"]), self._latest()
        if not control.told:
            raise RuntimeError(
                'b="auto" needs the loss: call optimizer.tell(loss) between backward() and step(), '
                "or give step() a closure that returns it"
            )
        if (drawn.number, drawn.sign) != (control.drawn, 1):
            raise RuntimeError(
                'b="auto" needs the whole gradient under one draw of noise, but it was drawn anew '
                "by resample(); give a number for b"
            )
        b = groups[0]["b"]
        if control.due:
            looks = control.looks
            found = control.new_cost, control.new_loss, control.new_size
            control = control.sees(*self._agreed(*found))
            b = control.applied(b) if control.looks > looks else b
        control = control.forgets()._replace(drawn=drawn.number + 1, steps=control.steps + 1)
        share(groups, b, tuple(control))

    def _agreed(self, cost: float, loss: float, size: float) -> tuple[float, float, float]:
        """What all processes have found, so that they go on with the same b."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        count = torch.distributed.get_world_size() if distributed else 1
        if count > 1:
            found = torch.tensor([cost, loss, size], device=self._parameters()[0].device)
            torch.distributed.all_reduce(found)
            cost, loss, size = (found / count).tolist()
            if self._ranks == "per_rank":  # each has only its part in the mean gradient
                cost *= count
        return cost, loss, size

    @not_compiled()
    def _begin_update(self) -> tuple[Perturbation, Drawn | None]:
        """Check everything, then show the clean weights to the inner optimizer."""
        drawn = None
        if self._is_real_step():
            if self._weights.holds:
                raise RuntimeError(
                    "step() was called while the weights are denoised, so the gradient may not be "
                    "that of perturbed weights; call optimizer.train(), leave denoised(), or put "
                    "the guarded model into training mode first"
                )
            drawn = self._fresh_noise()
        return self._weights.lend(), drawn

    @not_compiled()
    def _end_update(self, lent: Perturbation, drawn: Drawn | None) -> None:
        """Perturb the updated weights, with fresh noise if there is any."""
        records, eps = drawn or (None, self._weights.eps)
        if records is not None:
            self._record(records)
        self._weights.take_back(lent, eps)

    def resample(self, *, antithetic: bool = False) -> None:
        """Replace the noise without a step, for example between the parts of a large batch.

        Args:
            antithetic: turn the sign of the present noise instead of drawing fresh noise.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), b=0.05)
        >>> for k, part in enumerate(torch.ones(8, 4).split(2)):
        ...     optimizer.resample(antithetic=k % 2 == 1)  # ε, -ε, ε', -ε'
        ...     model(part).mean().backward()
        >>> optimizer.step()
        """
        if antithetic:
            old = [Draw(*group["drawn"]) for group in self.param_groups]
            records = [draw._replace(sign=-draw.sign) for draw in old]
            eps = self._weights.eps.turned()
        else:
            records, eps = self._fresh_noise()
        self._weights.replace(eps)
        self._record(records)

    def accept_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Take weights that were changed while they carried noise for clean ones.

        The way on after such a change was refused. All others keep their clean weights.

        Args:
            params: which parameters; by default those that are found changed.
        """
        self._weights.accept(params)

    def _fresh_noise(self) -> Drawn:
        """The records of the next draw, and its noise for all weights that are trained."""
        draws = self._next_draws()
        slots, terms = self._slots(), {}
        for group, draw in zip(self.param_groups, draws, strict=True):
            if b := group["b"]:
                trained = [p for p in group["params"] if p.requires_grad]
                terms.update({p: Term(slots[p], draw, b) for p in trained})
        return draws, Perturbation(terms)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer and of the noise, in torch's usual form.

        It may be taken at any time. In exact mode it holds the clean weights, so that it goes with
        a model's state whether that was saved clean or perturbed; in replay mode it holds a
        fingerprint of both.
        """
        self._weights.check_untouched()
        return super().state_dict()

    def _own_keys(self) -> list[str]:
        return [PREFIX + key for key in ("b", *self._weights.keep.keys)]

    def _own_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        term = self._weights.eps.terms.get(p)
        if term is None and not group["b"]:
            return {PREFIX + "b": 0.0}
        values = (term.b if term else 0.0, *self._weights.saved(p))
        return dict(zip(self._own_keys(), values, strict=True))

    def _check_own_state(self, own: list[dict[str, Any]], draws: list[Draw]) -> Callable[[], None]:
        """Recognise the weights that the model holds as those that the state was saved with."""
        slots, rank = self._slots(), self._latest().rank
        # In a distributed checkpoint each parameter may have been written by another rank.
        writers = range(torch.distributed.get_world_size()) if self._ranks == "per_rank" else ()
        terms: dict[Tensor, Term] = {}
        saved: dict[Tensor, list[Any]] = {}
        found: dict[Tensor, str | None] = {}
        for p, state, draw in zip(self._parameters(), own, draws, strict=True):
            if p.requires_grad and PREFIX + "b" not in state and draw.number:
                raise ValueError(f"the state dict has lost what begins with {PREFIX!r}")
            b = noise_.scale(PREFIX + "b", state.get(PREFIX + "b", 0.0))
            if b and draw.number:
                terms[p] = Term(slots[p], draw, b)
                saved[p] = _values(state, self._own_keys()[1:], self._mode)
                eps, *others = (
                    Perturbation({p: Term(slots[p], draw._replace(rank=writer), b)})
                    for writer in (draw.rank, *writers)
                )
                found[p] = self._weights.recognise(p, saved[p], eps, others)
        # Each process goes on with the noise of its own rank, whoever saved the state.
        after = {p: t._replace(draw=t.draw._replace(rank=rank)) for p, t in terms.items()}
        return lambda: self._weights.load(
            saved, found, before=Perturbation(terms), after=Perturbation(after)
        )

    def _check_parameters(self, params: list[Tensor]) -> None:
        super()._check_parameters(params)
        for index, p in enumerate(params):
            what = f"parameter {index} of shape {tuple(p.shape)}"
            if self._mode == "replay" and p.element_size() < 4:
                raise ValueError(
                    f"{what} has dtype {p.dtype}, in which subtracting noise again drifts; "
                    "use mode='exact'"
                )
            if self._ranks == "per_rank" and is_sharded(p):
                raise ValueError(f"{what} is sharded: its noise cannot be each rank's own")


def _size(params: list[Tensor]) -> float:
    """How fast the loss rises with the logarithm of the size of a tensor, at the most."""
    trained = [(p.detach(), p.grad) for p in params if p.grad is not None]
    return max(float((weights.float() * g.float()).sum()) for weights, g in trained)


def _values(state: dict[str, Any], keys: list[str], mode: str) -> list[Any]:
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(
            f"the state dict has no {missing[0]!r}: it was not saved with mode={mode!r}"
        )
    return [state[key] for key in keys]


def _own_rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed:
        raise ValueError("ranks='per_rank' needs an initialised torch.distributed process group")
    return torch.distributed.get_rank()
