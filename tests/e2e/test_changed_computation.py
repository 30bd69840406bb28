"""Weights and computations that change in ways that torch does not count, or that parameters and
buffers do not show: adapters, packed weights, vectors in attributes. Texts are those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.utils._pytree import tree_map

from pagoda.base.metrics import Reason
from tests.e2e.house import House
from tests.e2e.tiny import generated, llama, prompt

IDS = prompt(80)
NEW = 12


@dataclass
class Settings:
    """What an adapter may keep in an object."""

    gain: float


class Adapted(nn.Module):
    """A layer with an adapter as of PEFT, which keeps its values in several places."""

    def __init__(self, base: nn.Linear, seed: int = 3) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        up = torch.randn(base.out_features, 4, generator=chance) * 0.2
        down = torch.randn(4, base.in_features, generator=chance) * 0.2
        self.base_layer = base
        self.lora_A = nn.Parameter(down)
        self.lora_B = nn.Parameter(up)
        self.scaling = {"one": 2.0}
        self.active_adapters = ["one"]
        self.merged_adapters: list[str] = []
        self.vector = torch.zeros(base.out_features)
        self.tables = {"one": [torch.zeros(base.out_features)]}
        self.settings = Settings(1.0)
        self._gain = 1.0

    def delta(self) -> torch.Tensor:
        return (self.lora_B @ self.lora_A).detach() * self.scaling["one"]

    def merge(self) -> None:
        self.base_layer.weight.data += self.delta()
        self.merged_adapters.append("one")

    def unmerge(self) -> None:
        self.base_layer.weight.data -= self.delta()
        self.merged_adapters.clear()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(values) + self.vector + self.tables["one"][0]
        if not self.merged_adapters:
            out = out + values @ self.delta().T
        return out * (self._gain * self.settings.gain)


def adapted(seed: int = 3):
    """Return a model with an adapter in each layer."""
    model = llama(seed=7)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.v_proj = Adapted(attention.v_proj, seed)
    return model.eval()


def layers_of(model) -> list[Adapted]:
    return [layer.self_attn.v_proj for layer in model.model.layers]


def check(cached, hit: int, says: str = "") -> None:
    """Generate as the model does, from so many tokens."""
    out = cached.generate(IDS, max_new_tokens=NEW, do_sample=False)
    assert out[:, 80:].tolist() == generated(cached.model, IDS, NEW)
    assert cached.last.hit.num_tokens == hit
    assert says in (cached.last.hit.detail or "")


def other_scale(layer: Adapted) -> None:
    layer.scaling["one"] = -1.0


def other_vector(layer: Adapted) -> None:
    layer.vector = torch.ones_like(layer.vector)


def other_table(layer: Adapted) -> None:
    layer.tables["one"][0] = torch.ones_like(layer.vector)


def written_table(layer: Adapted) -> None:
    layer.tables["one"][0].add_(1.0)


def other_setting(layer: Adapted) -> None:
    layer.settings.gain = -2.0


def other_private(layer: Adapted) -> None:
    layer._gain = -2.0


STATES = [
    other_scale,
    other_vector,
    other_table,
    written_table,
    other_setting,
    other_private,
]


@pytest.mark.slow
@pytest.mark.parametrize("change", STATES)
def test_what_an_adapter_holds_is_part_of_the_key(change, house: House) -> None:
    cached = house.open(adapted())
    check(cached, 0)
    model = adapted()
    for layer in layers_of(model):
        change(layer)
    other = house.open(model)
    check(other, 0)
    for layer in layers_of(cached.model):
        change(layer)
    check(cached, 0)
    check(cached, 64)


@pytest.mark.slow
def test_merging_reads_the_weights_again(house: House) -> None:
    model = adapted()
    cached = house.open(model)
    check(cached, 0)
    for layer in layers_of(model):
        layer.merge()
    check(cached, 0)
    check(cached, 64)
    for layer in layers_of(model):
        layer.scaling["one"] = 0.5
        layer.unmerge()
        layer.scaling["one"] = 2.0
    # the weights are not what they were
    check(cached, 0)


@pytest.mark.slow
def test_writes_that_torch_does_not_count_are_noticed(house: House) -> None:
    model = adapted()
    cached = house.open(model)
    check(cached, 0)
    for layer in layers_of(model):
        layer.lora_B.data.copy_(layer.lora_B.data * -3)
    check(cached, 0)
    with torch.inference_mode():
        model = llama(seed=7)
    cached = house.open(model)
    check(cached, 0)
    with torch.inference_mode():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    check(cached, 0)


def test_a_weight_in_the_place_of_a_freed_one_is_noticed(house: House) -> None:
    model = llama(seed=7)
    cached = house.open(model)
    check(cached, 0)
    weights = model.model.layers[0].self_attn.q_proj
    counted = weights.weight._version
    # another parameter in the same memory, with as many writes
    weights.weight = nn.Parameter(weights.weight.data)
    with torch.no_grad():
        while weights.weight._version < counted:
            weights.weight.mul_(1.7)
    check(cached, 0)
    marks = cached._memory
    assert marks
    for memory in marks:
        assert not memory.expired()
    weights.weight = nn.Parameter(weights.weight.detach() * 2)
    assert any(memory.expired() for memory in marks)


def packed(seed: int):
    """Return a model whose weights are neither parameters nor buffers; its embeddings are those of
    other seeds.
    """
    model = llama(seed=7)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    return quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_part_of_the_key(house: House) -> None:
    cached = house.open(packed(1))
    check(cached, 0)
    check(cached, 64)
    check(house.open(packed(2)), 0)
    cached.model.load_state_dict(packed(2).state_dict())
    check(cached, 0)


class Quantised(nn.Parameter):
    """A weight that keeps its scale in an attribute, as of bitsandbytes."""

    scale: torch.Tensor


class Wrapped(torch.Tensor):
    """A weight that is made of other tensors, as of torchao."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=torch.float32, device=numbers.device
        )

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers = numbers
        self.scale = scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, given=(), named=None):
        def plain(value):
            if isinstance(value, Wrapped):
                return value.numbers.float() * value.scale
            return value

        return function(*tree_map(plain, given), **tree_map(plain, named or {}))


class Scaled(nn.Linear):
    """A layer whose weight has a scale."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, Quantised):
            weight = weight.as_subclass(torch.Tensor) * weight.scale
        return nn.functional.linear(values, weight)


def quantised(weight: torch.Tensor, scale: float) -> torch.Tensor:
    made = Quantised(weight, requires_grad=False)
    made.scale = torch.tensor(scale)
    return made


def wrapped(weight: torch.Tensor, scale: float) -> torch.Tensor:
    return Wrapped(weight, torch.tensor(scale))


@pytest.mark.parametrize("make", [quantised, wrapped])
def test_what_a_weight_holds_is_part_of_the_key(make, house: House) -> None:
    for scale in (1.0, -2.0):
        model = llama(seed=7)
        for layer in model.model.layers:
            old = layer.self_attn.v_proj
            new = Scaled(old.in_features, old.out_features, bias=False)
            del new._parameters["weight"]
            new._parameters["weight"] = make(old.weight.detach(), scale)
            layer.self_attn.v_proj = new
        cached = house.open(model.eval())
        check(cached, 0)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.scale.mul_(2)
    check(cached, 0)
    check(cached, 64)


class Rewriting(nn.Linear):
    """Writes its weight in each pass, with the values that it had: as adapters of parameters do."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(self.weight.clone())
        return super().forward(values)


def test_a_weight_that_is_written_with_its_own_values_hits(house: House) -> None:
    model = llama(seed=7)
    old = model.model.layers[0].mlp.up_proj
    new = Rewriting(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())
    model.model.layers[0].mlp.up_proj = new
    cached = house.open(model.eval())
    check(cached, 0)
    check(cached, 64)


def test_an_activated_adapter_is_not_cached(house: House) -> None:
    """It changes the tokens from its last invocation in the prompt on."""
    model = adapted()
    model.peft_config = {"one": SimpleNamespace(alora_invocation_tokens=[5])}
    cached = house.open(model)
    check(cached, 0, "adapter one is an activated LoRA")
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    for layer in layers_of(model):
        layer.active_adapters = []
    check(cached, 0)
    check(cached, 64)


@pytest.mark.filterwarnings("ignore")
def test_weights_without_strides_are_named(house: House) -> None:
    model = llama(seed=7)
    place = model.model.layers[0].mlp
    place.register_buffer("pairs", torch.eye(3).to_sparse())
    place.register_buffer("rows", torch.eye(3).to_sparse_csr())
    place.register_buffer(
        "steps", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    )
    angles = torch.ones(3, dtype=torch.complex64)
    place.register_buffer("angles", angles.conj())
    cached = house.open(model)
    check(cached, 0)
    check(cached, 64)
    place.pairs = torch.eye(3).mul(2).to_sparse()
    check(cached, 0)


def test_a_reported_change_of_weights_with_a_name_is_accepted(
    house: House,
) -> None:
    """The caller names the weights, and says to the cache when they change."""
    model = llama(seed=7)
    cached = house.open(model, weights="run 7")
    weight = model.model.layers[0].mlp.up_proj.weight
    check(cached, 0)
    check(cached, 64)
    for step in range(2):
        weight.data.mul_(1.5)
        cached.cache.weights_changed(f"run 7, step {step}")
        check(cached, 0)
        check(cached, 64)
    weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="weights were changed"):
        cached.generate(IDS, max_new_tokens=NEW)
    cached.cache.weights_changed("run 7, step 2")
    check(cached, 0)
