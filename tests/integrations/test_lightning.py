"""Lightning: evaluation, checkpoints and resumed runs, compared to the bit.

The reference is a loop written by hand, with an optimizer created from parameters alone.
"""

from collections import deque

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import neuvar
from neuvar.cleaning import judge_labels
from neuvar.integrations.lightning import NeuralVariability, ObserveLabels

BATCH, EPOCHS, EXAMPLES, CLASSES = 8, 2, 48, 3
STEPS = EPOCHS * EXAMPLES // BATCH
INPUTS = torch.randn(EXAMPLES, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(EXAMPLES) % CLASSES
INDICES = torch.arange(EXAMPLES)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`"),
]


def make_net():
    torch.manual_seed(1)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)
    return torch.nn.Sequential(*layers)


class Loader:
    """Batches in a fixed order, which go on where a checkpoint stopped."""

    def __init__(self, size=BATCH):
        self.size, self.done = size, 0

    def __len__(self):
        return EXAMPLES // self.size

    def __iter__(self):
        begin, self.done = self.done, 0
        for k in range(begin, len(self)):
            part = slice(k * self.size, (k + 1) * self.size)
            self.done = (k + 1) % len(self)
            yield INPUTS[part], LABELS[part], INDICES[part]

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Lit(L.LightningModule):
    def __init__(self, b=0.05, lr=1e-2, manual=False, parts=1):
        super().__init__()
        self.net, self.b, self.lr, self.parts = make_net(), b, lr, parts
        self.automatic_optimization = not manual
        self.predictions, self.scales = [], []

    def training_step(self, batch, step):
        inputs, labels, *_ = batch
        logits = self.net(inputs)
        loss = cross_entropy(logits, labels)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            if step % self.parts == 0:
                optimizer.zero_grad()
            self.manual_backward(loss / self.parts)
            if (step + 1) % self.parts == 0:
                optimizer.step()
        return {"loss": loss, "logits": logits}

    def on_validation_model_zero_grad(self):
        """Lightning would drop the gradients of manual accumulation, with any optimizer."""

    def on_train_batch_end(self, *_):
        self.scales.append(self.optimizers().optimizer.param_groups[0]["b"])

    def validation_step(self, batch, step):
        self.predictions.append(self.net(batch[0]))

    test_step = validation_step

    def predict_step(self, batch, step):
        return self.net(batch[0])

    def configure_optimizers(self):
        return neuvar.NVRMAdam(self, lr=self.lr, b=self.b)


def make_trainer(folder, **options):
    defaults = {
        "accelerator": "cpu",
        "default_root_dir": folder,
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(defaults | options))


def all_inputs():
    return DataLoader(TensorDataset(INPUTS, LABELS), EXAMPLES)


def train_by_hand(
    *, net=None, b=0.05, parts=1, clip=0.0, precision=None, scaler=None, dtype=None, steps=STEPS
):
    """Train without a framework; θ, predictions at θ and b after each batch."""
    net = make_net() if net is None else net
    net.to(dtype)
    optimizer = neuvar.NVRMAdam(net.parameters(), lr=1e-2, b=b)
    scaler = make_scaler() if scaler else None
    autocast = torch.autocast(
        "cpu", precision or torch.bfloat16, enabled=precision is not None, cache_enabled=False
    )
    weights, predictions, scales = [], [], []
    for k in range(steps):
        begin = k * BATCH % EXAMPLES
        with autocast:
            logits = net(INPUTS[begin : begin + BATCH].to(dtype))
            loss = cross_entropy(logits, LABELS[begin : begin + BATCH]) / parts
        if k % parts == 0:
            optimizer.zero_grad()
        optimizer.report_loss(loss)
        (scaler.scale(loss) if scaler else loss).backward()
        if (k + 1) % parts == 0:
            if scaler:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        scales.append(optimizer.param_groups[0]["b"])
        with optimizer.denoised(), torch.no_grad(), autocast:
            weights.append({name: p.detach().clone() for name, p in net.named_parameters()})
            predictions.append(net(INPUTS.to(dtype)))
    return weights, predictions, scales


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def theta(module):
    return {name: p.detach().clone() for name, p in module.net.named_parameters()}


def saved(path):
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("net."): value for name, value in state.items()}


def make_scaler():
    """A scaler whose factor doubles at each step."""
    return torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)


def fp16():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=make_scaler())]}


HALF = {"precision": torch.float16, "scaler": True}
WAYS = {
    "automatic": ({}, {}, {}),
    "manual": ({"manual": True}, {}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 3}, {"parts": 3}),
    "manual, accumulation": ({"manual": True, "parts": 3}, {}, {"parts": 3}),
    "clipping": ({}, {"gradient_clip_val": 0.1}, {"clip": 0.1}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, {"precision": torch.bfloat16}),
    "bf16-true": ({}, {"precision": "bf16-true"}, {"dtype": torch.bfloat16}),
    "16-mixed": ({}, fp16, HALF),
    "16-mixed, clipping, accumulation": (
        {},
        lambda: fp16() | {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        HALF | {"clip": 0.1, "parts": 2},
    ),
}


@pytest.fixture(params=WAYS)
def way(request):
    module, trainer, hand = WAYS[request.param]
    return module, trainer() if callable(trainer) else trainer, hand


@pytest.mark.parametrize("b", [0.05, "auto"])
def test_evaluation_and_checkpoints_are_clean(tmp_path, way, b):
    """In and between epochs, after each batch; with b="auto" it also has the same b."""
    module, options, hand = way
    weights, predictions, scales = train_by_hand(b=b, **hand)
    checkpoints = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    lit = Lit(b=b, **module)
    trainer = make_trainer(
        tmp_path,
        callbacks=[checkpoints, NeuralVariability()],
        enable_checkpointing=True,
        val_check_interval=1,
        **options,
    )
    trainer.fit(lit, Loader(), all_inputs())
    assert lit.scales == scales
    assert same(theta(lit), weights[-1])
    assert len(lit.predictions) == STEPS
    assert all(map(torch.equal, lit.predictions, predictions))
    parts = hand.get("parts", 1)
    for step in range(1, STEPS // parts + 1):
        assert same(saved(tmp_path / f"step={step}.ckpt"), weights[step * parts - 1])
    assert not same(weights[0], weights[-1])


def test_checkpoints_between_epochs(tmp_path):
    weights, _, _ = train_by_hand()
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = make_trainer(tmp_path, callbacks=[checkpoints], enable_checkpointing=True)
    trainer.fit(Lit(), Loader())
    for epoch in range(EPOCHS):
        assert same(
            saved(tmp_path / f"epoch={epoch}.ckpt"), weights[(epoch + 1) * STEPS // EPOCHS - 1]
        )


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("step", [2, 4, 6, 10])
def test_resume_equals_an_uninterrupted_run(tmp_path, step, b):
    """Inside an epoch (2, 4, 10) and at its end (6)."""

    def run(last, start=None):
        checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        observer = neuvar.LabelObserver(EXAMPLES, CLASSES)
        lit = Lit(b=b)
        trainer = make_trainer(
            tmp_path,
            callbacks=[ObserveLabels(observer), NeuralVariability(), checkpoints],
            enable_checkpointing=True,
            max_steps=last,
        )
        trainer.fit(lit, Loader(), ckpt_path=start)
        return lit, observer.state_dict()["sums"]

    whole, seen = run(STEPS)
    run(step)
    again, seen_again = run(STEPS, tmp_path / f"step={step}.ckpt")
    assert same(theta(whole), theta(again))
    assert torch.equal(seen, seen_again)
    assert whole.scales[step:] == again.scales


def test_auto_needs_no_callback_without_accumulation(tmp_path):
    weights, _, scales = train_by_hand(b="auto")
    lit = Lit(b="auto")
    make_trainer(tmp_path).fit(lit, Loader())
    assert lit.scales == scales
    assert len(set(scales)) > 1
    assert same(theta(lit), weights[-1])


def test_fast_dev_run_and_then_fit(tmp_path):
    lit, net = Lit(), make_net()
    make_trainer(tmp_path, fast_dev_run=1).fit(lit, Loader())
    train_by_hand(net=net, steps=1)
    make_trainer(tmp_path).fit(lit, Loader())
    weights, _, _ = train_by_hand(net=net)
    assert same(theta(lit), weights[-1])


def test_finding_a_learning_rate_leaves_no_trace(tmp_path):
    weights, _, _ = train_by_hand()
    lit, trainer = Lit(), make_trainer(tmp_path)
    before = theta(lit)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), BATCH)
    result = Tuner(trainer).lr_find(lit, loader, num_training=20, update_attr=False)
    assert len(result.results["lr"]) > 5
    assert same(theta(lit), before)
    lit.scales.clear()
    make_trainer(tmp_path).fit(lit, Loader())
    assert same(theta(lit), weights[-1])


def test_averages_are_those_of_clean_weights(tmp_path):
    weights, _, _ = train_by_hand()
    average = torch.optim.swa_utils.get_ema_avg_fn(0.9)
    means = []
    for k, now in enumerate(weights):
        means.append(now if k == 0 else {n: average(means[-1][n], p, k) for n, p in now.items()})
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    lit = Lit()
    trainer = make_trainer(
        tmp_path,
        callbacks=[EMAWeightAveraging(decay=0.9), checkpoints],
        enable_checkpointing=True,
    )
    trainer.fit(lit, Loader(), all_inputs())
    for step in range(1, STEPS + 1):
        assert same(saved(tmp_path / f"step={step}.ckpt"), means[step - 1])
    assert same(theta(lit), means[-1])
    current = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["current_model_state"]
    assert same({n.removeprefix("net."): p for n, p in current.items()}, weights[2])
    net = make_net()
    for k, seen in enumerate(lit.predictions):
        net.load_state_dict(means[(k + 1) * STEPS // EPOCHS - 1])
        with torch.no_grad():
            assert torch.equal(net(INPUTS), seen)


def test_test_and_predict_are_clean(tmp_path):
    _, predictions, _ = train_by_hand()
    lit, trainer = Lit(), make_trainer(tmp_path)
    trainer.fit(lit, Loader())
    trainer.test(lit, all_inputs(), verbose=False)
    assert torch.equal(lit.predictions[-1], predictions[-1])
    assert torch.equal(trainer.predict(lit, all_inputs())[0], predictions[-1])


def test_b_and_delta_are_logged(tmp_path):
    logger, lit = CSVLogger(tmp_path), Lit(b="auto")
    trainer = make_trainer(
        tmp_path, logger=logger, callbacks=[NeuralVariability()], log_every_n_steps=3
    )
    trainer.fit(lit, Loader())
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True)
    assert rows["step"].tolist() == [2, 5, 8, 11]
    # The noise of a step was drawn with the b of the step before.
    np.testing.assert_allclose(rows["b"], np.array(lit.scales)[[1, 4, 7, 10]], rtol=1e-5)
    assert np.isfinite(rows["delta"]).all()
    assert {"b", "delta"} <= trainer.progress_bar_metrics.keys()


def test_delta_is_half_of_the_product_of_noise_and_gradient():
    net = make_net().double()
    optimizer = neuvar.NVRMSGD(net, lr=0.1, b=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(net(INPUTS.double()), LABELS).backward()
        optimizer.step()
    optimizer.zero_grad()
    cross_entropy(net(INPUTS.double()), LABELS).backward()
    clean = [p.detach().clone() for p in net.parameters()]
    noisy = neuvar.NVRMSGD(make_net().double(), lr=0.1, b=0.05)
    assert noisy.noise_metrics() == {"b": 0.05, "delta": 0.0}
    with optimizer.perturbed():
        seen = []
        hook = net.register_forward_pre_hook(
            lambda *_: seen.extend(p.detach().clone() for p in net.parameters())
        )
        net(INPUTS.double())
        hook.remove()
    product = sum(
        ((q - p) * own.grad).sum() for p, q, own in zip(clean, seen, net.parameters(), strict=True)
    )
    assert optimizer.noise_metrics()["delta"] == pytest.approx(float(product) / 2, rel=1e-4)


class Gan(L.LightningModule):
    """Two optimizers, of which each controls its own b."""

    def __init__(self):
        super().__init__()
        self.first, self.second = make_net(), torch.nn.Linear(CLASSES, CLASSES)
        self.automatic_optimization = False

    def training_step(self, batch, step):
        for optimizer in self.optimizers():
            loss = cross_entropy(self.second(self.first(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        first = neuvar.NVRMAdam(self.first, lr=1e-2, b="auto")
        return first, neuvar.NVRMAdam(self.second, lr=1e-2, b="auto", seed=1)


def test_two_optimizers(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[NeuralVariability()])
    trainer.fit(Gan(), Loader())
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True)
    for name in ("b_0", "delta_0", "b_1", "delta_1"):
        assert len(rows[name]) == STEPS
        assert np.isfinite(rows[name]).all()


# Wrong labels.


@pytest.mark.parametrize("kind", ["tuple", "dict", "read"])
def test_observed_labels_are_those_of_judge_labels(tmp_path, kind):
    data, read = TensorDataset(INPUTS, LABELS), None
    if kind == "dict":
        data = [{"x": x, "label": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    if kind == "read":
        data, read = TensorDataset(INPUTS, LABELS, INDICES), lambda o, b: (b[2], o["z"], b[1])

    class Own(Lit):
        def training_step(self, batch, step):
            items = (batch["x"], batch["label"]) if kind == "dict" else batch
            out = super().training_step(items, step)
            kept.append(out["logits"].detach())
            return {"loss": out["loss"], "z" if read else "logits": out["logits"]}

    kept = deque()
    observer = neuvar.LabelObserver(EXAMPLES, CLASSES)
    trainer = make_trainer(tmp_path, callbacks=[ObserveLabels(observer, read)])
    trainer.fit(Own(), DataLoader(data if read else neuvar.IndexedDataset(data), BATCH))
    p = torch.cat(list(kept)).softmax(1).view(EPOCHS, EXAMPLES, CLASSES).mean(0)
    issues, given = observer.label_issues(), judge_labels(p, LABELS, history=True)
    np.testing.assert_allclose(issues.probabilities, given.probabilities, atol=1e-6)
    assert np.array_equal(issues.flagged, given.flagged)
    assert np.array_equal(issues.suggested, given.suggested)
    assert issues.flagged.any()


@pytest.mark.parametrize(
    ("output", "items", "message"),
    [
        (["loss"], 3, "needs the logits"),
        (["loss", "logits"], 2, "needs batches of inputs, labels and indices"),
    ],
)
def test_what_is_missing_gets_a_sentence(tmp_path, output, items, message):
    class Own(Lit):
        def training_step(self, batch, step):
            out = super().training_step(batch, step)
            return {name: out[name] for name in output}

    loader = DataLoader(TensorDataset(*(INPUTS, LABELS, INDICES)[:items]), BATCH)
    callback = ObserveLabels(neuvar.LabelObserver(EXAMPLES, CLASSES))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, callbacks=[callback]).fit(Own(), loader)
