"""Every type of model that generates text and can be built tiny: the same text, with hits or with a
reason. Prints a line for each type.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch

from pagoda.base.metrics import Reason
from tests.e2e.house import House
from tests.e2e.stateful_models import TYPES, stateful
from tests.e2e.tiny_models import any_tiny_model, model_types
from tests.e2e.tiny_settings import call_of

TOKENS = 90
ROUNDING = 1e-4  # of the largest logit
# types whose `generate` hands out no logits
_LOGITS: dict[str, dict[str, object]] = {"diffusion_gemma": {}}
# type -> why no tiny model of it generates text here, and what it raises. Every other type must be
# built.
NOT_BUILT = {
    "gemma3n": (
        "its vision tower is of a package that is not required",
        "requires the timm library",
    ),
    "gemma4_assistant": (
        "it goes on from the hidden states of another model, and has no KV",
        "no tiny model that generates",
    ),
    "gemma4_unified_assistant": (
        "it goes on from the hidden states of another model, and has no KV",
        "no tiny model that generates",
    ),
    "inkling_mm_model": (
        "its vision tower is made with a package that is not required",
        "No module named 'scipy'",
    ),
    "pi0": ("it moves robots, and has no text", "attribute 'generation_config'"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(3, 490, (1, TOKENS), generator=generator)
    left = torch.cat([first[:, :85], first[:, :20]], 1)
    longer = torch.cat([first, first[:, :20]], 1)
    return [first, first, left, longer]


def written(
    kind: str, model, ids: torch.Tensor
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return all tokens of a greedy call (with an encoder, the text begins at the first of them),
    and the logits of each step, if the type hands them out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = model.generate(
            **call_of(kind, ids),
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            **_LOGITS.get(kind, {"output_logits": True}),
        )
    sequences = getattr(out, "sequences", out)
    return sequences.tolist(), list(getattr(out, "logits", None) or ())


def assert_same(
    ours: tuple[list[list[int]], list[torch.Tensor]],
    theirs: tuple[list[list[int]], list[torch.Tensor]],
) -> None:
    """A text alone shows little: many random models write the same after most prompts."""
    assert ours[0] == theirs[0]
    for logits, wanted in zip(ours[1], theirs[1], strict=True):
        difference = (logits - wanted).abs().max()
        assert difference <= ROUNDING * wanted.abs().max()


def built(kind: str):
    """Return a tiny model of this type that generates. Skips those that are known not to, if they
    still raise what is known.
    """
    try:
        model = stateful(kind) if kind in TYPES else any_tiny_model(kind)
    except ValueError as trouble:
        if kind not in NOT_BUILT:
            raise
        why, said = NOT_BUILT[kind]
        assert said in str(trouble), "it is not built for another reason"
        pytest.skip(f"{kind}: {why}")
    # MPT and Evolla have False: no call would be cached
    model.generation_config.use_cache = True
    return model


def test_few_types_are_not_built() -> None:
    assert set(NOT_BUILT) < set(model_types())
    assert len(NOT_BUILT) <= 5


@pytest.mark.soak
@pytest.mark.parametrize("kind", model_types())
def test_every_type_writes_the_same_text(
    kind: str, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built(kind)
    want = [written(kind, model, ids) for ids in prompts()]
    cached = house.open(model, host_size="32MiB", disk_size=0, disk_path="")
    hits = []
    for ids, text in zip(prompts(), want, strict=True):
        assert_same(written(kind, cached, ids), text)
        hits.append(cached.last.hit)
    counts = [hit.num_tokens for hit in hits]
    uncached = hits[1].reason is Reason.NOT_CACHEABLE
    with capsys.disabled():
        print(f"\n{kind}: {hits[1].detail if uncached else counts}")
    if uncached:
        assert counts == [0] * len(counts)
        assert hits[1].detail
    else:
        # after a chunk, or exactly where an ending was kept
        assert counts in ([0, 80, 80, 80], [0, 89, 80, 89])


@pytest.mark.soak
@pytest.mark.parametrize("kind", model_types())
def test_every_type_goes_on_behind_holes(
    kind: str, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each chunk that is missing in turn, and of two: the text and logits of a cold call. Types
    that cannot go on there use what is before the first hole.
    """
    ids = prompts()[0]
    model = built(kind)
    cold = written(kind, model, ids)
    cached = house.open(model, host_size="32MiB", disk_size=0, disk_path="")
    for _ in range(2):
        assert_same(written(kind, cached, ids), cold)
    hit = cached.last.hit
    only_text = set(call_of(kind, ids)) <= {"input_ids", "attention_mask"}
    if hit.reason is Reason.NOT_CACHEABLE or not only_text:
        # no chunk of such a prompt has these keys
        return
    keys = [key for _, _, key in cached.cache.keys(ids[0])]
    (host,) = cached.cache._tiers.all
    loaded = []
    for gone in ([0], [1], [3], [0, 2], [1, 3]):
        for at in gone:
            host.remove(keys[at])
        assert_same(written(kind, cached, ids), cold)
        loaded.append(cached.last.hit.loaded)
    with capsys.disabled():
        print(f"\n{kind}: {loaded}")
    if cached._stateful is not None:
        assert max(loaded) < hit.num_tokens
    else:
        assert loaded in ([64, 64, 64, 48, 48], [0, 16, 48, 0, 16])
