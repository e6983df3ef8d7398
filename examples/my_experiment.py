"""An experiment of your own: does weight noise help a narrow network with wrong labels?

Run it with ``neuvar run examples/my_experiment.py --scale smoke`` (Ctrl-C stops it, the same
command resumes), then ``neuvar report examples/my_experiment.py --scale smoke`` writes the page.
"""

import math

from neuvar import experiments as ex
from neuvar.models import NETWORKS, mlp


# 1. A network of your own. Every worker process imports this file, so it is known there too.
def narrow(*, classes, seed, width=64, shape=(1, 28, 28)):
    return mlp((math.prod(shape), width, classes), seed=seed)


NETWORKS["narrow"] = narrow

METHODS = {"SGD": 0.0, "NVRM-SGD": 0.05}  # name: scale b of the weight noise
EPOCHS = {"smoke": 3, "cpu": 20, "paper": 100}


# 2. The runs of a scale: every method with every seed. Finished runs are not run again.
def runs(scale, trials):
    labels = {"label_noise": "symmetric", "noise_rate": 0.4}
    return [
        ex.Training(
            data="mnist-excerpt", model="narrow", epochs=EPOCHS[scale], **labels, label_seed=seed,
            optimizer="nvrm-sgd" if b else "sgd", b=b, seed=seed,
        )
        for seed in range(trials or 3)
        for b in METHODS.values()
    ]  # fmt: skip


# 3. The figure and the table, made from the results.
def panels(results):
    lines = [ex.curve(ex.group(results, b=b), "test_accuracy", m, "nvrm" if b else "plain", b)
             for m, b in METHODS.items()]  # fmt: skip
    return [ex.Panel("40 % wrong labels", "epoch", "test accuracy", tuple(lines))]


def table(results):
    rows = [(m, ex.cell(ex.group(results, b=b), "test_accuracy")) for m, b in METHODS.items()]
    return ex.Table(("method", "test accuracy"), tuple(rows))


# 4. The verdict: do the results support the claim?
def check(results):
    nvrm, sgd = ex.matching(results, b=0.05), ex.matching(results, b=0.0)
    case = ex.compare("test accuracy", nvrm, sgd, "test_accuracy")
    return ex.judge("NVRM-SGD against SGD", [case])


EXPERIMENT = ex.Experiment(
    title="A narrow network and wrong labels",
    sentence="With 40 % wrong labels, NVRM-SGD has a higher test accuracy than SGD.",
    runs=runs, panels=panels, table=table, check=check,
)  # fmt: skip
