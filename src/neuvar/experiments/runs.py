"""A run is data: everything that its numbers depend on, and a name made from that."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

HOW = ("precision", "channels_last", "compile")
"""How a run is carried out rather than what it is; they do not enter its key."""
ADDED = {"normalize": "channel", "auto_b": False}
"""Fields that runs recorded before did not have: at what those did, they do not enter the key."""

NORMALIZE = ("channel", "pixel", "none")


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What both kinds of runs have: data, network, optimizer.

    Attributes:
        data: name of a data set, see :func:`neuvar.data.load`.
        images: how many training images are used, the first ones; 0 for all.
        test_images: how many test images, and how many of the training images, are looked at
            after each epoch, the first ones; 0 for all.
        model: name of a network, see :func:`neuvar.models.build`.
        width: its width; 0 for its own.
        optimizer: its name, see :func:`neuvar.train.make_optimizer`.
        lr: learning rate at the beginning.
        momentum: of SGD and its relatives.
        weight_decay: L2, in the gradient.
        b: scale of the noise.
        auto_b: whether b sets itself while training; ``b`` is 0 then.
        noise: its family.
        rho: radius of SAM.
        batch: images in a batch.
        epochs: how often all images are seen; for tasks, those of each task.
        clip: largest norm of a gradient; 0 for none.
        accumulate: batches that make up one step.
        seed: of weights, order, augmentation and noise.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        channels_last: whether images lie in memory with their channels last.
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
        # 1 and 1.0 are the same rate but not the same text, and equal runs need equal keys.
        for known in fields(self):
            value = getattr(self, known.name)
            if known.type == "float" and type(value) is int:
                object.__setattr__(self, known.name, float(value))
            elif known.type == "tuple[float, ...]":
                object.__setattr__(self, known.name, tuple(map(float, value)))
        if self.auto_b and self.b:
            raise ValueError(f"b must be 0 where it sets itself, got {self.b}")
        for name, least in (("images", 0), ("test_images", 0), ("width", 0), ("batch", 1)):
            _check(name, getattr(self, name), least)
        for name, least in (("epochs", 1), ("accumulate", 1), ("seed", 0)):
            _check(name, getattr(self, name), least)

    @property
    def key(self) -> str:
        """A name for the run: 16 hexadecimal digits that depend on all but how it is carried out.

        >>> Training(data="mnist").key == Training(data="mnist", precision="bf16").key
        True
        """
        what = {
            name: value
            for name, value in as_dict(self).items()
            if name not in HOW and (name, value) not in ADDED.items()
        }
        text = json.dumps(what, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """One network trained on one data set, whose labels may be wrong.

    Attributes:
        normalize: what is taken from pixels: the "channel" mean, over its deviation; the "pixel"
            mean, over the channel's deviation; or "none", which leaves them in [0, 1].
        augment: whether training images are cut out and flipped at random.
        label_noise: kind of wrong labels, see :func:`neuvar.labels.corrupt`; "" for none.
        noise_rate: share of wrong labels.
        label_seed: decides which labels are wrong.
        held_out: how many training images are set aside, with labels as wrong as the others', to
            choose by; 0 for none.
        drop_every: the learning rate is divided by ten after so many epochs; 0 for never.
        eval_noise: at the end, test accuracy is measured with weight noise of these scales.
        reestimate: whether statistics of batch normalisation are also estimated at clean weights.
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
        for name in ("label_seed", "held_out", "drop_every"):
            _check(name, getattr(self, name), 0)
        if self.normalize not in NORMALIZE:
            raise ValueError(
                f"normalize must be one of {', '.join(NORMALIZE)}, got {self.normalize!r}"
            )
        if bool(self.label_noise) != bool(self.noise_rate):
            raise ValueError(
                "label_noise and noise_rate go together, "
                f"got {self.label_noise!r} and {self.noise_rate!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Tasks(Recipe):
    """One network that learns several tasks in turn.

    Attributes:
        stream: "permuted" or "split".
        tasks: how many tasks.
        penalty: "ewc", "si", "mas" or "" for none.
        fisher: which Fisher information EWC takes.
        strength: λ of the penalty.
        keep_optimizer: whether one optimizer goes through all tasks, rather than a new one each.
        fisher_images: how many images of a task the importances are taken on; 0 for all.
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
        _check("tasks", self.tasks, 1)
        _check("fisher_images", self.fisher_images, 0)
        if not self.penalty and (self.strength or self.fisher_images):
            raise ValueError("strength and fisher_images need a penalty")
        if self.penalty != "ewc" and self.fisher != "exact":
            raise ValueError(f"fisher is for the penalty ewc, got {self.penalty!r}")


Run: TypeAlias = Training | Tasks
KINDS: dict[str, type[Training] | type[Tasks]] = {"training": Training, "tasks": Tasks}


def as_dict(run: Recipe) -> dict[str, Any]:
    """A run as a JSON object."""
    kind = next(name for name, known in KINDS.items() if type(run) is known)
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    return {"kind": kind} | {k: list(v) if type(v) is tuple else v for k, v in values.items()}


def from_dict(found: dict[str, Any]) -> Run:
    """The run of a JSON object that :func:`as_dict` made.

    >>> run = Training(data="mnist", eval_noise=(0.01, 0.02))
    >>> from_dict(as_dict(run)) == run
    True
    """
    kind = KINDS.get(found.get("kind", ""))
    if kind is None:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {found.get('kind')!r}")
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {
        k: tuple(v) if type(v) is list else v for k, v in found.items() if k != "kind"
    }
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"a run has no {unknown[0]!r}")
    if "data" not in values:
        raise ValueError("a run needs 'data', the name of a data set")
    return kind(**values)
