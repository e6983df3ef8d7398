"""Neural variable risk minimization around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar import noise as noise_
from neuvar.noise import Draw
from neuvar.optim.keeping import NONE, Exact, Replay
from neuvar.optim.layout import is_sharded, local
from neuvar.optim.perturbation import Perturbation, Term
from neuvar.optim.wrapper import PREFIX, Wrapper

MODES = {"exact": Exact, "replay": Replay}
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

    Weights that were written to from outside while they carried noise are noticed at the next call
    and refused, because nobody can tell noise from weight in them. Only writes that bypass
    PyTorch's version counter go unnoticed and are lost or keep noise: those through
    ``parameter.data`` or a NumPy view.

    Xie et al., "Artificial Neural Variability for Deep Learning", Neural Computation 2021.

    Args:
        inner: any optimizer that evaluates the loss once a step.
        b: scale of the noise: Gaussian N(0, b²), Laplace(0, b) or uniform(-b, b). A parameter
            group may have its own ``b`` and ``noise``; 0 leaves its weights alone. Both may be
            changed between steps and hold from the next draw on. Frozen weights carry no noise.
        std: standard deviation of the noise, in place of ``b``; also for a group.
        noise: ``"gaussian"``, ``"laplace"`` or ``"uniform"``.
        seed: the noise is a function of it, of the number of the draw, and of the position of a
            weight; the global generator is never touched.
        mode: ``"exact"`` keeps the clean weights to the bit in a buffer as large as the
            parameters; ``"replay"`` keeps no buffer and subtracts the noise again, which rounds
            each weight twice a step: an error of at most one unit in the last place of
            :math:`|\theta| + |\epsilon|`. Half precision needs ``"exact"``.
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

    def __init__(
        self,
        inner: Optimizer,
        *,
        b: float | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
    ) -> None:
        if (b is None) == (std is None):
            raise ValueError(f"give either b or std, got b={b!r} and std={std!r}")
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
            b=noise_.b_from_std(noise, std) if b is None else b,
            noise=noise,
            seed=seed,
            sampler=sampler,
            rank=_own_rank() if ranks == "per_rank" else 0,
        )
        self._keep = MODES[mode]()
        self._eps = NONE
        self._noisy = False  # whether the parameters hold ε now
        self._holds: set[object] = set()  # why they must not
        self._written: dict[Tensor, tuple[int, int]] = {}  # how we left perturbed parameters

    def __getstate__(self) -> dict[str, Any]:
        if self._noisy and self._mode == "replay":
            raise RuntimeError(
                "in replay mode an optimizer can be copied or pickled only inside "
                "`with optimizer.denoised():`"
            )
        own = ("_mode", "_ranks", "_keep", "_eps", "_noisy")
        # Whoever holds the weights clean now will not release the copy: it begins in eval mode.
        holds = {"eval"} if self._holds else set()
        found = {key: getattr(self, key) for key in own}
        return super().__getstate__() | found | {"_holds": holds, "_written": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("_noisy"):
            # A model copied along may have been copied clean.
            with torch.no_grad():
                self._keep.reapply(self._eps)
            self._remember()

    # torch.compile shall compile the inner optimizer's step, not the book-keeping around it.
    @torch.compiler.disable(recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the clean weights with the gradient at the perturbed ones, then draw new noise.

        A step that can move nothing, for want of gradients or with a learning rate of 0, keeps
        the noise as it is. A closure is called once, at the perturbed weights.
        """
        loss = self._closure_loss(closure)
        real = self._is_real_step()
        if real and self._holds:
            raise RuntimeError(
                "step() was called while the weights are denoised, so the gradient may not be that "
                "of perturbed weights; call optimizer.train(), leave denoised(), or put the "
                "guarded model into training mode first"
            )
        draws = self._next_draws() if real else None
        self._check_untouched()
        lent = self._eps if self._noisy else NONE
        with torch.no_grad():
            self._keep.lend(lent)
            try:
                self.inner.step()
                if draws is not None:
                    self._draw_noise(draws)
            finally:
                self._keep.take_back(lent)
                if not self._holds:
                    self._apply(updated=lent)
        return loss

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
        draws = None if antithetic else self._next_draws()
        with torch.no_grad(), self.denoised():
            if draws is None:
                self._turn_noise()
            else:
                self._draw_noise(draws)

    @contextmanager
    def denoised(self) -> Iterator[None]:
        """Restore the clean weights inside a ``with`` block, and the very same noise after it.

        What is done to the weights inside is kept. Blocks may be nested.
        """
        reason = object()
        self._hold(reason)
        try:
            yield
        finally:
            self._release(reason)

    def eval(self) -> None:
        """Restore the clean weights until :meth:`train` is called. May be called twice."""
        self._hold("eval")

    def train(self) -> None:
        """Put back the noise that :meth:`eval` took away. May be called twice."""
        self._release("eval")

    def accept_weights(self) -> None:
        """Take the weights as they stand for the clean ones, whatever they were before.

        The way on after weights were replaced from outside while they carried noise.
        """
        self._noisy = False
        if not self._holds:
            self._apply()

    def clean_copy(self, p: Tensor) -> Tensor:
        """Copy of the clean weights of a parameter, perturbed or not."""
        if not (self._noisy and p in self._eps.terms):
            return p.detach().clone()
        self._check_untouched()
        with torch.no_grad():
            found = self._keep.clean(p, self._eps)
        self._remember()
        return found

    # The noise: what it is, and whether it is on the weights.

    def _draw_noise(self, draws: list[Draw]) -> None:
        slots, terms = self._slots(), {}
        for group, draw in zip(self.param_groups, draws, strict=True):
            group["drawn"] = tuple(draw)
            b = noise_.scale("b", group["b"])
            terms.update({p: Term(slots[p], draw, b) for p in group["params"] if p.requires_grad and b})
        self._eps = Perturbation(terms)

    def _turn_noise(self) -> None:
        for group in self.param_groups:
            draw = Draw(*group["drawn"])
            group["drawn"] = tuple(draw._replace(sign=-draw.sign))
        self._eps = Perturbation(
            {
                p: term._replace(draw=term.draw._replace(sign=-term.draw.sign))
                for p, term in self._eps.terms.items()
            }
        )

    def _apply(self, updated: Perturbation = NONE) -> None:
        with torch.no_grad():
            self._keep.apply(self._eps, updated=updated)
        self._noisy = True
        self._remember()

    def _hold(self, reason: object) -> None:
        """Keep the weights clean until every reason to do so is released."""
        if self._noisy:
            self._check_untouched()
            with torch.no_grad():
                self._keep.remove(self._eps)
            self._noisy = False
        self._holds.add(reason)

    def _release(self, reason: object) -> None:
        if reason in self._holds:
            self._holds.remove(reason)
            if not self._holds:
                self._apply()

    def _remember(self) -> None:
        self._written = {p: _mark(p) for p in self._eps.terms}

    def _check_untouched(self) -> None:
        """Refuse to go on if somebody else wrote to perturbed weights."""
        if not self._noisy:
            return
        for p in self._eps.terms:
            if self._touched(p) and not self._keep.untouched(p, self._eps):
                index = self._eps.terms[p].slot.index
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(p.shape)} was changed while it carried "
                    "noise; change weights inside `with optimizer.denoised():` or guard the model. "
                    "If the weights are now as the clean ones shall be, call "
                    "optimizer.accept_weights()"
                )

    def _touched(self, p: Tensor) -> bool:
        return p in self._written and self._written[p] != _mark(p)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer and of the noise, in torch's usual form.

        It may be taken at any time. In exact mode it holds the clean weights, so that it goes with
        a model's state whether that was saved clean or perturbed; in replay mode it holds a
        fingerprint of both.
        """
        self._check_untouched()
        return super().state_dict()

    def _own_keys(self) -> list[str]:
        return [PREFIX + key for key in ("b", *self._keep.keys)]

    def _own_state(self, p: Tensor) -> dict[str, Any]:
        term = self._eps.terms.get(p)
        with torch.no_grad():
            saved = self._keep.saved(p, self._eps if self._noisy else NONE)
        return dict(zip(self._own_keys(), (term.b if term else 0.0, *saved), strict=True))

    def _check_own_state(self, own: list[dict[str, Any]], draws: list[Draw]) -> Callable[[], None]:
        """Recognise the weights that the model holds as those that the state was saved with."""
        slots = self._slots()
        terms: dict[Tensor, Term] = {}
        saved: dict[Tensor, list[Any]] = {}
        found: dict[Tensor, str | None] = {}
        for p, state, draw in zip(self._parameters(), own, draws, strict=True):
            b = noise_.scale(PREFIX + "b", state.get(PREFIX + "b", 0.0))
            if b and draw.number:
                terms[p] = Term(slots[p], draw, b)
                saved[p] = _values(state, self._own_keys()[1:], self._mode)
                found[p] = self._recognise(p, saved[p], Perturbation({p: terms[p]}))

        def accept() -> None:
            before = self._eps if self._noisy else NONE
            with torch.no_grad():
                for p in before.terms:  # still perturbed as by us: clean before it is taken over
                    if found.get(p) != "noisy" and not self._touched(p):
                        self._keep.remove(before.only(p))
                for p, weights in found.items():
                    if weights == "noisy" and (self._holds or self._ranks == "per_rank"):
                        self._keep.load_clean(p, saved[p], Perturbation(terms))
                        found[p] = "clean"
                own_rank = Draw(*self._options["drawn"]).rank
                self._eps = Perturbation(
                    {p: t._replace(draw=t.draw._replace(rank=own_rank)) for p, t in terms.items()}
                )
                self._noisy = not self._holds
                if self._noisy:
                    for p, weights in found.items():
                        self._keep.load_noisy(p, saved[p], self._eps, noisy=weights == "noisy")
                self._remember()

        return accept

    def _recognise(self, p: Tensor, saved: list[Any], eps: Perturbation) -> str | None:
        with torch.no_grad():
            found = self._keep.recognise(p, saved, eps)
        if found is None and not self._holds:
            raise ValueError(
                f"parameter {eps.terms[p].slot.index} of shape {tuple(p.shape)} holds neither the "
                "clean nor the perturbed weights that this state was saved with; load the model's "
                "weights of the same moment first. To go on from other weights, which are taken "
                "for clean, load inside `with optimizer.denoised():`"
            )
        return found

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


def _mark(p: Tensor) -> tuple[int, int]:
    """Changes whenever the weights are written to."""
    weights = local(p)
    return weights._version, weights.data_ptr()


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
