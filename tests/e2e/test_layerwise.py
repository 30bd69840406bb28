"""A model whose KV arrives layer by layer while it computes: the same text as without, in every
failure of the load.

The copy engine is the real one, its device is CPU memory with late streams. Memory that nobody
wrote to is NaN.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from pagoda.base.metrics import Reason
from pagoda.connectors.prefill_stopwatch import PrefillTimes, watch_for
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.layerwise import LayerLoads
from pagoda.connectors.transformers.model_checks import is_compiled, kv_argument
from testbed.patience import Patience
from tests.e2e.slow_device import LONG, SlowDevice, engine_over
from tests.e2e.tiny import deepseek, generated, llama, prompt
from tests.e2e.tiny_vision import image_tokens, llava, shown, with_images

CHUNK = 16
LAYERS = 3
NEW = 12
IDS = prompt(100)  # 96 of them are whole chunks
RUNS = 6 * 2 * 2  # copies a layer of llama: chunks, planes, heads


class House:
    """Models on one store, as if they were on a device."""

    def __init__(self, host: Path, disk: Path) -> None:
        self.host = host
        self.disk = disk
        self._opened: list[tuple[CachedModel, SlowDevice]] = []

    def open(self, model, **options) -> tuple[CachedModel, SlowDevice]:
        settings = {
            "chunk_tokens": CHUNK,
            "host_size": "4MiB",
            "host_path": str(self.host / "host"),
            "deadline_seconds": LONG,
            "worth_it": False,
        }
        device = SlowDevice()
        cached = CachedModel(model, **{**settings, **options})
        cached._seen = cached._seen._replace(copy_engine=engine_over(device))
        self._opened.append((cached, device))
        return cached, device

    def shut(self) -> None:
        for cached, device in self._opened:
            cached.close()
            device.end()
        self._opened.clear()


@pytest.fixture
def house(shm_root: Path, tmp_path: Path):
    house = House(shm_root, tmp_path)
    yield house
    house.shut()


@pytest.fixture(autouse=True)
def poisoned():
    """What is read before it was written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def text(cached: CachedModel, ids=IDS, **kwargs) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return cached.generate(ids, **options)[:, ids.shape[1] :].tolist()


@pytest.fixture
def warm(house: House):
    """A llama whose prompt is on the host, its device, and its text."""
    model = llama()
    cached, device = house.open(model)
    want = generated(model, IDS, NEW)
    assert text(cached) == want
    assert cached.last.columns == 0
    device.waited = device.copied = 0
    return cached, device, want


def test_assisted_decoding_loads_the_whole_hit_first(house: House) -> None:
    """The length of its first pass decides what is computed: it is known before."""
    model = llama()
    cached, device = house.open(model)
    lookup = {"prompt_lookup_num_tokens": 4}
    ids = IDS[:, :25].repeat(1, 4)
    want = generated(model, ids, NEW, **lookup)
    for columns in (0, 96):
        assert text(cached, ids, **lookup) == want
        assert cached.last.columns == columns
    assert device.waited == 0
    assert device.copied > 0


def test_a_prompt_with_an_image_on_a_device(house: House) -> None:
    ids = with_images(IDS, [20], image_tokens("llava"))
    want = generated(llava(), ids, NEW, **shown("llava", ids, [1]))
    other = generated(llava(), ids, NEW, **shown("llava", ids, [2]))
    cached, device = house.open(llava())
    for columns in (0, 112):
        assert text(cached, ids, **shown("llava", ids, [1])) == want
        assert cached.last.columns == columns
    assert text(cached, ids, **shown("llava", ids, [2])) == other
    assert cached.last.columns == 16
    assert device.copied > 0


@pytest.mark.parametrize("build", [llama, deepseek])
def test_layerwise_loads_give_the_same_text(
    build: Callable, house: House
) -> None:
    model = build()
    cached, device = house.open(model)
    want = generated(model, IDS, NEW)
    assert text(cached) == want
    assert device.waited == 0
    device.before = lambda number: time.sleep(0.0005)
    assert text(cached) == want
    assert device.waited == LAYERS
    assert cached.last.columns == 96
    assert cached.last.num_tokens == [96]
    assert cached.last.hit.by_tier == {"host": 96}
    assert cached.last_stored[0].present == 6  # its layers are plain again
    assert cached.last.hit.reason is None
    assert len(cached.last.hit.mask) == 99
    counters = cached.cache.stats()["counters"]
    assert counters["lookups"] == 2
    assert counters["asked_tokens"] == 2 * 99
    assert counters["hit_tokens"] == 96


def test_a_layer_is_computed_before_the_next_one_has_come(
    warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, device, want = warm
    # however many chunks there are
    monkeypatch.setattr("pagoda.cache.serve_loop._COPY_BYTES", 1)
    computed = threading.Event()
    late = []
    hook = cached.model.model.layers[0].register_forward_hook(
        lambda *_: computed.set()
    )

    def before(number: int) -> None:
        if number > RUNS and not late and not computed.wait(LONG / 4):
            late.append(number)

    device.before = before
    assert text(cached) == want
    hook.remove()
    assert not late
    assert cached.last.columns == 96


def test_nothing_leaves_the_first_pass_before_the_load_is_validated(warm) -> None:
    """All copies are done, but the slots became another's meanwhile: what was computed from them
    must not be used.
    """
    cached, device, want = warm
    slots = cached.cache.slots

    def before(number: int) -> None:
        if number == 5:
            cached.cache.clear()
            for slot in range(slots.count):
                slots.view(slot)[:] = 0

    device.before = before
    assert text(cached) == want
    assert device.waited == LAYERS
    assert cached.last.columns == 0
    assert cached.last_stored[0].num_chunks == 6
    assert text(cached) == want
    assert cached.last.columns == 96


class Robber(LayerLoads):
    """Does something between the promise and the load."""

    def __init__(self, rob: Callable[[], object]) -> None:
        super().__init__()
        self._rob = rob

    def begin(self, *args):
        self._rob()
        return super().begin(*args)


def test_chunks_that_go_before_the_load_begins(warm) -> None:
    cached, device, want = warm
    cached._loads = Robber(cached.cache.clear)
    assert text(cached) == want
    assert cached.last.columns == device.waited == 0
    assert cached.last.hit.reason is Reason.CLEARED


def test_a_tail_that_goes_before_the_load_begins(warm) -> None:
    cached, device, want = warm

    def rob() -> None:
        cached.cache.clear()
        cached._loads = None
        text(cached, IDS[:, :40])

    cached._loads = Robber(rob)
    assert text(cached) == want
    assert cached.last.columns == 32  # what was left was loaded the plain way
    assert text(cached) == want
    assert cached.last.columns == 96
    assert device.waited == LAYERS


@pytest.mark.parametrize("last", [5, 1000])
def test_a_load_that_fails(last: int, warm) -> None:
    cached, device, want = warm

    def before(number: int) -> None:
        if 5 <= number <= last:
            raise RuntimeError("the link is down")

    device.before = before
    assert text(cached) == want
    assert cached.last.columns == (96 if last == 5 else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["before its first copy", "before its last copy"]
)
def test_a_load_that_hangs(where: str, warm, house: House) -> None:
    want = warm[2]
    cached, device = house.open(llama(), deadline_seconds=0.5)
    released = threading.Event()
    if where == "before its first copy":
        device.begun = lambda: released.wait(LONG) and None
    else:
        # a GPU's would wait, and the thread that launches would not
        device.streams_wait = False
        device.before = lambda number: (
            released.wait(LONG) and None if number == LAYERS * RUNS else None
        )
    patience = Patience(LONG / 2)
    try:
        assert text(cached, store=False) == want
        assert not patience.ended, patience.said()
        assert cached.last.hit.reason is Reason.DEADLINE
        assert cached.last.columns == 0
    finally:
        released.set()
    device.streams_wait = True
    device.begun = lambda: None
    device.before = lambda number: None
    assert text(cached) == want
    assert cached.last.columns == 96


def test_close_during_a_load(warm) -> None:
    cached, device, want = warm
    closing: list[threading.Thread] = []

    def before(number: int) -> None:
        if number == 5:
            closing.append(threading.Thread(target=cached.close))
            closing[0].start()
        time.sleep(0.001)

    device.before = before
    assert text(cached) == want
    closing[0].join(LONG)
    assert not closing[0].is_alive()
    assert (
        not [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("pagoda-load")
        ]
        or settled()
    )
    assert text(cached) == want
    assert cached.last.hit.reason is Reason.CLOSED


def settled() -> bool:
    """Whether the threads of loads end by themselves."""
    patience = Patience(LONG)
    while any(
        thread.name.startswith("pagoda-load") for thread in threading.enumerate()
    ):
        if patience.ended:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.slow
def test_many_threads_generate(house: House) -> None:
    model = llama()
    cached, device = house.open(model)
    prompts = [prompt(70 + 7 * seed, seed) for seed in range(3)]
    want = [generated(model, ids, NEW) for ids in prompts]
    for ids in prompts:
        text(cached, ids)
    device.before = lambda number: time.sleep(0.0003)
    # more than there are threads to load: some go the plain way
    with ThreadPoolExecutor(6) as pool:
        made = list(
            pool.map(lambda number: text(cached, prompts[number % 3]), range(12))
        )
    assert made == want * 4
    assert device.waited >= LAYERS


@pytest.mark.parametrize("fails", [False, True])
def test_a_seed_gives_the_same_sample(fails: bool, warm) -> None:
    cached, device, _ = warm
    options = {
        "max_new_tokens": NEW,
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 0,
    }
    torch.manual_seed(7)
    want = cached.model.generate(IDS, **options)
    torch.manual_seed(8)
    assert not torch.equal(cached.model.generate(IDS, **options), want)

    def before(number: int) -> None:
        if fails and number == LAYERS * RUNS:
            raise RuntimeError("at the very end")

    device.before = before
    torch.manual_seed(7)
    assert torch.equal(cached.generate(IDS, **options), want)
    assert device.waited >= LAYERS - 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_streamer_gets_everything_once(fails: bool, warm) -> None:
    cached, device, want = warm
    received: list[object] = []

    class Streamer:
        def put(self, value) -> None:
            received.extend(value.flatten().tolist())

        def end(self) -> None:
            received.append("end")

    def before(number: int) -> None:
        if fails and number == RUNS + 1:
            raise RuntimeError("in the second layer")

    device.before = before
    assert text(cached, streamer=Streamer()) == want
    assert received == [*IDS[0].tolist(), *want[0], "end"]


def test_layers_of_a_cache_need_not_have_a_dtype(warm, monkeypatch) -> None:
    """Those of Transformers 5.24 have none."""
    cached, device, want = warm
    make = DynamicLayer.lazy_initialization

    def lazy_initialization(layer: DynamicLayer, *planes: torch.Tensor) -> None:
        make(layer, *planes)
        layer.__dict__.pop("dtype", None)

    monkeypatch.setattr(DynamicLayer, "lazy_initialization", lazy_initialization)
    assert text(cached) == want
    assert device.waited
    assert cached.last.columns == 96


def test_whoever_touches_a_layer_waits_for_it(warm) -> None:
    cached, device, want = warm
    device.before = lambda number: time.sleep(0.0005)
    seen: list[torch.Tensor] = []

    def look(module, args, kwargs) -> None:
        if not seen:
            layer = kwargs.get("past_key_values", kwargs.get("cache")).layers[-1]
            assert layer.get_seq_length() == 96
            seen.extend((layer.keys, layer.values))

    hook = cached.model.model.layers[0].register_forward_pre_hook(
        look, with_kwargs=True
    )
    assert text(cached) == want
    hook.remove()
    for plane in seen:
        assert not plane.isnan().any()
    assert cached.last.columns == 96


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_keeps_the_memory_of_a_prompt(fails: bool, warm) -> None:
    cached, device, want = warm

    def before(number: int) -> None:
        if fails and number == LAYERS * RUNS:
            raise RuntimeError("at the very end")

    device.before = before
    gc.collect()
    gc.disable()
    try:
        assert text(cached) == want
        assert not [
            thing
            for thing in gc.get_objects()
            if type(thing).__name__ in ("ArrivingLayer", "LayerLoad")
        ]
    finally:
        gc.enable()


@pytest.mark.slow
def test_what_goes_the_plain_way(warm) -> None:
    """Batches, beams, samples of one prompt, padding: complete before anything is computed."""
    cached, device, want = warm
    model = cached.model
    other = torch.cat([IDS[:, :40], prompt(60, seed=4)], 1)
    batch = torch.cat([IDS, other])
    assert text(cached, batch) == [*want, *generated(model, other, NEW)]
    assert cached.last.columns == 32
    assert text(cached, batch) == [*want, *generated(model, other, NEW)]
    assert cached.last.columns == 96
    beams = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 2,
    }
    assert torch.equal(
        cached.generate(IDS, **beams), model.generate(IDS, **beams)
    )
    assert cached.last.columns == 96
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), IDS], 1)
    mask = (padded != 0).long()
    assert text(cached, padded, attention_mask=mask) == want
    assert cached.last.columns == 105
    short = torch.cat(
        [
            padded,
            torch.cat([torch.zeros(1, 104, dtype=torch.long), IDS[:, :5]], 1),
        ]
    )
    assert text(cached, short, attention_mask=(short != 0).long()) == [
        *want,
        *generated(model, IDS[:, :5], NEW),
    ]
    with cached.prefix(IDS) as prefix:
        assert prefix.columns == 96
        assert (
            generated(
                model, IDS, NEW, **kv_argument(model, prefix.past_key_values)
            )
            == want
        )
    assert device.waited == 0
    assert text(cached, IDS[:, :3]) == generated(model, IDS[:, :3], NEW)
    assert cached.last.hit.reason is Reason.SHORT_PROMPT


# of torch, about its own compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_go_the_plain_way(warm) -> None:
    """What is compiled need not run what is done between its layers."""
    cached, device, want = warm
    body = cached.model.model
    norm = body.norm
    forward = body.norm.forward

    def as_it_was() -> None:
        body.norm = norm
        norm._compiled_call_impl = None
        vars(norm).pop("forward", None)

    for compiled in (
        lambda: norm.compile(backend="eager"),
        lambda: setattr(norm, "forward", torch.compile(forward, backend="eager")),
        lambda: setattr(body, "norm", torch.compile(norm, backend="eager")),
    ):
        assert not is_compiled(cached.model)
        compiled()
        assert is_compiled(cached.model)
        with torch.compiler.set_stance("force_eager"):
            assert text(cached) == want
        assert cached.last.columns == 96
        assert device.waited == 0
        as_it_was()
    assert text(cached) == want
    assert device.waited == LAYERS


def test_what_comes_from_the_disk_goes_the_plain_way(house: House) -> None:
    model = llama()
    disk = {"disk_size": "16MiB", "disk_path": str(house.disk / "disk")}
    cached, _ = house.open(model, **disk)
    want = text(cached)
    assert cached.cache.flush(LONG)
    house.shut()
    cached, device = house.open(
        model, **disk, host_path=str(house.host / "another")
    )
    for tier, waited in (("disk", 0), ("host", LAYERS)):
        assert text(cached) == want
        assert cached.last.hit.by_tier == {tier: 96}
        assert device.waited == waited


def test_a_prompt_in_pieces(warm) -> None:
    cached, device, _ = warm
    for ids in (IDS, torch.cat([IDS, prompt(60, seed=9)], 1)):
        made = cached.generate(
            ids,
            max_new_tokens=NEW,
            do_sample=False,
            prefill_chunk_size=20,
            return_dict_in_generate=True,
        )
        assert made.sequences[:, ids.shape[1] :].tolist() == generated(
            cached.model, ids, NEW
        )
        assert {
            type(layer).__name__ for layer in made.past_key_values.layers
        } == {"DynamicLayer"}
        assert cached.last.columns == 96
    assert device.waited == 2 * LAYERS


def test_a_call_that_breaks_off_leaves_a_load_that_ends(warm) -> None:
    cached, device, want = warm
    device.before = lambda number: time.sleep(0.002)

    def broken(*_) -> None:
        raise KeyError("of somebody else")

    hook = cached.model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyError, match="of somebody else"):
        text(cached)
    hook.remove()
    device.before = lambda number: None
    assert text(cached) == want
    assert cached.last.columns == 96


def test_output_is_stored_from_the_device(warm) -> None:
    cached, _, want = warm
    assert text(cached, store_output=True) == want
    longer = torch.cat([IDS, torch.tensor(want), prompt(20, seed=5)], 1)
    assert text(cached, longer) == generated(cached.model, longer, NEW)
    assert cached.last.columns == (100 + NEW - 1) // CHUNK * CHUNK


@pytest.mark.slow
def test_a_model_that_was_converted_is_looked_at_again(house: House) -> None:
    model = llama()
    cached, _ = house.open(model)
    named, _ = house.open(
        model, weights="checkpoint 7", host_path=str(house.host / "named")
    )
    text(cached)
    model.bfloat16()
    want = generated(model, IDS, NEW)
    for columns in (0, 96):
        assert text(cached) == want
        assert cached.last.columns == columns
    assert cached.layout.planes[0].dtype == "bfloat16"
    with pytest.raises(
        ValueError, match="moved or converted: create a new CachedModel"
    ):
        text(named)


class Late:
    """A stopwatch whose device has not reached the end yet."""

    def __init__(self) -> None:
        self.stopped = self.there = False

    def stop(self) -> None:
        self.stopped = True

    def seconds(self) -> float | None:
        return 0.25 if self.stopped and self.there else None


def test_a_pass_is_measured_when_its_time_is_known() -> None:
    model = llama()
    made = list[Late]()
    seen = list[tuple[int, float]]()

    def watch() -> Late:
        made.append(Late())
        return made[-1]

    prefills = PrefillTimes(
        lambda tokens, seconds: seen.append((tokens, seconds))
    )
    with prefills.measured(model, watch):
        generated(model, IDS, 3)
    prefills.read()
    # only the first pass, and there was no wait
    assert len(made) == 1
    assert seen == []
    made[0].there = True
    prefills.read()
    prefills.read()
    assert seen == [(100, 0.25)]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    for _ in range(40):
        with prefills.measured(model, watch):
            model(input_ids=IDS[:, :2])
    for late in made:
        late.there = True
    prefills.read()
    assert 2 <= len(seen) < 40  # results that are never read do not accumulate


def test_what_is_measured_how() -> None:
    cpu, one, two, mps = (
        torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "mps")
    )
    assert watch_for([cpu, cpu]) is not None
    assert watch_for([one, one]) is not None
    for devices in ([one, two], [cpu, one], [mps]):
        assert watch_for(devices) is None
    with PrefillTimes(lambda *_: pytest.fail("nothing to be reported")).measured(
        llama(), None
    ):
        pass
