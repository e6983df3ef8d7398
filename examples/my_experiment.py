"""An experiment of your own: does weight noise help a narrow network with wrong labels?

    neuvar run examples/my_experiment.py --scale smoke       (Ctrl-C stops it, the same resumes)
    neuvar report examples/my_experiment.py --scale smoke    (writes out/report/index.html)
"""

from torch import nn

from neuvar.experiments import Experiment, Panel, Table, Training
from neuvar.experiments import cell, compare, curve, group, judge, matching
from neuvar.models import NETWORKS, mlp


# 1. A network of your own. Every worker process imports this file, so it is known there too.
def narrow(shape: tuple[int, ...], *, classes: int, seed: int, width: int) -> nn.Module:
    return mlp((shape[-2] * shape[-1], width, classes), seed=seed)


NETWORKS["narrow"] = (narrow, 64, (1, 28, 28))  # builder, default width, shape of one input

METHODS = {"SGD": 0.0, "NVRM-SGD": 0.05}  # name: scale b of the weight noise
EPOCHS = {"smoke": 3, "cpu": 20, "paper": 100}


# 2. The runs: every method with every seed. Finished runs are not run again.
def runs(scale, trials):
    return [
        Training(
            data="mnist-excerpt", model="narrow", epochs=EPOCHS[scale], seed=seed, label_seed=seed,
            optimizer="nvrm-sgd" if b else "sgd", b=b, label_noise="symmetric", noise_rate=0.4,
        )
        for seed in range(trials or 3)
        for b in METHODS.values()
    ]  # fmt: skip


# 3. The figure and the table, made from the results of the runs.
def panels(results):
    lines = [curve(group(results, b=b), "test_accuracy", m, "other") for m, b in METHODS.items()]
    return [Panel("40 % wrong labels", "epoch", "test accuracy", tuple(lines))]


def table(results):
    rows = [(m, cell(group(results, b=b), "test_accuracy")) for m, b in METHODS.items()]
    return Table(("method", "test accuracy"), tuple(rows))


# 4. The verdict: is the claim true, false or undecided?
def check(results):
    better, worse = matching(results, b=0.05), matching(results, b=0.0)
    return judge("Gain of NVRM.", [compare("test accuracy", better, worse, "test_accuracy")])


EXPERIMENT = Experiment(
    title="A narrow network and wrong labels",
    sentence="With 40 % wrong labels, NVRM-SGD has a higher test accuracy than SGD.",
    runs=runs, panels=panels, table=table, check=check,
)  # fmt: skip
