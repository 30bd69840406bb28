"""The walk over a model sees what torch's own enumerations see, and whatever changes in a
module.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagoda.connectors.transformers.model_walk import walk_over
from tests.e2e.tiny import llama


def names(walk) -> list[str]:
    """Return the names of the modules in the order of the walk: each stands before its class."""
    settings = walk.settings
    return [
        settings[at - 1]
        for at in range(1, len(settings))
        if isinstance(settings[at], type)
    ]


class Shared(nn.Module):
    """Modules and weights under several names, a cycle, and a place that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Sequential(
            self.first, nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
        )
        self.empty = None
        self.register_module("nothing", None)
        self.last[1].weight = self.first.weight
        self.last.parent = self


@pytest.mark.parametrize("make", [llama, Shared])
def test_it_sees_each_module_once_in_the_order_of_torch(make) -> None:
    model = make()
    walk = walk_over(model)
    assert names(walk) == [name for name, _ in model.named_modules()]
    assert walk.kinds == ["cpu"]
    pointers = {
        tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    assert pointers <= set(walk.weights)


def add_module(model: nn.Module) -> None:
    model.model.layers[1].mlp.extra = nn.Linear(2, 2)


def add_to_the_dict(model: nn.Module) -> None:
    model.model.layers[1]._modules["extra"] = nn.Identity()


def replace_module(model: nn.Module) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def remove_module(model: nn.Module) -> None:
    del model.model.layers[0].mlp.act_fn


def swap_modules(model: nn.Module) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def set_number(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling = 0.125001


def add_number(model: nn.Module) -> None:
    model.model.layers[1].mlp.factor = 2.0


def number_for_tensor(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling = torch.tensor(
        model.model.layers[1].self_attn.scaling
    )


def rename_number(model: nn.Module) -> None:
    norm = model.model.norm
    norm.epsilon = vars(norm).pop("variance_epsilon")


SETTINGS = [
    add_module,
    add_to_the_dict,
    replace_module,
    remove_module,
    swap_modules,
    set_number,
    add_number,
    number_for_tensor,
    rename_number,
]


@pytest.mark.parametrize("change", SETTINGS)
def test_a_changed_module_is_seen(change) -> None:
    model = llama()
    before = walk_over(model)
    assert walk_over(model) == before
    change(model)
    after = walk_over(model)
    assert (after.settings, after.weights) != (before.settings, before.weights)


def write_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1


def write_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def replace_weight(model: nn.Module) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def swap_weights(model: nn.Module) -> None:
    attention = model.model.layers[0].self_attn
    key = attention.k_proj
    value = attention.v_proj
    key.weight, value.weight = value.weight, key.weight


def add_weight(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.register_buffer("mask", torch.ones(2))


@pytest.mark.parametrize(
    "change",
    [write_weight, write_buffer, replace_weight, swap_weights, add_weight],
)
def test_a_changed_weight_is_seen(change) -> None:
    model = llama()
    before = walk_over(model).weights
    assert walk_over(model).weights == before
    change(model)
    assert walk_over(model).weights != before


def test_hooks_training_and_methods_of_a_module_are_seen() -> None:
    model = llama()
    walk = walk_over(model)
    assert walk.hooked == []
    assert walk.unusual == []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda *_: None)
    model.model.norm.register_forward_hook(lambda *_: None)
    attention.o_proj.train()
    model.lm_head.forward = lambda values: values
    walk = walk_over(model)
    assert [name for name, _ in walk.hooked] == [
        "model.layers.1.self_attn",
        "model.norm",
    ]
    assert [name for name, _ in walk.unusual] == [
        "model.layers.1.self_attn.o_proj",
        "lm_head",
    ]


def test_an_adapter_of_a_class_that_was_changed_later_is_seen(
    monkeypatch,
) -> None:
    model = llama()
    before = len(walk_over(model).adapted)
    monkeypatch.setattr(nn.Embedding, "merged_adapters", ["one"], raising=False)
    assert len(walk_over(model).adapted) == before + 1
