"""The Trainer of Hugging Face: evaluation, checkpoints and resumed runs, compared to the bit.

The reference is a loop written by hand, with an optimizer created from parameters alone.
"""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, nll_loss
from transformers import Trainer, TrainingArguments

import neuvar
from neuvar.cleaning import judge_labels
from neuvar.integrations.huggingface import NVRMTrainer

BATCH, STEPS, CLASSES = 8, 8, 3
IDS = torch.randint(3, 30, (48, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS[:, 0] % CLASSES
DATA = [{"input_ids": i, "labels": y} for i, y in zip(IDS, LABELS, strict=True)]


def make_model(dropout=0.0):
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=CLASSES,
    )
    torch.manual_seed(1)
    return transformers.BertForSequenceClassification(config)


def make_arguments(folder, **options):
    defaults = {
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": len(DATA),
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
    }
    return TrainingArguments(str(folder), **(defaults | options))


class Recorder:
    """A metric that keeps the predictions of each evaluation."""

    def __init__(self):
        self.predictions = []

    def __call__(self, result):
        self.predictions.append(torch.from_numpy(result.predictions))
        return {"accuracy": float((result.predictions.argmax(1) == result.label_ids).mean())}


def smoothed_loss(logits, labels, smoothing):
    logs = log_softmax(logits, dim=-1)
    return (1 - smoothing) * nll_loss(logs, labels) - smoothing * logs.mean()


def train_by_hand(*, parts=1, clip=0.0, smoothing=0.0, precision=None, b=0.05):
    """Train without a framework; returns the clean weights and predictions after each step.

    b and δ are those between the backward pass and the step.
    """
    model = make_model()
    optimizer = neuvar.NVRMAdamW(model.parameters(), lr=1e-2, b=b)
    autocast = torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None)
    weights, predictions, measured = [], [], []
    batches = [slice(k * BATCH, (k + 1) * BATCH) for k in range(len(DATA) // BATCH)]
    for step in range(STEPS):
        model.train()
        first = step * parts % len(batches)
        for batch in batches[first : first + parts]:
            with autocast:
                outputs = model(input_ids=IDS[batch], labels=LABELS[batch])
            loss = outputs.loss
            if smoothing:
                loss = smoothed_loss(outputs.logits, LABELS[batch], smoothing)
            loss = loss / parts
            optimizer.report_loss(loss)
            loss.backward()
        measured.append(optimizer.noise_metrics())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with optimizer.denoised(), torch.no_grad(), autocast:
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            predictions.append(model(input_ids=IDS).logits.float())
    return weights, predictions, measured


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


CASES = {
    "plain": ({}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {"parts": 2}),
    "clipping": ({"max_grad_norm": 0.05}, {"clip": 0.05}),
    "label smoothing": ({"label_smoothing_factor": 0.2}, {"smoothing": 0.2}),
    "bf16": ({"bf16": True}, {"precision": torch.bfloat16}),
    "activation checkpointing": ({"activation_checkpointing": True}, {}),
}


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_every_evaluation_and_checkpoint_is_clean(tmp_path, case, b):
    options, by_hand = CASES[case]
    weights, predictions, measured = train_by_hand(b=b, **by_hand)
    model, record = make_model(), Recorder()
    trainer = (Trainer if b != "auto" else NVRMTrainer)(
        model,
        # The Trainer calls optimizer.eval() before an evaluation, so half of the saves have none.
        make_arguments(tmp_path, eval_strategy="steps", eval_steps=2, save_steps=1, **options),
        train_dataset=DATA,
        eval_dataset=DATA,
        compute_metrics=record,
        optimizers=(neuvar.NVRMAdamW(model, lr=1e-2, b=b), None),
    )
    # Otherwise Trainer 5.23 adds the losses of micro-batches up for classifiers, without a mean.
    trainer.loss_is_scaled_for_ga = False
    trainer.train()
    assert_same(model.state_dict(), weights[-1])
    for step in range(STEPS):
        saved = load_file(tmp_path / f"checkpoint-{step + 1}" / "model.safetensors")
        assert_same(saved, weights[step])
    for found, expected in zip(record.predictions, predictions[1::2], strict=True):
        assert torch.equal(found, expected)
    trainer.save_model(tmp_path / "last")
    assert_same(load_file(tmp_path / "last" / "model.safetensors"), weights[-1])
    assert torch.equal(torch.from_numpy(trainer.predict(DATA).predictions), predictions[-1])
    if b == "auto":
        logged = [entry for entry in trainer.state.log_history if "b" in entry]
        assert [{key: entry[key] for key in ("b", "delta")} for entry in logged] == measured
        assert len({values["b"] for values in measured}) > 1
        assert any(values["delta"] for values in measured)


def make_trainer(folder, *, b, dropout=0.0, **options):
    """A Trainer with shuffled batches, whose own optimizer gets the noise."""
    options = {"train_sampling_strategy": "random", "learning_rate": 1e-2} | options
    return NVRMTrainer(
        make_model(dropout),
        make_arguments(folder, **options),
        train_dataset=DATA,
        eval_dataset=DATA,
        compute_metrics=Recorder(),
        b=b,
    )


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("step", [2, 4])  # the sixth ends an epoch
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, b, step):
    options = {"dropout": 0.1, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}
    whole = make_trainer(tmp_path / "whole", b=b, **options)
    whole.train()
    begun = make_trainer(tmp_path / "begun", b=b, **options)
    begun.add_callback(StopAt(step))
    begun.train()
    resumed = make_trainer(tmp_path / "begun", b=b, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    expected = whole.optimizer.state_dict()["param_groups"]
    assert resumed.optimizer.state_dict()["param_groups"] == expected


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_load_best_model_at_end_loads_clean_weights(tmp_path):
    trainer = make_trainer(
        tmp_path,
        b=0.05,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        learning_rate=0.05,
    )
    trainer.train()
    history = [e for e in trainer.state.log_history if "eval_accuracy" in e]
    best = max(history, key=lambda entry: entry["eval_accuracy"])
    assert 1 < best["step"] < STEPS
    folder = Path(trainer.state.best_model_checkpoint)
    assert folder.name == f"checkpoint-{best['step']}"
    assert_same(trainer.model.state_dict(), load_file(folder / "model.safetensors"))
    at_best = trainer.compute_metrics.predictions[best["step"] - 1]
    assert torch.equal(torch.from_numpy(trainer.predict(DATA).predictions), at_best)


def test_the_trainers_own_optimizer_gets_the_noise(tmp_path):
    trainer = make_trainer(tmp_path, b=0.05, weight_decay=0.1, seed=3)
    trainer.train()
    optimizer = neuvar.optimizer_of(trainer.model)
    assert trainer.optimizer.optimizer is optimizer
    assert isinstance(optimizer.inner, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert optimizer.param_groups[0]["drawn"][:4] == (STEPS, 1, "gaussian", 3)
    assert optimizer.has_noise


def test_b_is_refused_beside_an_optimizer(tmp_path):
    model = make_model()
    optimizer = neuvar.NVRMAdamW(model, b=0.05)
    with pytest.raises(ValueError, match="leave out b or optimizers"):
        NVRMTrainer(model, make_arguments(tmp_path), b=0.05, optimizers=(optimizer, None))


def test_without_b_the_trainer_is_that_of_transformers(tmp_path):
    ours = make_trainer(tmp_path / "ours", b=None, dropout=0.1)
    ours.train()
    theirs = Trainer(
        make_model(0.1),
        make_arguments(tmp_path / "theirs", train_sampling_strategy="random", learning_rate=1e-2),
        train_dataset=DATA,
    )
    theirs.train()
    assert_same(ours.model.state_dict(), theirs.model.state_dict())
    assert not any("b" in entry for entry in ours.state.log_history)


WRONG = [{**row, "labels": (row["labels"] + (n % 8 == 0)) % CLASSES} for n, row in enumerate(DATA)]
"""The data with every eighth label wrong."""


def observe(folder, *, steps=48, smoothing=0.0, **options):
    """Train with an observer; returns it and the probabilities seen by a hook, in order."""
    model, observer = make_model(), neuvar.LabelObserver(len(WRONG), CLASSES)
    arguments = make_arguments(
        folder, max_steps=steps, label_smoothing_factor=smoothing, save_steps=4
    )
    trainer = NVRMTrainer(
        model,
        arguments,
        train_dataset=WRONG,
        eval_dataset=WRONG,
        observer=observer,
        optimizers=(neuvar.NVRMAdamW(model, lr=1e-2, b=0.05), None),
    )
    seen = []

    def look(module, args, output):
        if module.training:
            seen.append(output.detach())

    model.classifier.register_forward_hook(look)
    trainer.train(**options)
    trainer.evaluate()  # is not observed
    return observer, torch.softmax(torch.cat(seen), -1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_observer_finds_the_same_issues_as_judge_labels(tmp_path, smoothing):
    observer, seen = observe(tmp_path, smoothing=smoothing)
    probabilities = seen.view(-1, len(WRONG), CLASSES).mean(0)
    labels = torch.stack([row["labels"] for row in WRONG])
    expected = judge_labels(probabilities.numpy(), labels, history=True)
    issues = observer.label_issues()
    assert np.allclose(issues.probabilities, expected.probabilities)
    assert np.array_equal(issues.flagged, expected.flagged)
    assert np.array_equal(issues.ranked, expected.ranked)
    assert issues.flagged.any()


def test_observer_is_resumed_with_the_trainer(tmp_path):
    whole, _ = observe(tmp_path / "whole", steps=12)
    observe(tmp_path / "begun", steps=6)  # saved after step 4
    shutil.rmtree(tmp_path / "begun" / "checkpoint-6")
    resumed, _ = observe(tmp_path / "begun", steps=12, resume_from_checkpoint=True)
    assert torch.equal(resumed.state_dict()["sums"], whole.state_dict()["sums"])


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [event.value for event in events.Scalars("train/b")]


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{folder}")
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    return [metric.value for metric in client.get_metric_history(run.info.run_id, "b")]


def read_wandb(folder):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # finishes the run, and waits until its file is written
    (file,) = folder.glob("offline-run-*/*.wandb")
    records = [Record.FromString(text) for text in read_leveldb_log(file.read_bytes())]
    items = [item for record in records for item in record.history.item]
    return [
        json.loads(item.value_json) for item in items if "train/b" in (item.key, *item.nested_key)
    ]


def read_leveldb_log(data, start=7, block=32_768, header=7):
    """Records of wandb's file, of which wandb has no public reader. It is a log of LevelDB."""
    record, position = b"", start
    while position + header <= len(data):
        left = block - position % block
        if left < header:  # padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        position += header
        record += data[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.mark.parametrize("logger", READERS)
def test_b_is_in_the_loggers(tmp_path, monkeypatch, logger):
    folder = tmp_path / logger
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = make_trainer(tmp_path / "out", b="auto", report_to=[logger], max_steps=6)
    trainer.train()
    logged = [entry["b"] for entry in trainer.state.log_history if "b" in entry]
    assert len(set(logged)) > 1
    assert READERS[logger](folder) == pytest.approx(logged)
