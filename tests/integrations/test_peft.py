"""PEFT: noise on the adapters alone; saved and merged weights are clean."""

import copy

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import neuvar
from tests.integrations.test_huggingface import DATA, IDS, LABELS, make_arguments, make_model

# peft 0.21 asks transformers 5.23 in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def make_lora():
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["query", "value"], task_type=peft.TaskType.SEQ_CLS
    )
    return peft.get_peft_model(make_model(), config)


def outputs(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def trained(tmp_path):
    model = make_lora()
    start = copy.deepcopy(model.state_dict())
    trainer = transformers.Trainer(
        model,
        make_arguments(tmp_path / "run"),
        train_dataset=DATA,
        optimizers=(neuvar.NVRMAdamW(model, lr=1e-2, b=0.05), None),
    )
    trainer.train()
    return model, start, trainer


def train_by_hand():
    """The same training without frameworks' loops, from parameters alone; returns clean weights."""
    model = make_lora()
    optimizer = neuvar.NVRMAdamW(model.parameters(), lr=1e-2, b=0.05)
    model.train()
    for step in range(8):
        part = slice(step % 6 * 8, step % 6 * 8 + 8)
        optimizer.zero_grad()
        model(input_ids=IDS[part], labels=LABELS[part]).loss.backward()
        optimizer.step()
    with optimizer.denoised():
        return copy.deepcopy(model.state_dict())


def test_noise_is_on_the_adapters_alone(trained):
    model, start, _ = trained
    optimizer = neuvar.optimizer_of(model)
    noisy = {name for name, p in model.named_parameters() if p in optimizer._weights.eps}
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert noisy == trained_names
    assert all("lora_" in name or "modules_to_save" in name for name in noisy)
    seen = {}

    def look(module, args, output):
        seen.update({name: p.detach().clone() for name, p in model.named_parameters()})

    model.train()
    handle = model.base_model.model.classifier.register_forward_hook(look)
    model(input_ids=IDS)
    handle.remove()
    state = model.state_dict()
    for name, value in seen.items():
        assert torch.equal(value, state[name]) == (name not in noisy), name
        if name not in noisy:
            assert torch.equal(value, start[name]), name


def test_saved_adapters_are_clean(trained, tmp_path):
    model, _, _ = trained
    expected = train_by_hand()
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    model.save_pretrained(tmp_path / "adapter")
    for file in [tmp_path / "adapter", tmp_path / "run" / "checkpoint-8"]:
        saved = load_file(file / "adapter_model.safetensors")
        assert len(saved) == sum("lora_" in key for key in expected) + 2  # and the classifier
        for key, value in peft.get_peft_model_state_dict(model, expected).items():
            assert torch.equal(saved[key], value), key
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    assert torch.equal(outputs(loaded), outputs(model))


def test_merged_model_is_clean(trained):
    model, start, _ = trained
    expected = train_by_hand()
    reference = make_lora()
    reference.load_state_dict(expected)
    merged, clean = copy.deepcopy(model).merge_and_unload(), reference.merge_and_unload()
    state = merged.state_dict()
    for key, value in clean.state_dict().items():
        assert torch.equal(state[key], value), key
    assert torch.equal(outputs(merged), outputs(clean))
    merged = model.merge_and_unload()  # the very model that was trained
    assert torch.equal(outputs(merged), outputs(clean))
    query = "bert.encoder.layer.0.attention.self.query.weight"
    before = "base_model.model." + query.replace("weight", "base_layer.weight")
    assert not torch.equal(merged.state_dict()[query], start[before])
