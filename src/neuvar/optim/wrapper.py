"""A real ``torch.optim.Optimizer`` around another one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar import _validate
from neuvar import noise as noise_
from neuvar.noise import Draw, Term
from neuvar.optim import auto_b, layout
from neuvar.optim.auto_b import AUTO
from neuvar.optim.forward import Noise, WeightNoise, install
from neuvar.optim.layout import check_parameters, is_sharded
from neuvar.optim.noisy_parameters import end_other_noise, make_weight_noise

PREFIX = "nvrm_"
"""Prefix of our keys in a state dict."""
HAVE_FUSED_KERNELS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class Wrapper(Optimizer):
    """What all our optimizers share: the inner optimizer, its groups, and the counter of draws.

    Parameter groups are those of the inner optimizer, with four more keys: ``b``, ``noise`` and
    ``relative_to``, which may be changed at any time, and ``drawn``, the last draw (a plain tuple,
    see :class:`neuvar.noise.Draw`). The inner optimizer's ``state`` is not changed; a state dict
    contains both states, ours under keys with a prefix.
    """

    controls_b = False
    """Whether ``b="auto"`` is supported."""

    inner: Optimizer
    _mode = "exact"
    _options: dict[str, Any]
    _known_slots: dict[Tensor, noise_.Slot]
    _weights: WeightNoise

    def __init__(
        self,
        inner: Optimizer,
        *,
        b: float | str | None,
        std: float | None,
        noise: str,
        seed: int,
        sampler: str,
        rank: int = 0,
        model: nn.Module | None = None,
        relative_to: str | None = None,
    ) -> None:
        _check_inner(inner)
        if (b is None) == (std is None):
            also = ', or b="auto"' if self.controls_b else ""
            raise ValueError(f"give either b or std{also}; got b={b!r} and std={std!r}")
        if std is not None:
            b = noise_.b_from_std(noise, std)
        elif isinstance(b, str) and b != AUTO and self.controls_b:
            raise ValueError(f'b must be "auto" or a finite number >= 0, got {b!r}')
        elif b != AUTO:
            b = noise_.scale("b", b)
        noise_.family(noise)
        _validate.one_of("sampler", sampler, noise_.SAMPLERS)
        start = tuple(Draw(seed=_validate.seed(seed), sampler=sampler, noise=noise, rank=rank))
        options = {"b": b, "noise": noise, "relative_to": relative_to, "drawn": start}
        groups: list[dict[str, Any]] = [
            options | {"std": None} | group for group in inner.param_groups
        ]
        for group in groups:
            self._check_group(group)
            _check_relative(group, self._mode, model)
        params = [p for group in groups for p in group["params"]]
        self._check_parameters(params)
        if model is not None:
            _check_model(model, groups)
        self._weights = make_weight_noise(params, self._mode, model)
        end_other_noise(params, self._weights)
        # Optimizer.__init__ would make its own groups and state; ours are those of the inner
        # optimizer. __setstate__ sets up hooks and the profiled step, as for unpickling.
        own = {"inner": inner, "_options": options, "_known_slots": {}, "_weights": self._weights}
        self.__setstate__(own)
        self._adopt(inner.param_groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.inner.register_load_state_dict_pre_hook(_check_shapes)

    def __getstate__(self) -> dict[str, Any]:
        keys = ("inner", "_options", "_weights")
        return {key: getattr(self, key) for key in keys} | {"_known_slots": {}}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        # A user may add groups to the inner optimizer itself, or load them into it.
        if new := [group for group in self.inner.param_groups if "drawn" not in group]:
            self._adopt(new)
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    @property
    def state(self) -> Any:
        """The inner optimizer's state; each entry also has our keys."""
        return _StateView(self.inner.state, self._own_keys())

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its weights get noise from the next draw on."""
        group = self._options | {"std": None} | param_group
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        self._check_group(group)
        _check_relative(group, self._mode, self._weights.model)
        self._check_parameters([*self._parameters(), *_tensors(group["params"])])
        if self._weights.model is not None:
            _check_model(self._weights.model, [group])
        self.inner.add_param_group({**param_group, "params": group["params"]})
        self._adopt(self.inner.param_groups[-1:])
        end_other_noise(_tensors(group["params"]), self._weights)
        if (model := self._weights.model) is not None:
            install(model, self._weights)  # parts of it may be new
        self._number_parameters()

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer and of the noise, in torch's usual form."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        result = self.inner.state_dict()
        state = dict(result["state"])
        everything = [(group, p) for group in self.param_groups for p in group["params"]]
        for pid, (group, p) in enumerate(everything):
            if own := self._own_state(p, group):
                state[pid] = {**state.get(pid, {}), **own}
        result = {**result, "state": state}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, result) or result
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state: of the inner optimizer, the counters and the noise.

        Load it before or after the model's state. An optimizer created from parameters alone needs
        the model's state first.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if any("drawn" not in group for group in groups):
            raise ValueError(
                f"the state dict is not one of {type(self).__name__}: its groups have no 'drawn'; "
                "to start from a plain optimizer's state, load it into optimizer.inner"
            )
        sizes = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, the optimizer of {expected}: "
                "it belongs to another model"
            )
        for group in groups:
            if "auto" in group:
                auto_b.check_state(group["auto"])
        ids = [pid for group in groups for pid in group["params"]]
        own = [_part(state_dict["state"].get(pid, {}), ours=True) for pid in ids]
        draws = [_checked_record(group["drawn"]) for group in groups for _ in group["params"]]
        if any(draw.relative_to for draw in draws):
            _check_relative({"relative_to": "", "b": 0.0}, self._mode, self._weights.model)
        accept = self._check_own_state(own, draws)
        theirs = {pid: _part(value, ours=False) for pid, value in state_dict["state"].items()}
        self.inner.load_state_dict({**state_dict, "state": {k: v for k, v in theirs.items() if v}})
        rank = Draw(*self._options["drawn"]).rank
        self._record([Draw(*group["drawn"])._replace(rank=rank) for group in groups])
        accept()
        self._weights.use()

    @contextmanager
    def denoised(self) -> Iterator[None]:
        """Keep forward passes clean inside a ``with`` block; the same noise is back afterwards.

        An optimizer created from parameters alone restores the clean weights inside the block.
        Changes to the weights inside are kept. Blocks may be nested.
        """
        reason = object()
        self._weights.hold(reason)
        try:
            yield
        finally:
            self._weights.release(reason)

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Add the present noise to all forward passes inside a ``with`` block, in any mode.

        No-op for an optimizer created from parameters alone, whose weights carry noise already.
        """
        weights, before = self._weights, self._weights.always
        weights.always = True
        try:
            yield
        finally:
            weights.always = before

    @property
    def has_noise(self) -> bool:
        """Whether there is noise: before the first step, or with b=0, there is none."""
        weights = self._weights
        return bool(weights.eps if weights.model is not None else weights.carried)

    def eval(self) -> None:
        """Use clean weights until :meth:`train` is called. Repeated calls are no-ops."""
        self._weights.hold("eval")

    def train(self) -> None:
        """Use noise again after :meth:`eval`. Repeated calls are no-ops."""
        self._weights.release("eval")
        self._weights.use()

    def clean_copy(self, p: Tensor) -> Tensor:
        """Copy of the clean weights of a parameter, perturbed or not."""
        return self._weights.clean_copy(p)

    # Overridden by subclasses.

    def _own_keys(self) -> list[str]:
        """The keys that we add to the state of each parameter; they begin with ``PREFIX``."""
        return []

    def _own_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Our state of one parameter, for a state dict."""
        return {}

    def _check_own_state(self, own: list[dict[str, Any]], draws: list[Draw]) -> Callable[[], None]:
        """Check our part of a state dict, change nothing, and return a function that loads it."""
        return lambda: None

    def _check_parameters(self, params: list[Tensor]) -> None:
        check_parameters(params)

    # Groups and draws.

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _adopt(self, groups: list[dict[str, Any]]) -> None:
        """Add missing options to groups."""
        for group in groups:
            if (std := group.pop("std", None)) is not None:
                group["b"] = noise_.b_from_std(group.get("noise", self._options["noise"]), std)
            for key, value in self._options.items():
                group.setdefault(key, value)
        if new := [group for group in groups if group["b"] == AUTO]:
            auto_b.begin(new, [group for group in self.inner.param_groups if "auto" in group])
        for group in groups:
            group["b"] = float(group["b"])

    def _check_group(self, group: dict[str, Any], *, new: bool = True) -> None:
        noise_.family(group["noise"])
        _validate.one_of("relative_to", group.get("relative_to"), (None, *noise_.RELATIVE_TO))
        if not (new and group["b"] == AUTO):
            noise_.scale("b", group["b"])
        elif not self.controls_b:
            raise ValueError(f"b='auto' is for NVRM; {type(self).__name__} needs a number")
        elif any(is_sharded(p) for p in _tensors(group["params"])):
            raise ValueError("b='auto' does not support sharded parameters; give a number")
        if group.get("std") is not None:
            noise_.scale("std", group["std"])

    def _next_noise(self) -> tuple[list[Draw], Noise]:
        """The next draw of each group, and its noise for all weights that are trained."""
        groups, latest = self.param_groups, Draw(*self._options["drawn"])
        for group in groups:
            valid = type(group["b"]) is float and 0 <= group["b"] <= noise_.LARGEST_SCALE
            if not valid or group["noise"] != latest.noise or group.get("relative_to"):
                self._check_group(group, new=False)
                _check_relative(group, self._mode, self._weights.model)
                group["b"] = float(group["b"])  # a checkpoint cannot hold a NumPy scalar
        slots, params = self._known_slots, [p for group in groups for p in group["params"]]
        if len(slots) != len(params) or any(map(operator.is_not, slots, params)):
            slots = self._number_parameters()
        draws, eps, number = list[Draw](), dict[Tensor, Term](), latest.number + 1
        for group in groups:
            noise, relative_to, b = group["noise"], group.get("relative_to") or "", group["b"]
            draw = latest._replace(number=number, sign=1, noise=noise, relative_to=relative_to)
            draws.append(draw)
            if b:
                eps |= {p: Term(slots[p], draw, b) for p in group["params"] if p.requires_grad}
        return draws, eps

    def _record(self, draws: list[Draw]) -> None:
        for group, draw in zip(self.param_groups, draws, strict=True):
            group["drawn"] = tuple(draw)
        self._options["drawn"] = tuple(draws[0])

    def _number_parameters(self) -> dict[Tensor, noise_.Slot]:
        """Give each parameter its position; the groups or the parameters in them may be new."""
        self._known_slots = layout.slots(self._parameters())
        self._weights.params = self._known_slots.keys()
        return self._known_slots

    def _closure_loss(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()


class _StateView(MutableMapping[Tensor, dict[str, Any]]):
    """The inner optimizer's state, with our keys added to each entry.

    Distributed checkpointing reads the keys of a flattened state from it. Its length is that of
    the inner state, because tools read an empty state as "no step yet". Writes go to the inner
    state.
    """

    def __init__(self, inner: MutableMapping[Tensor, dict[str, Any]], keys: list[str]) -> None:
        self._inner, self._keys = inner, keys

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        return _StateEntry(self._inner, p, self._keys)

    def __setitem__(self, p: Tensor, state: dict[str, Any]) -> None:
        self._inner[p] = _part(state, ours=False)

    def __contains__(self, p: object) -> bool:
        return p in self._inner

    def __delitem__(self, p: Tensor) -> None:
        del self._inner[p]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class _StateEntry(dict[str, Any]):
    """A parameter's entry; writes go to the inner optimizer's state."""

    def __init__(self, inner: MutableMapping[Tensor, Any], p: Tensor, keys: list[str]) -> None:
        super().__init__(inner.get(p, {}))
        self.update(dict.fromkeys(keys))
        self._inner, self._p = inner, p

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if not key.startswith(PREFIX):
            self._inner.setdefault(self._p, {})[key] = value


def _tensors(params: Any) -> list[Tensor]:
    """The parameters of a group, with or without names, or a single one."""
    listed = [params] if isinstance(params, Tensor) else params
    return [p[1] if isinstance(p, tuple) else p for p in listed]


def is_real_step(groups: list[dict[str, Any]]) -> bool:
    """Whether a step can change a weight: there is a gradient, and its learning rate is not 0.

    Checkpointing tools call ``step`` with lr=0 so that the optimizer allocates its state.
    """
    for group in groups:
        rate = group.get("lr")
        # Reading a number from a device would wait for the device.
        moves = rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu") or rate
        if moves and any(p.grad is not None for p in group["params"]):
            return True
    return False


def _part(state: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    """Our part of a parameter's saved state, or the inner optimizer's."""
    return {key: v for key, v in state.items() if str(key).startswith(PREFIX) == ours}


def _checked_record(drawn: Sequence[Any]) -> Draw:
    """Validate a draw from a state dict."""
    types = tuple(map(type, drawn)) if isinstance(drawn, (tuple, list)) else ()
    expected = (int, int, str, int, str, int, str)
    # Older versions had absolute noise only, and saved no last field.
    valid = types in (expected, expected[:-1]) and drawn[4] in noise_.SAMPLERS
    if not valid or Draw(*drawn).relative_to not in ("", *noise_.RELATIVE_TO):
        raise ValueError(f"the state dict's 'drawn' is not a valid draw: {drawn!r}")
    noise_.family(drawn[2])
    return Draw(*drawn)


def _check_relative(group: dict[str, Any], mode: str, model: nn.Module | None) -> None:
    """Refuse relative noise without the model, in replay mode, and with ``b="auto"``."""
    if group.get("relative_to") is None:
        return
    if model is None:
        raise ValueError("relative_to needs the model; create the optimizer with it")
    if mode != "exact":
        raise ValueError("relative_to needs mode='exact', which keeps the clean weights")
    if group["b"] == AUTO or "auto" in group:
        raise ValueError("relative_to needs a number for b; 'auto' is for absolute noise")


def _check_shapes(inner: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state with other shapes than the parameters: fused kernels do not check them."""
    if type(inner) not in HAVE_FUSED_KERNELS:
        return
    params = [p for group in inner.param_groups for p in group["params"]]
    ids = [pid for group in state_dict["param_groups"] for pid in group["params"]]
    for index, (p, pid) in enumerate(zip(params, ids, strict=False)):
        for key, value in state_dict["state"].get(pid, {}).items():
            if key != "step" and isinstance(value, Tensor) and value.shape != p.shape:
                raise ValueError(
                    f"parameter {index} has shape {tuple(p.shape)}, but its {key!r} in the state "
                    f"dict has shape {tuple(value.shape)}: it belongs to another model"
                )


def _check_model(model: object, groups: list[dict[str, Any]]) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "model has scripted parts, whose forward pass is not Python; create the optimizer with "
            "the model before torch.jit.script, or from model.parameters()"
        )
    known = set(model.parameters())
    for index, group in enumerate(groups):
        for p in _tensors(group["params"]):
            if p not in known and group["b"] != 0:
                raise ValueError(
                    f"group {index} has a parameter of shape {tuple(p.shape)} that is not in "
                    "model, so no forward pass would give it noise; add its module to model, or "
                    "give the group b=0"
                )


def _check_inner(inner: object) -> None:
    if not isinstance(inner, Optimizer):
        raise ValueError(f"inner must be a torch.optim.Optimizer, got {type(inner).__name__}")
    if isinstance(inner, Wrapper):
        raise ValueError(f"inner is already a {type(inner).__name__}; noise is added once only")
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError("inner must evaluate the loss once per step; LBFGS needs several")
    if any(group.get("differentiable") for group in inner.param_groups):
        raise ValueError("inner must not be differentiable: weights are perturbed in place")
