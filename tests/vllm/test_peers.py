"""Two machines, each with an engine and a `pagoda serve`: the second loads what the first has
computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from testbed.servers import Server as PagodaServer
from testbed.servers import pagoda_server
from tests.cli.shelf import run_here
from tests.remote.proxy import WELL, Fault, Proxy, proxy_to
from tests.vllm import stores
from tests.vllm.conftest import Plain, Same, Tiers
from tests.vllm.engines import CHUNK, Engine, loadable
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import plain_prompt, words
from tests.vllm.test_server import Server, cached_tokens, counter

pytestmark = pytest.mark.slow

# of each connection: a chunk takes half a second
_SLOW = Fault(bytes_per_second=5e5)
_TOKENS = 8


class Second(NamedTuple):
    """The second machine, and its cable to the first."""

    engine: Server
    tiers: Tiers
    server: PagodaServer
    home: Path
    log: Path
    cable: Proxy

    def empty(self) -> None:
        """Remove all that the machine has stored, so that a hit can only be the neighbour's."""
        for root in self.tiers:
            if stores.stores(root):
                stores.clear(root)

    def hits(self, tier: str) -> float:
        """How many tokens the engine has loaded from a tier, by the label."""
        return counter(
            self.engine.get("/metrics"), "hit_tokens", f'tier="{tier}"'
        )

    def says(
        self, one: list[int], **more: object
    ) -> tuple[tuple[int, ...], int, list[float]]:
        """The tokens of an answer, how many of the prompt's were loaded, and the answer's
        log-probabilities.
        """
        said = self.engine.ask(one, _TOKENS, logprobs=1, **more)
        (choice,) = said["choices"]
        return (
            tuple(choice["token_ids"]),
            cached_tokens(said),
            choice["logprobs"]["token_logprobs"],
        )


@pytest.fixture(scope="module")
def first(tiers: Tiers) -> Iterator[PagodaServer]:
    """The first machine's `pagoda serve`, beside the engine `pagoda`."""
    with pagoda_server(
        tiers.host, PAGODA_DISK_PATH=str(tiers.disk), PAGODA_DISK_SIZE="192MiB"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def second(
    lora_options: dict[str, Any],
    logs: Path,
    session_shm: Path,
    tmp_path_factory: pytest.TempPathFactory,
    first: PagodaServer,
) -> Iterator[Second]:
    """The second machine. Its engine has no prefix cache on the device: all that hits comes through
    the connector.
    """
    home = tmp_path_factory.mktemp("second")
    tiers = Tiers(session_shm / "second", home / "disk")
    log = logs / "second.log"
    with proxy_to(first.port) as cable:
        url = (
            f"http://127.0.0.1:{cable.port}?password_file={first.root / 'token'}"
        )
        (home / "pagoda.toml").write_text(
            f'host_path = "{tiers.host}"\nchunk_tokens = {CHUNK}\npeers = ["{url}"]\n'
        )
        options = lora_options | {"enable_prefix_caching": False}
        engine = Server(log, options, tiers, {"HOME": str(home)}, peers=url)
        try:
            with pagoda_server(tiers.host) as server:
                yield Second(engine.wait_up(), tiers, server, home, log, cable)
        finally:
            engine.kill()


Loads = Callable[[list[int]], tuple[tuple[int, ...], list[float]]]


@pytest.fixture
def loads(second: Second, plain: Plain) -> Loads:
    """Ask the second engine until a prompt comes from its neighbour, and from nowhere else; return
    what it said.

    A look-up waits for a neighbour for a moment only, so on a busy machine the first try may
    compute the prompt.
    """

    def load(one: list[int]) -> tuple[tuple[int, ...], list[float]]:
        answers: list[tuple[tuple[int, ...], list[float]]] = []

        def all_of_it() -> bool:
            second.empty()
            before = second.hits("peers")
            tokens, loaded, logprobs = second.says(one)
            assert (tokens,) == plain.says(one)[0]
            answers.append((tokens, logprobs))
            return (
                loaded == loadable(len(one))
                and second.hits("peers") - before == loaded
            )

        stores.wait_until(all_of_it, "a prompt from the neighbour")
        return answers[-1]

    return load


def test_the_second_machine_loads_what_the_first_has_computed(
    pagoda: Engine,
    tiers: Tiers,
    first: PagodaServer,
    second: Second,
    loads: Loads,
    plain: Plain,
    stored: object,
) -> None:
    """The same text and log-probabilities; metrics, log and `pagoda explain` say where it came
    from.
    """
    one = plain_prompt(8000, 9 * CHUNK + 3)
    cold = pagoda.call(with_logprobs, one)
    stores.wait_ready(tiers.host, 9)
    tokens, logprobs = loads(one)
    assert tokens == cold[0]
    assert logprobs == pytest.approx(cold[1], abs=1e-4)

    # what the machine got it keeps, and says where it came from
    stores.wait_ready(second.tiers.host, 9)
    hits = second.hits("peers")
    _, loaded, _ = second.says(one)
    assert loaded == loadable(len(one))
    assert second.hits("peers") == hits
    metrics = second.engine.get("/metrics")
    assert counter(metrics, "hit_tokens_peers") == hits > 0
    assert (
        counter(metrics, "hit_tokens_host")
        == second.hits("host")
        > 0
        == second.hits("remote")
    )

    source = re.search(
        r'^vllm:prompt_tokens_cached_by_source_total{.*"p2p".*} (\S+)$',
        metrics,
        re.MULTILINE,
    )
    assert source is not None
    assert float(source[1]) == hits

    opened = [
        line
        for line in second.log.read_text().splitlines()
        if "PagodaKV opened" in line
    ]
    assert len(opened) == 1, opened
    places = re.findall(r"  where: host .*", second.log.read_text())
    assert (
        len(places) == 1
        and f"peers http://127.0.0.1:{second.cable.port}" in places[0]
    ), places

    other = [*one[:200], 300 + (one[200] + 1) % 700, *one[201:]]
    said = explained(second, "--text", words(other), "--url", second.engine.url)
    assert {
        answer["tier"]: answer["num_tokens"] for answer in said["answers"]
    } == dict.fromkeys(
        ("host", f"peers 127.0.0.1:{second.cable.port}", "all"), 192
    )
    assert said["nearest"][0]["token"] == 200
    assert said["nearest"][0]["stored_id"] == one[200]
    second.empty()
    said = explained(second, "--text", words(one), "--url", second.engine.url)
    assert [
        (answer["num_tokens"], answer["reason"]) for answer in said["answers"]
    ] == [(0, "cleared"), (9 * CHUNK, None), (9 * CHUNK, None)]


def test_these_tests_can_fail(
    tiers: Tiers,
    second: Second,
    loads: Loads,
    plain: Plain,
    stored: Callable[..., None],
) -> None:
    """Another tenant's prompt is not loaded, and were other bytes loaded than those computed, the
    text would differ.
    """
    one = plain_prompt(8010, 6 * CHUNK + 3)
    other = plain_prompt(8011, 6 * CHUNK + 3)
    stored(one, other)
    loads(other)  # the connections are there
    tokens, loaded, _ = second.says(one, cache_salt="a tenant's salt")
    assert ((tokens,), loaded) == (*plain.says(one), 0)
    zero(tiers.host)
    stores.wait_until(lambda: garbled(second, one, plain), "a text from zeros")


def garbled(second: Second, one: list[int], plain: Plain) -> bool:
    """Whether another text comes out of the bytes that the neighbour has now."""
    second.empty()
    tokens, loaded, _ = second.says(one)
    return loaded > 0 and (tokens,) != plain.says(one)[0]


def explained(second: Second, *prompt: str) -> dict[str, Any]:
    """What `pagoda explain` says with the second machine's configuration."""
    code, out, err = run_here(
        "explain", *prompt, "--json", "--config", str(second.home / "pagoda.toml")
    )
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def zero(root: Path) -> None:
    """Overwrite all chunks of a tier with zeros."""
    with stores.ledger_of(root) as ledger:
        slab = np.memmap(ledger.slab_path, np.uint8, "r+")
        slab[:] = 0


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_neighbour_ends_in_the_middle_of_a_load(
    first: PagodaServer,
    second: Second,
    loads: Loads,
    plain: Plain,
    stored: Callable[..., None],
    how: str,
) -> None:
    """Its server is killed, or stopped: the rest is computed, the text is right, and it hits again
    afterwards.
    """
    one, other = (
        plain_prompt(8100 + 10 * (how == "kill") + i, 16 * CHUNK + 9)
        for i in (0, 1)
    )
    stored(one, other)
    loads(other)  # the connections are there
    second.empty()
    failed = counter(second.engine.get("/metrics"), "failed_loads")
    second.cable.down = _SLOW
    before = second.cable.down_bytes
    with ThreadPoolExecutor(1) as threads:
        asked = [threads.submit(second.says, one)]

        def is_under_way() -> bool:
            if asked[-1].done():  # it was computed: see `loads`
                second.empty()
                asked.append(threads.submit(second.says, one))
            return second.cable.down_bytes > before + (1 << 19)

        stores.wait_until(is_under_way, "a load under way")
        getattr(first, how)()
        tokens, _, _ = asked[-1].result()
    assert (tokens,) == plain.says(one)[0]
    stores.wait_until(
        lambda: (
            counter(second.engine.get("/metrics"), "failed_loads") == failed + 1
        ),
        "a failed load",
    )
    second.cable.down = WELL
    second.empty()
    tokens, _, _ = second.says(other)  # while it is away
    assert (tokens,) == plain.says(other)[0]
    first.restart() if how == "kill" else first.cont()
    loads(one)


def test_the_head_of_a_prompt_is_loaded_while_the_neighbour_computes_its_tail(
    pagoda: Engine,
    tiers: Tiers,
    second: Second,
    loads: Loads,
    plain: Plain,
    same: Same,
    stored: object,
) -> None:
    """The first engine is held between two steps of a long prompt; then it goes on."""
    loads_of_others = plain_prompt(8200, 2 * CHUNK + 1)
    one = plain_prompt(8201, 1500)
    same(pagoda, loads_of_others)
    stores.wait_ready(tiers.host, 2)
    loads(loads_of_others)  # the connections are there
    pagoda.call(begin, one)
    stores.wait_until(
        lambda: stores.check(tiers.host)["reserved"] == 0, "the head is stored"
    )
    head = (stores.ready(tiers.host) - 2) * CHUNK
    assert 0 < head < loadable(len(one))

    def head_is_loaded() -> bool:
        second.empty()
        before = second.hits("peers")
        tokens, loaded, _ = second.says(one)
        assert (tokens,) == plain.says(one)[0]
        assert loaded <= head
        return loaded == head and second.hits("peers") - before == head

    stores.wait_until(head_is_loaded, "the head from the neighbour")
    assert (pagoda.call(finish),) == plain.says(one)[0]
    stores.wait_ready(tiers.host, 2 + len(one) // CHUNK)
    loads(one)


def with_logprobs(
    observed: ObservedEngine, one: list[int]
) -> tuple[tuple[int, ...], list[float]]:
    """What the engine says to a prompt, and the log-probability of each token."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, logprobs=1
    )
    (output,) = observed.llm.generate(
        [{"prompt_token_ids": one}], params, use_tqdm=False
    )
    (sample,) = output.outputs
    rows = zip(sample.logprobs, sample.token_ids, strict=True)
    return tuple(sample.token_ids), [row[token].logprob for row, token in rows]


def begin(observed: ObservedEngine, one: list[int]) -> None:
    """Compute the first steps of a prompt, until some of it is to be stored."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    observed.llm.llm_engine.add_request(
        "producer", {"prompt_token_ids": one}, params
    )
    before = observed.counts["saved_chunks"]
    while observed.counts["saved_chunks"] == before:
        assert not observed.llm.llm_engine.step()


def finish(observed: ObservedEngine) -> tuple[int, ...]:
    """Compute the rest, and return what the engine says."""
    while not (
        outputs := [
            output for output in observed.llm.llm_engine.step() if output.finished
        ]
    ):
        pass
    return tuple(outputs[0].outputs[0].token_ids)
