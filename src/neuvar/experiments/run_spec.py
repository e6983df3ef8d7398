"""Run specifications: everything that the numbers of a run depend on, and its key."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from neuvar import _validate

NOT_IN_KEY = ("precision", "channels_last", "compile")
"""Fields that say how a run is executed rather than what it computes."""
ADDED_LATER = {"normalize": "channel", "auto_b": False}
"""Fields that older results lack, with the values that these used. The keys leave them out."""

CHOICE_SEED = 1000
"""Trials with this seed or a larger one are for choosing b: they are not shown and not judged."""

NORMALIZE = ("channel", "pixel", "none")
AT_LEAST_ONE = ("batch", "epochs", "accumulate", "tasks")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Fields that both kinds of runs have: data, network, optimizer.

    Attributes:
        data: name of a dataset, see :func:`neuvar.data.load`.
        images: how many of the first training images to use; 0 for all.
        test_images: how many of the first test images, and of the first training images, to
            evaluate after each epoch; 0 for all.
        model: name of a network, see :func:`neuvar.models.build`.
        width: its width; 0 for its default.
        optimizer: name of an optimizer, see :func:`neuvar.train.make_optimizer`.
        lr: initial learning rate.
        momentum: momentum of SGD and optimizers like it.
        weight_decay: weight decay, added to the gradient; decoupled for AdamW.
        b: scale of the weight noise.
        auto_b: whether b is set automatically during training; ``b`` must be 0 then.
        noise: family of the weight noise.
        rho: radius of SAM.
        batch: batch size.
        epochs: number of epochs; for tasks, of each task.
        clip: maximum gradient norm; 0 for no clipping.
        accumulate: batches per optimizer step.
        seed: seed of weights, order, augmentation and noise.
        precision: "float32", or "bf16" or "fp16" for automatic mixed precision.
        channels_last: whether images use the channels-last memory format.
        compile: whether the network is compiled.
    """

    data: str
    images: int = 0
    test_images: int = 0
    model: str = "mlp"
    width: int = 0
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 1e-4
    b: float = 0.0
    auto_b: bool = False
    noise: str = "gaussian"
    rho: float = 0.0
    batch: int = 128
    epochs: int = 1
    clip: float = 0.0
    accumulate: int = 1
    seed: int = 0
    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        # 1 and 1.0 are equal but not the same text, and equal runs need equal keys.
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                value = _validate.integer(field.name, value, low=int(field.name in AT_LEAST_ONE))
            elif field.type == "float":
                high = 1 if field.name == "noise_rate" else None
                value = _validate.number(field.name, value, low=0, high=high)
            elif field.type == "tuple[float, ...]":
                value = tuple(_validate.number(field.name, item, low=0) for item in value)
            object.__setattr__(self, field.name, value)
        if self.auto_b and self.b:
            raise ValueError(f"b must be 0 with auto_b=True, got {self.b}")

    @property
    def key(self) -> str:
        """Identity of the run: 16 hexadecimal digits, a hash of all fields but ``NOT_IN_KEY``.

        >>> Training(data="mnist").key == Training(data="mnist", precision="bf16").key
        True
        """
        hashed = {
            name: value
            for name, value in as_dict(self).items()
            if name not in NOT_IN_KEY and (name, value) not in ADDED_LATER.items()
        }
        text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Training(RunSpec):
    """One network trained on one dataset, whose labels may be wrong.

    Attributes:
        normalize: subtract the mean of each "channel" or of each "pixel", then divide by the
            channel's standard deviation; "none" keeps pixels in [0, 1].
        augment: whether training images are cropped and flipped at random.
        label_noise: kind of label noise, see :func:`neuvar.labels.corrupt`; "" for none.
        noise_rate: fraction of wrong labels.
        label_seed: seed of the label noise.
        held_out: number of training images set aside for model selection, with labels as noisy as
            the others'; 0 for none.
        drop_every: the learning rate is divided by ten after this many epochs; 0 for never.
        eval_noise: scales of weight noise under which the trained network is tested.
        reestimate: whether the trained network is also tested with BatchNorm statistics estimated
            at the clean weights.
    """

    normalize: str = "channel"
    augment: bool = False
    label_noise: str = ""
    noise_rate: float = 0.0
    label_seed: int = 0
    held_out: int = 0
    drop_every: int = 0
    eval_noise: tuple[float, ...] = ()
    reestimate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("normalize", self.normalize, NORMALIZE)
        if bool(self.label_noise) != bool(self.noise_rate):
            raise ValueError(
                "label_noise and noise_rate go together, "
                f"got {self.label_noise!r} and {self.noise_rate!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Tasks(RunSpec):
    """One network that learns several tasks in turn.

    Attributes:
        stream: name of a stream, such as "permuted"; see :data:`neuvar.continual.STREAMS`.
        tasks: number of tasks.
        penalty: name of a penalty, see :data:`neuvar.continual.PENALTIES`; "" for none.
        fisher: kind of Fisher information that EWC uses.
        strength: λ of the penalty.
        keep_optimizer: whether one optimizer is used for all tasks, rather than a new one for each.
        fisher_images: number of images of a task that importances are computed on; 0 for all.
    """

    stream: str = "permuted"
    tasks: int = 5
    penalty: str = ""
    fisher: str = "exact"
    strength: float = 0.0
    keep_optimizer: bool = False
    fisher_images: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.penalty and (self.strength or self.fisher_images):
            raise ValueError("strength and fisher_images need a penalty")
        if self.penalty != "ewc" and self.fisher != "exact":
            raise ValueError(f"fisher is for the penalty ewc, got {self.penalty!r}")


for _kind in (Training, Tasks):  # so that help() shows all fields; python -OO has no docstrings
    _inherited = inspect.cleandoc(RunSpec.__doc__ or "").partition("Attributes:\n")[2]
    _kind.__doc__ = f"{inspect.cleandoc(_kind.__doc__ or '')}\n{_inherited}"

Run: TypeAlias = Training | Tasks
RUN_KINDS: dict[str, type[Training] | type[Tasks]] = {"training": Training, "tasks": Tasks}


def as_dict(run: RunSpec) -> dict[str, Any]:
    """A run as a JSON object."""
    kind = next(name for name, known in RUN_KINDS.items() if type(run) is known)
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    return {"kind": kind} | {k: list(v) if type(v) is tuple else v for k, v in values.items()}


def from_dict(record: dict[str, Any]) -> Run:
    """The run of a JSON object made by :func:`as_dict`.

    >>> run = Training(data="mnist", eval_noise=(0.01, 0.02))
    >>> from_dict(as_dict(run)) == run
    True
    """
    kind = RUN_KINDS[_validate.one_of("kind", record.get("kind"), RUN_KINDS)]
    values: dict[str, Any] = {
        k: tuple(v) if type(v) is list else v for k, v in record.items() if k != "kind"
    }
    if unknown := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"a run has no field {unknown[0]!r}")
    if "data" not in values:
        raise ValueError("a run needs 'data', the name of a dataset")
    return kind(**values)


def format_value(value: Any) -> str:
    """The value of a field as text.

    >>> [format_value(value) for value in (0.03, True, "", (0.01, 0.02))]
    ['0.03', 'true', 'none', '0.01/0.02']
    """
    if isinstance(value, tuple):
        return "/".join(map(format_value, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def no_run_has(field: str, value: str, existing: Iterable[Any]) -> str:
    """The error message for a value that no run has; ``existing`` are the values of the runs."""
    values = ", ".join(map(format_value, sorted(set(existing))))
    return f"no run has {field}={value}; {field} is one of {values}"
