"""Random weight perturbation: noise scaled by filter norms, with or without a clean gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar._validate import number
from neuvar.noise import Draw, scale
from neuvar.optim.forward import Noise, not_compiled
from neuvar.optim.layout import is_sharded
from neuvar.optim.nvrm import NVRM
from neuvar.optim.wrapper import PREFIX, is_real_step

INSIDE = -1
"""Value of ``_mixed`` while the clean gradient is computed."""
V, FACTOR = PREFIX + "v", PREFIX + "factor"


class RWP(NVRM):
    r"""Random weight perturbation, and m-RWP, which mixes in a clean gradient.

    .. math:: g = \lambda\,\nabla L(\theta + \epsilon) + (1 - \lambda)\,\nabla L'(\theta),
              \qquad \epsilon_i \sim N(0, \gamma^2\,\|\theta_{\mathrm{filter}(i)}\|^2)

    It is :class:`~neuvar.NVRM` with noise relative to the norm of each filter: a row of a matrix, a
    filter of a convolution, or a whole vector such as a bias. The first step has no noise. With
    ``mix`` below 1, each step takes a second gradient in :meth:`clean_gradient`; the paper uses
    another batch for it. The authors update the statistics of batch normalization in clean passes
    only; here noisy passes update them as well, see :func:`neuvar.reestimate_batchnorm`.

    Li et al., "Revisiting Random Weight Perturbation for Efficiently Improving Generalization",
    TMLR 2024.

    Args:
        inner: any optimizer that evaluates the loss once per step.
        model: the module that is trained; see :class:`~neuvar.NVRM`.
        gamma: standard deviation γ of the noise relative to the norm of the filter; the ``b`` of a
            group.
        mix: weight λ of the gradient at the perturbed weights, from 0 to 1. With 1 there is no
            clean gradient. The paper's m-RWP has 0.5. A group may have its own, but 1 only if all
            groups have 1.
        seed: seed of the noise.
        sampler: where noise comes from.
        ranks: which noise each process has.

    >>> model = torch.nn.Linear(4, 2)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = RWP(sgd, model=model, gamma=0.01, mix=0.5)
    >>> first, second = torch.ones(3, 4), torch.zeros(3, 4)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(first).square().mean().backward()  # at θ + ε
    ...     with optimizer.clean_gradient():
    ...         model(second).square().mean().backward()  # at θ
    ...     optimizer.step()
    """

    controls_b = False
    _own_options: tuple[str, ...] = ("mix",)
    """Our options of a parameter group."""
    _mixed: int | None = None
    """Number of noisy passes when the clean gradient was added, None if it was not, or INSIDE."""

    def __init__(
        self,
        inner: Optimizer,
        *,
        model: nn.Module,
        gamma: float = 0.01,
        mix: float = 1.0,
        seed: int = 0,
        sampler: str = "table",
        ranks: str = "shared",
    ) -> None:
        mix = number("mix", mix, low=0, high=1)
        super().__init__(
            inner,
            model=model,
            b=scale("gamma", gamma),
            seed=seed,
            sampler=sampler,
            ranks=ranks,
            relative_to="filter",
        )
        self._add_options(mix=mix)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_mixed": self._mixed}

    @contextmanager
    def clean_gradient(self) -> Iterator[None]:
        """Compute the clean gradient inside a ``with`` block, after the noisy one.

        Forward passes inside are clean. At the end of the block, the gradients are mixed. Put all
        clean passes of a step into one block. If it raises an error, the gradients are dropped.
        Call :meth:`noise_metrics` before the block.
        """
        if not self._mixes():
            raise RuntimeError("mix=1 uses no clean gradient; give mix a number below 1")
        if self._mixed is not None:
            raise RuntimeError(
                "clean_gradient() was already used since the last step() or zero_grad() of the "
                "optimizer; put all clean passes of a step into one block"
            )
        if not any(p.grad is not None for p in self._parameters()):
            raise RuntimeError(
                "clean_gradient() found no gradient of a noisy pass; call it after backward()"
            )
        self._note_gradients(mixed=False)
        self._multiply_gradients(lambda mix: mix / (1 - mix))
        self._mixed = INSIDE
        # Or gradient checkpointing would repeat clean passes with noise.
        self._weights.drop_perturbed()
        try:
            with self.denoised():
                yield
        except BaseException:
            self._mixed = None
            self.zero_grad()
            raise
        self._multiply_gradients(lambda mix: 1 - mix)
        self._note_gradients(mixed=True)
        self._mixed = self._weights.passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        if self._mixed == INSIDE:
            raise RuntimeError(
                "zero_grad() inside clean_gradient() drops the gradient of the noisy pass; call it "
                "before that pass"
            )
        super().zero_grad(set_to_none)
        self._mixed = None

    @torch.no_grad()
    def _multiply_gradients(self, factor: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor(group["mix"]))

    def _note_gradients(self, *, mixed: bool) -> None:
        """Overridden by ARWP: called before and after the clean gradient is added."""

    def _mixes(self) -> bool:
        """Whether a step needs a clean gradient."""
        groups = self.param_groups
        for group in groups:
            self._check_group(group, new=False)
        alone = {group["mix"] == 1 for group in groups}
        if len(alone) > 1:
            mixes = [group["mix"] for group in groups]
            raise ValueError(f"mix must be below 1 in all groups or 1 in all, got {mixes}")
        return alone == {False}

    @not_compiled()
    def _begin_step(self) -> tuple[list[Draw] | None, Noise | None]:
        if is_real_step(self.param_groups):
            self._read_gradients()
        return super()._begin_step()

    def _read_gradients(self) -> None:
        """Check that the gradients of a step are complete."""
        mixes = self._mixes()
        if mixes and self._mixed is None:
            raise RuntimeError(
                f"mix={self.param_groups[0]['mix']} needs a clean gradient: call backward() once "
                "more, inside `with optimizer.clean_gradient():`"
            )
        if mixes and self._mixed != self._weights.passes:
            raise RuntimeError(
                "there was a noisy pass after clean_gradient(), whose gradient was not mixed; take "
                "the noisy gradient first"
            )

    @not_compiled()
    def _end_step(self, draws: list[Draw] | None, eps: Noise | None) -> None:
        if draws is not None:
            self._mixed = None
        super()._end_step(draws, eps)

    def _next_noise(self) -> tuple[list[Draw], Noise]:
        draws, eps = super()._next_noise()
        for group in self.param_groups:  # a checkpoint cannot hold a NumPy scalar
            group.update({key: float(group[key]) for key in self._own_options})
        # relative_to="filter" multiplies by a root mean square; the norm is √n times as large.
        return draws, {p: t._replace(b=t.b * math.sqrt(_count(p))) for p, t in eps.items()}

    def _add_options(self, **options: float) -> None:
        self._options |= options
        self._adopt(self.inner.param_groups)

    def _check_group(self, group: dict[str, Any], *, new: bool = True) -> None:
        super()._check_group(group, new=new)
        for key in ("gamma", "std"):
            if group.get(key) is not None:
                raise ValueError(f"set gamma of a group as its 'b', got {key}={group[key]!r}")
        if group["relative_to"] != "filter":
            name, value = type(self).__name__, group["relative_to"]
            raise ValueError(f"relative_to must be 'filter' in {name}, got {value!r}")
        number("mix", group.get("mix", 1.0), low=0, high=1)

    def _load(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            options = [key for key in ARWP._own_options if key in group]
            if "drawn" in group and options != list(self._own_options):
                raise ValueError(
                    f"the state dict is not one of {type(self).__name__}: of the options "
                    f"{', '.join(ARWP._own_options)}, its groups must have "
                    f"{', '.join(self._own_options)}, got {', '.join(options) or 'none'}"
                )
        super()._load(state_dict)
        self._mixed = None


class ARWP(RWP):
    r"""Adaptive random weight perturbation: less noise for filters with large gradients.

    .. math:: \epsilon_i \sim N\Big(0, \frac{\gamma^2\,\|\theta_{\mathrm{filter}(i)}\|^2}
              {1 + \eta\,v_{\mathrm{filter}(i)}}\Big), \qquad
              v \leftarrow \beta\,v + \|\nabla L(\theta + \epsilon)_{\mathrm{filter}}\|^2

    v uses only the gradient at the perturbed weights, not the clean gradient. As in the authors'
    code, each weight of a bias or another vector has its own v. Sharded parameters are not
    supported.

    Li et al., "Revisiting Random Weight Perturbation for Efficiently Improving Generalization",
    TMLR 2024.

    Args:
        inner: any optimizer that evaluates the loss once per step.
        model: the module that is trained.
        gamma: standard deviation γ of the noise relative to the norm of the filter, at v = 0.
        eta: strength η of the adaptation, not negative; also for a group.
        beta: decay β of v per step, from 0 to 1; also for a group.
        options: ``mix``, ``seed``, ``sampler`` and ``ranks``, as for :class:`RWP`.

    >>> model = torch.nn.Linear(4, 2)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = ARWP(sgd, model=model, gamma=0.01, eta=0.1, beta=0.99)
    """

    _own_options = ("mix", "eta", "beta")

    def __init__(
        self,
        inner: Optimizer,
        *,
        model: nn.Module,
        gamma: float = 0.01,
        eta: float = 0.1,
        beta: float = 0.99,
        **options: Any,
    ) -> None:
        eta, beta = scale("eta", eta), number("beta", beta, low=0, high=1)
        self._v: dict[Tensor, Tensor] = {}
        self._squares: dict[Tensor, Tensor] = {}
        self._mixed_squares: dict[Tensor, Tensor] = {}
        super().__init__(inner, model=model, gamma=gamma, **options)
        self._add_options(eta=eta, beta=beta)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_v": self._v, "_squares": self._squares, "_mixed_squares": self._mixed_squares}
        return super().__getstate__() | own

    def _gradient_squares(self) -> dict[Tensor, Tensor]:
        return {p: filter_squares(p.grad) for p in self._parameters() if p.grad is not None}

    def _note_gradients(self, *, mixed: bool) -> None:
        setattr(self, "_mixed_squares" if mixed else "_squares", self._gradient_squares())

    def _read_gradients(self) -> None:
        super()._read_gradients()
        squares = self._gradient_squares()
        if self._mixed is None:
            self._squares = squares
            return
        for p in self._squares.keys() & squares.keys() & self._mixed_squares.keys():
            # A gradient scaler or clipping may have multiplied the mixed gradient since.
            ratio = squares[p].sum() / self._mixed_squares[p].sum()
            self._squares[p] = self._squares[p] * ratio.nan_to_num(1.0)

    @not_compiled()
    def _end_step(self, draws: list[Draw] | None, eps: Noise | None) -> None:
        if draws is not None:
            for group in self.param_groups:
                for p in self._squares.keys() & set(group["params"]):
                    v, squares = self._v.get(p), self._squares[p]
                    new = squares if v is None else group["beta"] * v.to(squares.device) + squares
                    self._v[p] = new
                    self._weights.factors[p] = (1 + group["eta"] * self._v[p]).rsqrt()
            self._squares = {}
        super()._end_step(draws, eps)

    def _check_group(self, group: dict[str, Any], *, new: bool = True) -> None:
        super()._check_group(group, new=new)
        scale("eta", group.get("eta", 0.0))
        number("beta", group.get("beta", 0.0), low=0, high=1)

    def _check_parameters(self, params: list[Tensor]) -> None:
        super()._check_parameters(params)
        for index, p in enumerate(params):
            if is_sharded(p):
                raise ValueError(
                    f"parameter {index} of shape {tuple(p.shape)} is sharded, which ARWP does not "
                    "support; use RWP"
                )

    def _own_keys(self) -> list[str]:
        return [*super()._own_keys(), V, FACTOR]

    def _own_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        own = super()._own_state(p, group)
        return own | {V: self._v[p], FACTOR: self._weights.factors[p]} if p in self._v else own

    def _check_own_state(self, own: list[dict[str, Any]], draws: list[Draw]) -> Callable[[], None]:
        loaded: list[dict[Tensor, Any]] = []
        for key in (V, FACTOR):
            pairs = zip(self._parameters(), own, strict=True)
            loaded.append({p: state[key] for p, state in pairs if key in state})
            for p, value in loaded[-1].items():
                shape = filter_squares(p).shape
                if not isinstance(value, Tensor) or value.shape != shape:
                    raise ValueError(
                        f"the state dict's {key!r} must be a tensor of shape {tuple(shape)}"
                    )
        rest = [{k: v for k, v in state.items() if k not in (V, FACTOR)} for state in own]
        accept = super()._check_own_state(rest, draws)

        def load() -> None:
            accept()
            self._v, self._weights.factors = loaded
            self._squares = {}

        return load


def filter_squares(g: Tensor) -> Tensor:
    """Sum of squares of each filter of a gradient; a vector's elements are its filters.

    >>> filter_squares(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[25.],
            [ 1.]])
    """
    g = g.detach().to_dense()
    rows = g.flatten(1) if g.ndim > 1 else g.reshape(-1, 1)
    dtype = torch.promote_types(g.dtype, torch.float32)  # half precision would overflow
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return norms.square().view([*g.shape[:1], *[1] * (g.ndim - 1)])


def _count(p: Tensor) -> int:
    """Number of weights of a filter; a vector is one filter."""
    return math.prod(p.shape[1:]) if p.ndim > 1 else p.numel()
