"""S: large gradient noise does not keep SGD from memorizing wrong labels; NVRM does."""

from __future__ import annotations

from collections.abc import Sequence

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.images import PAPER_B, TRIALS, flipped_run, words
from neuvar.experiments.reading import (
    BATCHNORM,
    anew,
    best,
    cell,
    compare,
    curve,
    group,
    label_of_b,
    matching,
    number,
    values,
)
from neuvar.experiments.run_spec import Run

RATES: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.1, 0.3),
    "cpu": (0.03, 0.1, 0.3, 1.0),  # the paper's times the ratio of the batch sizes, about
    "paper": (0.1, 0.3, 1.0, 3.0),
}
DROPS = 5
NOISE: dict[Scale, float] = {"smoke": 0.02, "cpu": 0.03, "paper": PAPER_B}
"""At the cpu scale, what held-out images choose in the comparison with PSGD, at the same size."""


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD and NVRM-SGD for each learning rate."""
    return [
        flipped_run(scale, b, seed, lr=lr, drops=DROPS, reestimate=True)
        for seed in range(trials or TRIALS[scale])
        for lr in RATES[scale]
        for b in (0.0, NOISE[scale])
    ]


def settings(scale: Scale) -> str:
    """What was run."""
    rates = ", ".join(map(number, RATES[scale]))
    text = words(scale).replace("every 8 epochs instead of every 100", "every 5 instead of 60")
    text = text.replace("every 100 epochs", "every 60 epochs").replace("learning rate .1,", "")
    text = text.replace(", at a learning rate of .03 instead of .1", "")
    text += f"Learning rates {rates}. "
    return f"40 % of the labels are moved to the next class. {text}b = {number(NOISE[scale])}."


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and wrong labels memorized by epoch, for each learning rate."""
    found = []
    for metric, title in (
        ("test_accuracy", "test accuracy"),
        ("memorized", "wrong labels memorized"),
    ):
        for lr in values(results, "lr"):
            trials = group(results, lr=lr)
            lines = tuple(
                curve(group(trials, b=b), metric, label_of_b("SGD", b), "nvrm" if b else "plain")
                for b in values(trials, "b")
            )
            found.append(Panel(f"Learning rate {number(lr)}: {title}", "epoch", title, lines))
    return found


def table(results: Sequence[Result]) -> Table:
    """The last epoch for each learning rate; runs that diverged are not counted in n."""
    rows = []
    for lr in values(results, "lr"):
        for b in values(results, "b"):
            found = group(results, lr=lr, b=b)
            lost = [r for r in results if (r.run.lr, r.run.b) == (lr, b) and not r.finished]
            rows.append(
                (
                    number(lr),
                    label_of_b("SGD", b),
                    str(len(found)),
                    str(len(lost)),
                    cell(found, "test_accuracy"),
                    best(found, "test_accuracy"),
                    anew(found),
                    cell(found, "memorized"),
                )
            )
    columns = (
        "learning rate",
        "method",
        "n",
        "diverged",
        "test, last epoch",
        "test, best epoch",
        BATCHNORM,
        "memorized, last",
    )
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM memorizes fewer wrong labels than SGD at every learning rate."""
    cases = []
    for lr in values(results, "lr"):
        trials = matching(results, lr=lr)
        plain, noisy = matching(trials, b=0.0), [r for r in trials if r.run.b]
        name = f"learning rate {number(lr)}"
        cases.append(compare(name, noisy, plain, "memorized", lower=True))
    return judge("Wrong labels that SGD memorizes and NVRM-SGD does not, last epoch.", cases)


EXPERIMENT = Experiment(
    name="gradient-noise",
    number="S",
    title="Large gradient noise",
    sentence="SGD with various learning rate finally still memorizes noisy labels, while NVRM-SGD "
    "with various learning rates can consistently relieve overfitting noisy labels.",
    source="appendix, supplementary results",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
