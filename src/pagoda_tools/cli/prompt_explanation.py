"""How much of a prompt each tier would serve, and why not more. Reads ledgers, asks remote tiers;
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from pagoda.base.metrics import Reason
from pagoda.base.urls import RemoteUrl
from pagoda.cache.lookup_call import match_tiers
from pagoda.cache.open_tiers import peers_client
from pagoda.cache.prompt_log import LoggedPrompt, logged_prompts
from pagoda.config import Config, RemoteSpec
from pagoda.connectors.endings import SEARCHED_CHUNKS, first_part_key
from pagoda.keys import Int32s, Namespace, TokenIds, as_token_ids
from pagoda.ledger import Ledger, NamespaceRow, admin
from pagoda.slab import FileSlab, MemorySlab
from pagoda.slab.file import aligned
from pagoda.tiers.remote.store_client import StoreClient
from pagoda_tools.cli import printing
from pagoda_tools.cli.nearest_prompt import (
    NearestPrompt,
    keys_of_prompt,
    nearest_prompt,
)
from pagoda_tools.cli.remote_stores import PATIENCE_SECONDS, Unanswered, leading
from pagoda_tools.cli.stores import label

_TIMED_CHUNKS = 4
_Place: TypeAlias = Ledger | RemoteSpec


class TierAnswer(NamedTuple):
    """How many leading tokens one tier (or "all") serves under one namespace, and why it does not
    serve more.
    """

    namespace: bytes
    model: str
    tier: str
    num_tokens: int
    reason: Reason | None  # None: all whole chunks are served
    detail: str
    chunk: int | None = None  # the first chunk that is not served
    # fields of the namespace under which that chunk is stored, if it is another one
    other_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptExplanation:
    """How much the tiers would serve of a prompt under one namespace, and the nearest stored
    prompt.
    """

    namespace: bytes
    chunk_tokens: int
    # one per tier; if there are several, then one for all together
    answers: Sequence[TierAnswer]
    nearest: NearestPrompt | None
    # the longest ending of the prompt in the tiers of this machine; 0: none, None: its engine has
    # none
    ending: int | None = None

    def nearest_row(self) -> dict[str, object]:
        """Return the nearest prompt as a row for programs, with the namespace of the comparison."""
        assert self.nearest is not None
        return {
            **asdict(self.nearest),
            "namespace": self.namespace,
            "of_namespace": self.nearest.namespace,
        }


@dataclass(frozen=True)
class Prompt:
    """A prompt and its keys under every known namespace. Made by `prompt_of`."""

    tokens: Int32s
    tiers: Sequence[Ledger]
    remotes: Sequence[RemoteSpec]  # the tiers below them, from the top down
    known: Mapping[bytes, NamespaceRow]
    chunk_tokens: Mapping[bytes, int]
    keys: Mapping[bytes, list[bytes]]
    min_hit_tokens: int
    # None: whether loading is faster is not checked
    prefill_tokens_per_second: float | None
    # prompts that were stored lately, with their tokens
    logged: Sequence[LoggedPrompt]

    @property
    def num_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.tokens)


@dataclass(frozen=True)
class _NamedNeighbours(RemoteSpec):
    """The neighbours that the directory in `config` names for a prompt, as one store."""

    config: Config = field(default_factory=Config)

    def engine(self) -> StoreClient:
        """Return the client of all of them."""
        return peers_client(self.config, look_seconds=PATIENCE_SECONDS)


def neighbours_of(directory: Path | None, config: Config) -> Sequence[RemoteSpec]:
    """Return the configured neighbours, with their addresses in their names; none for a command
    about one directory.

    A directory of neighbours counts as one store: it names the neighbours to ask.
    """
    if directory is None and config.lookup:
        return [
            _NamedNeighbours(
                one.url, one.redacted, one.kind, "peers", config=config
            )
            for one in config.lookup_server()
        ]
    found = config.peer_servers() if directory is None else ()
    return [
        replace(spec, name=f"peers {RemoteUrl.of(spec.url).hosts[0]}")
        for spec in found
    ]


def prompt_of(
    tokens: TokenIds,
    tiers: Sequence[Ledger],
    remotes: Sequence[RemoteSpec],
    config: Config,
    chunk_tokens: int | None = None,
    prefill: float | None = None,
) -> Prompt:
    """Hash the prompt under every namespace. `chunk_tokens`: tokens per chunk, by default as in the
    stored chunks.
    """
    ids = as_token_ids(tokens)
    known: dict[bytes, NamespaceRow] = {}
    for ledger in tiers:
        known.update(admin.list_namespaces(ledger))
    found = {} if chunk_tokens else _stored_sizes(tiers)
    # a namespace without chunks gets the chunk size of another one
    usual = chunk_tokens or next(iter(found.values()), config.chunk_tokens)
    logged = [one for ledger in tiers for one in _logged(ledger)]
    if not chunk_tokens:
        found |= {one.namespace: one.chunk_tokens for one in logged}
    sizes = {root: found.get(root, usual) for root in known}
    keys = {
        root: keys_of_prompt(
            ids,
            root,
            size,
            logged,
            lambda key: any(_has_known(one, key) for one in tiers),
        )
        for root, size in sizes.items()
    }
    worth = prefill if config.worth_it else None
    return Prompt(
        ids,
        tiers,
        remotes,
        known,
        sizes,
        keys,
        config.min_hit_tokens,
        worth,
        logged,
    )


def explanations(
    prompt: Prompt, roots: Iterable[bytes]
) -> list[PromptExplanation]:
    """Explain a prompt under each of these namespaces, the best first. Changes nothing."""
    found = []
    for root in roots:
        said = answers(prompt, root)
        near = nearest(prompt, root, said[-1])
        size = prompt.chunk_tokens[root]
        ending = longest_ending(prompt, root, said[-1].num_tokens // size)
        found.append(PromptExplanation(root, size, said, near, ending))
    return sorted(found, key=lambda one: -one.answers[-1].num_tokens)


def longest_ending(prompt: Prompt, root: bytes, chunks: int) -> int | None:
    """Return the number of tokens of the longest ending that a new process of llama.cpp's connector
    would find after so many chunks; 0: none, None: the namespace is another engine's.
    """
    numerics = str(prompt.known[root].fields.get("numerics", ""))
    if not numerics.startswith("llama.cpp "):
        return None
    size = prompt.chunk_tokens[root]
    parents = [root, *prompt.keys[root][:chunks]]
    for whole in range(chunks, max(chunks - SEARCHED_CHUNKS, -1), -1):
        begin = whole * size
        for tail in range(min(size - 1, prompt.num_tokens - begin), -1, -1):
            if begin + tail == 0:
                continue
            ids = prompt.tokens[begin : begin + tail]
            key = first_part_key(ids, parents[whole])
            for ledger in prompt.tiers:
                match = ledger.match_prefix([key], start=None, touch=False)
                if len(match.slots):
                    return begin + tail
    return 0


def answers(prompt: Prompt, root: bytes) -> list[TierAnswer]:
    """Return the answer of each tier for one namespace; with several tiers also that of all
    together, as "all".

    A hit below the minimum counts as none; only the answer for all tiers together can say this.
    """
    ledgers = [
        ledger for ledger in prompt.tiers if root in admin.list_namespaces(ledger)
    ]
    here: list[_Place] = [*ledgers, *prompt.remotes]
    if len(here) == 1:
        return [
            _served(prompt, root, _name(here[0]), here, prompt.min_hit_tokens)
        ]
    alone = [_served(prompt, root, _name(place), [place]) for place in here]
    return [*alone, _served(prompt, root, "all", here, prompt.min_hit_tokens)]


def nearest(
    prompt: Prompt, root: bytes, together: TierAnswer
) -> NearestPrompt | None:
    """Return the stored prompt that is nearest to this one, for one namespace; None if the log has
    none.

    If the tiers `together` serve all of this prompt, return the nearest other one. Otherwise a
    prompt that shares less than the served part explains nothing: the prompt that shares more is
    not in the log.
    """
    served = together.chunk is None

    def tiers_with(key: bytes) -> tuple[str, ...]:
        there = [
            _name(one)
            for one in prompt.tiers
            if len(one.match_prefix([key], start=None, touch=False).slots)
        ]
        return tuple(dict.fromkeys(there))

    def other_fields(other: bytes) -> tuple[str, ...]:
        rows = prompt.known.get(root), prompt.known.get(other)
        if not all(rows):
            return ()
        return tuple(Namespace.differing(*(row.fields for row in rows if row)))

    found = nearest_prompt(
        prompt.tokens,
        root,
        prompt.logged,
        tiers_with,
        other_fields,
        besides=served,
    )
    explains = served or found is None or found.same_tokens >= together.num_tokens
    return found if explains else None


def _logged(ledger: Ledger) -> Sequence[LoggedPrompt]:
    try:
        return list(logged_prompts(ledger.directory))
    except OSError:  # the log is helpful, not necessary
        return ()


def _has_known(ledger: Ledger, key: bytes) -> bool:
    """Whether a tier has a chunk, or remembers what happened to it."""
    here = len(ledger.match_prefix([key], start=None, touch=False).slots) > 0
    return here or ledger.explain_miss(key).reason is not Reason.ABSENT


def _name(place: _Place) -> str:
    return place.name if isinstance(place, RemoteSpec) else place.tier


def _stored_sizes(tiers: Sequence[Ledger]) -> dict[bytes, int]:
    """Return the tokens per chunk of each namespace with chunks, from its first chunk."""
    found: dict[bytes, int] = {}
    for ledger in tiers:
        awaited = {
            root
            for root, row in admin.list_namespaces(ledger).items()
            if row.chunks
        } - found.keys()
        for row in admin.list_chunks(ledger) if awaited else ():
            if row.namespace_root in awaited and row.tokens:
                found[row.namespace_root] = row.tokens
                awaited.discard(row.namespace_root)
            if not awaited:
                break
    return found


class _Why(NamedTuple):
    """Why a tier does not serve the next chunk."""

    reason: Reason | None
    detail: str
    other_fields: tuple[str, ...] = ()


def _served(
    prompt: Prompt,
    root: bytes,
    name: str,
    places: Sequence[_Place],
    minimum: int = 0,
) -> TierAnswer:
    """Return the answer of these tiers together, from the top down, under a name."""
    size = prompt.chunk_tokens[root]
    keys = prompt.keys[root]
    answer = partial(TierAnswer, root, label(prompt.known[root].fields), name)
    if not keys:
        return answer(
            0,
            Reason.SHORT_PROMPT,
            f"{prompt.num_tokens} tokens do not fill a chunk of {size}",
        )
    said: dict[str, _Why] = {}  # by place: why it lacks its first missing chunk

    def find(number: str, place: _Place, at: int) -> tuple[int, Reason | None]:
        asked = _from_remote if isinstance(place, RemoteSpec) else _from_ledger
        run, said[number] = asked(prompt, root, place, at)  # type: ignore[arg-type]
        return run, None

    # named by number, because several stores may belong to one tier
    finders = {
        str(at): partial(find, str(at), place) for at, place in enumerate(places)
    }
    chunks = match_tiers(finders, len(keys)).chunks
    total = size * chunks
    if 0 < total < minimum:
        return answer(
            0,
            Reason.BELOW_MINIMUM,
            f"{total} tokens are there, min_hit_tokens = {minimum}",
            0,
        )
    if chunks == len(keys):
        return answer(total, None, "all whole chunks are stored")
    # A silent tier may have the chunk. Otherwise a tier that remembers the chunk has the best
    # explanation.
    why = min(
        said.values(),
        key=lambda why: (
            why.reason is Reason.ABSENT,
            why.reason is not Reason.IO_ERROR,
        ),
    )
    return answer(total, why.reason, why.detail, chunks, why.other_fields)


def _from_remote(
    prompt: Prompt, root: bytes, spec: RemoteSpec, start: int
) -> tuple[int, _Why]:
    """Return how many chunks a remote tier has from `start` on, and why not more."""
    try:
        run = leading(spec, root, prompt.keys[root][start:])
    except Unanswered as trouble:
        return 0, _Why(Reason.IO_ERROR, trouble.text)
    return run, _Why(Reason.ABSENT, f"chunk {start + run}: absent")


def _from_ledger(
    prompt: Prompt, root: bytes, ledger: Ledger, start: int
) -> tuple[int, _Why]:
    """Return how many chunks a local tier has from `start` on, and why not more."""
    keys = prompt.keys[root]
    match = ledger.match_prefix(keys[start:], start=start, touch=False)
    run = len(match.slots)
    dear = _dear(
        prompt,
        ledger,
        match.slots[:_TIMED_CHUNKS].tolist(),
        prompt.chunk_tokens[root],
    )
    if dear:
        return 0, _Why(Reason.NOT_WORTH_IT, dear)
    if start + run == len(keys):
        return run, _Why(Reason.ABSENT, "")
    return run, _why(prompt, root, ledger, start + run, match.reason)


def _why(
    prompt: Prompt, root: bytes, ledger: Ledger, index: int, now: Reason | None
) -> _Why:
    """Return why chunk `index` is missing, and in words since when, or which field differs."""
    reason, age_seconds = ledger.explain_miss(prompt.keys[root][index])
    # a present problem explains more than the past
    if now is not None and now is not reason:
        reason = now
        age_seconds = None
    if reason is Reason.ABSENT:
        for other, keys in prompt.keys.items():
            if (
                other != root
                and len(ledger.match_prefix(keys[: index + 1], touch=False).slots)
                > index
            ):
                return _difference(prompt.known[root], prompt.known[other])
    since = f" {printing.age(age_seconds)} ago" if age_seconds is not None else ""
    return _Why(reason, f"chunk {index}: {reason.value.replace('_', ' ')}{since}")


def _difference(mine: NamespaceRow, other: NamespaceRow) -> _Why:
    """Return in which fields the namespace with the chunk differs, and how; the value of a salt is
    not shown.
    """
    names = tuple(Namespace.differing(mine.fields, other.fields))
    pairs = [
        "salt not shown"
        if name == "salt"
        else f"{name} {other.fields.get(name, '')!r}, not {mine.fields.get(name, '')!r}"
        for name in names
    ]
    return _Why(
        Reason.OTHER_NAMESPACE, f"stored with {' and '.join(pairs)}", names
    )


def _dear(prompt: Prompt, ledger: Ledger, slots: Sequence[int], size: int) -> str:
    """Return how long loading and computing one of these slots take, if loading takes longer;
    otherwise "".
    """
    if prompt.prefill_tokens_per_second is None or not slots:
        return ""
    load = _load_seconds(ledger, slots)
    compute = size / prompt.prefill_tokens_per_second
    if load <= compute:
        return ""
    return f"loading a chunk takes {load * 1e3:.3g} ms, computing it {compute * 1e3:.3g} ms"


def _load_seconds(ledger: Ledger, slots: Sequence[int]) -> float:
    """Return the shortest time of copying one of these slots into private memory."""
    room = aligned(ledger.slot_bytes)
    size = (ledger.slots, ledger.slot_bytes)
    if ledger.kind == "file":
        with closing(
            ledger.open_slab(lambda file: FileSlab(file, *size))
        ) as disk:
            return _least_seconds(lambda slot: disk.read(slot, [room]), slots)
    with closing(
        ledger.open_slab(lambda file: MemorySlab(file, *size, ledger.page_guards))
    ) as memory:
        # twice, because the first time has page faults
        return _least_seconds(
            lambda slot: np.copyto(room, memory.view(slot)), [*slots, *slots]
        )


def _least_seconds(load: Callable[[int], object], slots: Sequence[int]) -> float:
    times = []
    for slot in slots:
        began = time.perf_counter()
        load(slot)
        times.append(time.perf_counter() - began)
    return min(times)
