"""S: large gradient noise does not keep SGD from memorizing wrong labels; NVRM does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.images import PAPER_B, TRIALS, flipped_run, recipe
from neuvar.experiments.run_spec import Run

RATES: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.1, 0.3),
    "cpu": (0.03, 0.1, 0.3, 1.0),  # the paper's, scaled by about the ratio of the batch sizes
    "paper": (0.1, 0.3, 1.0, 3.0),
}
DROPS = 5
NOISE: dict[Scale, float] = {"smoke": 0.02, "cpu": 0.03, "paper": PAPER_B}
"""cpu: the b chosen on held-out images in experiment 5, whose runs have the same size."""


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """SGD and NVRM-SGD for each learning rate."""
    return [
        flipped_run(scale, b, seed, lr=lr, drops=DROPS, reestimate=True)
        for seed in range(trials or TRIALS[scale])
        for lr in RATES[scale]
        for b in (0.0, NOISE[scale])
    ]


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and wrong labels memorized by epoch, for each learning rate."""
    plots = []
    metrics = {"test_accuracy": "test accuracy", "memorized": "wrong labels memorized"}
    for (metric, y_label), lr in product(metrics.items(), query.values(results, "lr")):
        lines = query.curves(query.group(results, lr=lr), metric, "SGD")
        plots.append(Panel(f"Learning rate {lr:g}", "epoch", y_label, lines))
    return plots


def table(results: Sequence[Result]) -> Table:
    """The last epoch for each learning rate; runs that diverged are not counted in n."""
    rows = []
    for lr, b in product(query.values(results, "lr"), query.values(results, "b")):
        finished = query.group(results, lr=lr, b=b)
        lost = len(query.matching(results, lr=lr, b=b)) - len(finished)
        rows.append(((f"{lr:g}", query.label_of_b("SGD", b), str(lost)), finished))
    return query.make_table(("learning rate", "method", "diverged"), rows, query.LABEL_COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM tests better and memorizes fewer wrong labels, at every learning rate.

    A network that learned nothing memorizes nothing either, so the test accuracy counts as well.
    """
    cases = []
    for lr in query.values(results, "lr"):
        name, trials = f"learning rate {lr:g}", query.matching(results, lr=lr)
        memorized = f"{name}, wrong labels memorized"
        cases += [
            query.compare_noise(f"{name}, test accuracy", trials, "test_accuracy"),
            query.compare_noise(memorized, trials, "memorized", lower=True),
        ]
    return judge("At the last epoch, NVRM-SGD against SGD", cases)


EXPERIMENT = Experiment(
    name="gradient-noise",
    number="S",
    title="Large gradient noise",
    sentence="SGD with various learning rate finally still memorizes noisy labels, while NVRM-SGD "
    "with various learning rates can consistently relieve overfitting noisy labels.",
    source="appendix, supplementary results",
    runs=runs,
    settings=lambda scale: (
        "40 % of the labels are moved to the next class. "
        f"{recipe(scale, drops=DROPS, rates=RATES[scale])}b = {NOISE[scale]:g}."
    ),
    panels=panels,
    table=table,
    check=check,
)
