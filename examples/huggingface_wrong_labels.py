"""Fine-tune a small transformer on wrong labels, with and without weight noise.

    python examples/huggingface_wrong_labels.py FOLDER --results results/huggingface.jsonl

FOLDER has tab-separated files with the columns news_title and label: train_clean.tsv (true
labels), train_clean_noisy_labels.tsv (the same titles, labels from rules) and test.tsv (true
labels), such as the Hausa news of github.com/uds-lsv/transfer-distant-transformer-african.

A BERT of two layers first learns to fill in masked words of the training titles, without labels. It
is then fine-tuned on the labels from rules. The table has the accuracy on the test set after the
last epoch, the fraction of wrong labels that the network has memorized, and how well an observer
of the training tells wrong labels from right ones. A seed takes less than two minutes on one core.
"""

import argparse
import csv
import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import neuvar
from neuvar.integrations.huggingface import NVRMTrainer

SCALES = (None, 0.01, 0.03, "auto")
METRICS = ("test_accuracy", "memorized", "auroc", "last_b")


def read(file):
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    return [row["news_title"] for row in rows], [row["label"] for row in rows]


def make_tokenizer(titles):
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(titles, vocab_size=3000, show_progress=False)
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    named = {f"{key}_token": value for key, value in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **named)


def make_arguments(folder, *, epochs, lr, seed):
    return TrainingArguments(
        folder,
        num_train_epochs=epochs,
        learning_rate=lr,
        weight_decay=0.01,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )


def pretrain(tokenizer, titles, *, epochs, seed, folder):
    """Fill in masked words; returns the encoder's weights."""
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = BertForMaskedLM(config)
    Trainer(
        model,
        make_arguments(folder, epochs=epochs, lr=2e-3, seed=seed),
        train_dataset=[tokenizer(title, truncation=True, max_length=64) for title in titles],
        data_collator=DataCollatorForLanguageModeling(tokenizer),
    ).train()
    return config, model.bert.state_dict()


def fine_tune(tokenizer, pretrained, train, test, wrong, *, b, epochs, seed, folder):
    """Train on the labels from rules; returns a number for each metric."""
    config, encoder = pretrained
    set_seed(seed)
    config.num_labels = len(set(train[1]))
    model = BertForSequenceClassification(config)
    model.bert.load_state_dict(encoder, strict=False)  # a classifier has a pooling layer, too
    sets = [
        [
            {**tokenizer(title, truncation=True, max_length=64), "labels": label}
            for title, label in zip(titles, labels, strict=True)
        ]
        for titles, labels in (train, test)
    ]
    observer = neuvar.LabelObserver(len(sets[0]), config.num_labels)
    trainer = NVRMTrainer(
        model,
        make_arguments(folder, epochs=epochs, lr=1e-3, seed=seed),
        train_dataset=sets[0],
        data_collator=DataCollatorWithPadding(tokenizer),
        b=b,
        observer=observer,
    )
    trainer.train()
    given, predicted = (
        np.array(train[1]),
        [trainer.predict(data).predictions.argmax(1) for data in sets],
    )
    quality = observer.label_issues().quality
    return (
        np.mean(predicted[1] == np.array(test[1])),
        np.mean(predicted[0][wrong] == given[wrong]),
        np.mean(quality[wrong][:, None] < quality[~wrong]),
        neuvar.optimizer_of(model).param_groups[0]["b"] if b is not None else 0.0,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with the three files")
    parser.add_argument("--results", type=Path, help="write one JSON line per run to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--pretraining", type=int, default=10, help="epochs of masked words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles, true = read(options.folder / "train_clean.tsv")
    same, given = read(options.folder / "train_clean_noisy_labels.tsv")
    test_titles, test = read(options.folder / "test.tsv")
    if same != titles:
        raise SystemExit("the files with true and with noisy labels have different titles")
    classes = {name: index for index, name in enumerate(sorted(set(true)))}
    true, given, test = ([classes[name] for name in names] for names in (true, given, test))
    wrong = np.array(true) != np.array(given)
    print(f"{len(titles)} titles, {len(classes)} classes, {wrong.mean():.3f} of the labels wrong")
    tokenizer = make_tokenizer(titles)
    results = {b: [] for b in SCALES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            settings = {"seed": seed, "folder": folder}
            with redirect_stdout(io.StringIO()):  # the Trainer prints its logs
                pretrained = pretrain(tokenizer, titles, epochs=options.pretraining, **settings)
            for b in SCALES:
                data = (titles, given), (test_titles, test), wrong
                settings |= {"b": b, "epochs": options.epochs}
                with redirect_stdout(io.StringIO()):
                    result = fine_tune(tokenizer, pretrained, *data, **settings)
                results[b].append(result)
                line = {"b": b or 0, "seed": seed, "epochs": options.epochs}
                line |= dict(zip(METRICS, map(float, result), strict=True))
                print(json.dumps(line), flush=True)
                if options.results:
                    with options.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    print(f"\nmean ± standard deviation, n = {options.seeds}")
    print(" | ".join(("b", *METRICS)))
    for b, rows in results.items():
        means, deviations = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)
        cells = [f"{m:.3f} ± {d:.3f}" for m, d in zip(means, deviations, strict=True)]
        print(" | ".join([str(b or 0), *cells]))


if __name__ == "__main__":
    main()
