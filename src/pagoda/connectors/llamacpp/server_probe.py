"""Finds out, at the start, what a server computes and whether its states can be used.

Nobody lists all that changes the KV of a server: control vectors, overrides of the model's values,
the rope in use. So the server computes the KV of a fixed prompt, twice, and its digest is part of
the namespace. Then a state is composed, restored and asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pagoda.base.errors import ConfigError, StoreError
from pagoda.base.file_space import opened
from pagoda.connectors.identity.gguf_header import (
    namespace_model,
    read_gguf_header,
    shards_of,
)
from pagoda.connectors.identity.weight_digests import file_digest, files_digest
from pagoda.connectors.llamacpp.server_requests import (
    ServerRequests,
    ServerTrouble,
    number,
)
from pagoda.connectors.llamacpp.state_directory import StateDirectory
from pagoda.connectors.llamacpp.state_file import (
    StateFile,
    StateShape,
    UnknownState,
    read_unknown_state,
)
from pagoda.connectors.llamacpp.state_rows import (
    EndingShape,
    PlaneRows,
    StateWriter,
    read_ending,
)
from pagoda.keys import Namespace
from pagoda.transfer.base import Bytes

Tokens = npt.NDArray[np.int32]

PROBE_TOKENS = 64
# of the test for --cache-reuse, whose usual number is 256
_MOVED_TOKENS = 256
_LEFT_OUT_TOKENS = 8
# on a slow machine a large model computes a few tokens a second
PROBE_SECONDS = 300.0
ANSWER_SECONDS = 10.0
# of a restored state that was not used: a request to another slot may have emptied this one
_TRIES = 2
_PROBE_TEXT = (
    "The pagoda has seven roofs; each is a little smaller than the one below it. 1, 2, 3, 5, 8, 13"
    " and 21 are the steps of its stairs. def climb(step): return step if step < 2 else climb(step"
    " - 1) + climb(step - 2). Who climbs it sees the river, 4,096 lanterns, and the road home. "
)
_LORA_FIELDS = ("id", "path", "scale")
# of /props; made anew at each start, in builds that have it, unless the environment of the server
# has LLAMA_MEDIA_MARKER
_MARKER = "media_marker"
_RANDOM_MARKER = re.compile(r"<__media_[0-9A-Za-z]{32}__>")
_SLOTS = "total_slots"
_IDENTITY_FIELDS = ("model_path", "build_info", _SLOTS, _MARKER)


class ServerAdapters(NamedTuple):
    """The LoRA adapters of a server: all that it lists of them."""

    listed: tuple[tuple[object, ...], ...]

    @classmethod
    def of(
        cls, server: ServerRequests, seconds: float = ANSWER_SECONDS
    ) -> ServerAdapters:
        """Ask the server. Raises ServerTrouble."""
        answer = server.get("/lora-adapters", seconds)
        if not isinstance(answer, list) or not all(
            isinstance(entry, dict) for entry in answer
        ):
            raise ServerTrouble("/lora-adapters: an unknown answer")
        entries = [
            tuple(entry.get(name) for name in _LORA_FIELDS) for entry in answer
        ]
        return cls(tuple(entries))

    def digest(self) -> str:
        """Return a name of their contents and scales; empty without one. Raises OSError."""
        if not self.listed:
            return ""
        found = blake3(derive_key_context="PagodaKV adapters of llama.cpp")
        for _, path, scale in self.listed:
            found.update(f"{file_digest(Path(str(path)))} {scale!r}\n".encode())
        return str(found.hexdigest())


class ServerIdentity(NamedTuple):
    """Which start of which server answers."""

    properties: tuple[str, ...]
    # sockets that listen on its port, as far as they are in this network namespace; not looked for
    # if the properties are of one start
    listeners: tuple[str, ...]

    @classmethod
    def of(
        cls, server: ServerRequests, seconds: float = ANSWER_SECONDS
    ) -> ServerIdentity:
        """Ask the server. Raises ServerTrouble."""
        properties = server.get("/props", seconds)
        if not isinstance(properties, dict):
            raise ServerTrouble("/props: an unknown answer")
        found = tuple(str(properties.get(name)) for name in _IDENTITY_FIELDS)
        if _is_random(found):
            # it says enough, and to list the sockets of a machine may take 10 ms
            return cls(found, ())
        return cls(found, _listeners(server.host, server.port))

    @property
    def slots(self) -> int:
        """How many slots the server has; 0 if it does not say."""
        text = self.properties[_IDENTITY_FIELDS.index(_SLOTS)]
        return int(text) if text.isdecimal() else 0

    @property
    def is_of_one_start(self) -> bool:
        """Whether another start of the server has another identity for certain."""
        return _is_random(self.properties) or bool(self.listeners)


def _is_random(properties: tuple[str, ...]) -> bool:
    """Whether the server made its marker itself, at its start."""
    marker = properties[_IDENTITY_FIELDS.index(_MARKER)]
    return _RANDOM_MARKER.fullmatch(marker) is not None


class ProbedServer(NamedTuple):
    """What is known of a server."""

    identity: ServerIdentity
    adapters: ServerAdapters
    slots: int
    context: int  # tokens of one slot
    streams: int
    cut: EndingShape
    namespace: Namespace
    trouble: str  # why nothing may be loaded or stored; empty: nothing is wrong


def probe_server(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int | None,
    chunk_tokens: int,
    salt: str,
) -> ProbedServer:
    """Return what a server computes. What one slot holds is lost: `slot`, or the last one.

    Raises ConfigError or StoreError if the server cannot be used at all, with what to do.
    """
    try:
        return _probe(server, directory, slot, chunk_tokens, salt)
    except ServerTrouble as trouble:
        raise StoreError(_remedy(trouble)) from trouble


def _probe(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int | None,
    chunk_tokens: int,
    salt: str,
) -> ProbedServer:
    identity = ServerIdentity.of(server)
    properties = server.get("/props", ANSWER_SECONDS)
    slots = identity.slots
    path = Path(str(properties.get("model_path") or ""))
    if not slots or not path.name:
        raise ConfigError(
            f"{server.url} names no model and no slots: give the URL of one llama-server, not of a "
            "router"
        )
    slot = slots - 1 if slot is None else slot
    if not 0 <= slot < slots:
        raise ConfigError(
            f"slot {slot} is not one of the {slots} of {server.url}"
        )
    adapters = ServerAdapters.of(server)
    # all that costs the slot nothing comes before it is emptied
    probe = _probe_prompt(server)
    try:
        header = read_gguf_header(path)
        weights = _weights(path)
        lora = adapters.digest()
    except OSError as error:
        raise StoreError(
            f"the model cannot be read, and without it its KV has no name: {error}: run this on "
            "the server's machine, as a user who may read it"
        ) from None
    _require_same_directory(server, directory, slot)
    first = _compute(server, directory, slot, probe)
    again = _compute(server, directory, slot, probe)
    window = header.values.get(
        f"{header.values.get('general.architecture')}.attention.sliding_window", 0
    )
    if first.shape.window is not None and (
        not isinstance(window, int) or window < 1
    ):
        raise StoreError(
            f"{path} does not say how long its window is: it cannot be used"
        )
    window_tokens = int(window) if first.shape.window is not None else 0
    cut = EndingShape(first.shape, chunk_tokens, window_tokens)
    namespace = Namespace(
        model=namespace_model(path, header.values),
        weights=weights,
        kv_dtype=first.shape.kv_types(),
        lora=lora,
        salt=salt,
        numerics=f"llama.cpp state {first.shape.version} probe {first.digest}",
    )
    context = number(properties, "default_generation_settings", "n_ctx")
    probed = ProbedServer(
        identity, adapters, slots, context, first.streams, cut, namespace, ""
    )
    if (first.digest, first.shape) != (again.digest, again.shape):
        return probed._replace(
            trouble="the server computed other KV for the same tokens the second time, so KV has "
            "no name"
        )
    if cut.state.window is not None and not cut.state.has_checkpoints:
        return probed._replace(
            trouble="this build of llama-server saves no checkpoints, and a model with sliding "
            "windows can be continued only at one: take a newer llama-server"
        )
    if not identity.is_of_one_start:
        return probed._replace(
            trouble="restarts cannot be noticed: the server has a fixed LLAMA_MEDIA_MARKER or "
            "none, and its port is in another network namespace: start it without that, or "
            "run this where it runs"
        )
    if (
        ServerIdentity.of(server) != identity
        or ServerAdapters.of(server) != adapters
    ):
        raise StoreError(
            f"{server.url} was changed while it was probed: try again"
        )
    trouble = _try_restore(server, directory, slot, probed, probe, first.ending)
    return probed._replace(trouble=trouble)


def _weights(path: Path) -> str:
    """Return the digest of all files of a model. Raises OSError."""
    shards = shards_of(path, read_gguf_header(path).values)
    if len(shards) == 1:
        # a model keeps its name when it is moved or renamed
        return file_digest(path)
    return files_digest(path.parent, [shard.name for shard in shards])


class _Probe(NamedTuple):
    """The fixed prompt."""

    tokens: Tokens
    letter: int  # a token that is a whole character


def _probe_prompt(server: ServerRequests) -> _Probe:
    tokens = _tokenized(server, _PROBE_TEXT, add_special=True)[:PROBE_TOKENS]
    letters = _tokenized(server, "a", add_special=False)
    if len(tokens) < PROBE_TOKENS or not len(letters):
        raise StoreError(
            f"{server.url} makes only {len(tokens)} tokens of {len(_PROBE_TEXT)} characters: its "
            "vocabulary is unknown"
        )
    return _Probe(tokens, int(letters[-1]))


def _tokenized(server: ServerRequests, text: str, *, add_special: bool) -> Tokens:
    body = {"content": text, "add_special": add_special}
    answer = server.post("/tokenize", body, ANSWER_SECONDS)
    try:
        found = np.array(answer["tokens"], np.int32)
    except (KeyError, TypeError, ValueError, OverflowError):
        found = None
    if found is None or found.ndim != 1:
        raise ServerTrouble("/tokenize: an unknown answer")
    return found


def _require_same_directory(
    server: ServerRequests, directory: StateDirectory, slot: int
) -> None:
    """Raise ConfigError if the server saves its slots elsewhere. The slot is emptied first: what
    stays there has no tokens.
    """
    server.erase(slot, ANSWER_SECONDS)
    with directory.state() as path:
        _save(server, directory, slot, path, ANSWER_SECONDS)
        if not path.exists():
            raise ConfigError(
                f"{server.url} saves its slots in another directory (an empty state, {path.name}, "
                f"is there now): start it with --slot-save-path {directory.path}"
            )


def _save(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int,
    path: Path,
    seconds: float,
) -> int:
    """Let the server save a slot; return how many tokens. Raises ServerTrouble, StoreError."""
    with directory.room_for():
        return server.save(slot, path.name, seconds)


class _Computed(NamedTuple):
    """A state of the probe: its shape, a digest of its KV, and all of it as an ending."""

    shape: StateShape
    streams: int
    digest: str
    ending: Bytes  # empty where a window is


def _compute(
    server: ServerRequests, directory: StateDirectory, slot: int, probe: _Probe
) -> _Computed:
    """Let a slot compute the probe from nothing, and read its state."""
    server.erase(slot, ANSWER_SECONDS)
    reused = _ask(server, slot, probe.tokens, probe.letter, cache_prompt=False)
    if reused:
        raise StoreError(
            f"{server.url} reused {reused} tokens although it was asked not to"
        )
    with directory.state() as path:
        saved = _save(server, directory, slot, path, PROBE_SECONDS)
        with opened(path, os.O_RDONLY) as fd:
            try:
                state = read_unknown_state(fd)
            except UnknownState as unknown:
                raise StoreError(
                    f"the states of {server.url} are not understood: {unknown}"
                ) from None
            if saved != PROBE_TOKENS or not np.array_equal(
                state.tokens, probe.tokens
            ):
                raise StoreError(
                    f"{server.url} saved other tokens than it was asked for: is another "
                    "client using this slot?"
                )
            ending = np.empty(0, np.uint8)
            if state.window is None:
                ending = read_ending(state, _whole(state.shape), PROBE_TOKENS)
            return _Computed(state.shape, state.streams, _digest(state), ending)


def _ask(
    server: ServerRequests,
    slot: int,
    tokens: Tokens,
    letter: int,
    *,
    cache_prompt: bool = True,
) -> int:
    """Let a slot compute `tokens`; return how many it reused. Raises ServerTrouble.

    A server computes one token of answer at least. It must be a `letter`: some builds fail where it
    is no whole character.
    """
    body = {
        "prompt": tokens.tolist(),
        "id_slot": slot,
        "n_predict": 0,
        "temperature": 0,
        "logit_bias": [[letter, 1000.0]],
        "cache_prompt": cache_prompt,
    }
    answer = server.post("/completion", body, PROBE_SECONDS)
    return number(answer, "timings", "cache_n")


def _digest(state: StateFile) -> str:
    """Return a digest of the KV of a state, in the order of its positions."""
    found = blake3(derive_key_context="PagodaKV probe of llama.cpp")
    found.update(state.shape.describe().encode())
    for rows in (state.full, state.window):
        if rows is None:
            continue
        planes = PlaneRows(state.fd, rows)
        first = int(rows.positions.min())
        for plane, shape in enumerate(rows.shape.planes):
            values = np.empty(len(rows.positions) * shape.row_bytes, np.uint8)
            planes.read(plane, first, [values])
            found.update(values.data)
    if state.recurrent is not None:
        for state_plane, at in zip(
            state.recurrent.shape.planes, state.recurrent.offsets, strict=True
        ):
            found.update(os.pread(state.fd, state_plane.row_bytes, at))
    return str(found.hexdigest(16))


def _try_restore(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int,
    probed: ProbedServer,
    probe: _Probe,
    ending: Bytes,
) -> str:
    """Compose a state, restore it, go on from it; return what is wrong, or nothing."""
    if probed.cut.state.window is not None:
        return _try_window(server, directory, slot, probed, probe)
    tokens = probe.tokens

    def put(writer: StateWriter) -> None:
        writer.put_ending(ending)

    cut = _whole(probed.cut.state)
    prompt = np.append(tokens, tokens[1:3]).astype(np.int32)
    reused = 0
    for _ in range(_TRIES):
        reused = _restored(
            server,
            directory,
            slot,
            cut,
            probed.streams,
            tokens,
            prompt,
            probe,
            put,
        )
        if reused:
            break
    if reused != len(tokens) or probed.cut.state.kind != "attention":
        return _not_used(reused, len(tokens))
    return _try_moved(server, directory, slot, probed, probe)


def _try_moved(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int,
    probed: ProbedServer,
    probe: _Probe,
) -> str:
    """Restore a state of zeros, and ask for its tokens without some at the beginning: a server with
    --cache-reuse moves the rows of the rest, which were computed after other text.
    """
    count = 1 + _LEFT_OUT_TOKENS + _MOVED_TOKENS
    if count + 8 > probed.context:
        return ""
    tokens = _nobodys_tokens(probe, count)
    # one more token that both begin with would leave one too few to be moved
    others = probe.tokens[1:][probe.tokens[1:] != tokens[1 + _LEFT_OUT_TOKENS]]
    if not len(others):
        return "its vocabulary makes one token of everything: whether it moves KV is unknown"
    tokens[1] = np.random.default_rng().choice(others)
    prompt = np.append(tokens[:1], tokens[1 + _LEFT_OUT_TOKENS :])
    cut = _whole(probed.cut.state)
    reused = _restored(
        server,
        directory,
        slot,
        cut,
        probed.streams,
        tokens,
        prompt,
        probe,
        lambda _: None,
    )
    if reused <= 1:
        return ""
    return (
        "the server moves KV to other positions (--cache-reuse): what its slots hold is not the KV "
        "of their tokens; start it without"
    )


def _try_window(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int,
    probed: ProbedServer,
    probe: _Probe,
) -> str:
    """Do the same where the server uses no state that is shorter than its window. The rows are
    zeros: nobody sees what the server computes after them.

    Then ask for a little less than the state: the rows of the window that this needs are gone, and
    a server with a window of full size believes that it has them.
    """
    count = probed.cut.window_tokens + PROBE_TOKENS + 8
    if count + 8 > probed.context:
        return ""
    tokens = _nobodys_tokens(probe, count)
    other = np.array([probe.tokens[1], probe.tokens[1]], np.int32)
    # one row more than the window is in the state beyond what its end needs
    for stop, expected in ((count, count), (count - 4, 0)):
        prompt = np.concatenate((tokens[:stop], other))
        reused = 0
        for _ in range(_TRIES if expected else 1):
            reused = _restored(
                server,
                directory,
                slot,
                probed.cut,
                probed.streams,
                tokens,
                prompt,
                probe,
                lambda _: None,
            )
            if reused:
                break
        if stop == count and reused != expected:
            return _not_used(reused, expected)
        if reused != expected:
            return (
                "the server keeps a window of full size (--swa-full), which a saved state does "
                "not have: text after a restored prompt would be wrong; start it without"
            )
    return ""


def _not_used(reused: int, count: int) -> str:
    if reused == count:
        return ""
    return (
        f"a restored state of {count} tokens was used for {reused} of them: if its slots are "
        "unified, start the server with --no-cache-idle-slots or --no-kv-unified"
    )


def _whole(shape: StateShape) -> EndingShape:
    """Return how a state is cut whose rows are all in its ending."""
    return EndingShape(shape, 1 << 30, 0)


def _restored(
    server: ServerRequests,
    directory: StateDirectory,
    slot: int,
    cut: EndingShape,
    streams: int,
    tokens: Tokens,
    prompt: Tokens,
    probe: _Probe,
    fill: Callable[[StateWriter], None],
) -> int:
    """Restore a composed state of `tokens`; return how many of `prompt` were reused."""
    with directory.state() as path:
        with (
            directory.room_for(cut.file_bytes(len(tokens), streams)),
            opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd,
        ):
            fill(StateWriter(fd, cut, streams, tokens))
        try:
            restored = server.restore(slot, path.name, PROBE_SECONDS)
            if restored != len(tokens):
                raise ServerTrouble(
                    f"{restored} of {len(tokens)} tokens were restored"
                )
            return _ask(server, slot, prompt, probe.letter)
        finally:
            # its rows may be zeros: nobody may go on from them
            with contextlib.suppress(ServerTrouble):
                server.erase(slot, ANSWER_SECONDS)


def _nobodys_tokens(probe: _Probe, count: int) -> Tokens:
    """Return tokens that are the beginning of no prompt: the server may keep a copy of a state of
    zeros in its RAM.
    """
    return np.random.default_rng().choice(probe.tokens[1:], count)


def _remedy(trouble: ServerTrouble) -> str:
    if trouble.status == 501:
        return (
            f"{trouble}: start the server with --slot-save-path DIRECTORY, and pass that "
            "directory"
        )
    if trouble.status == 401:
        return f"{trouble}: pass api_key"
    return f"{trouble}: is a llama-server running there, with its model loaded?"


def _listeners(host: str, port: int) -> tuple[str, ...]:
    """Return the inodes of the sockets that listen on a port, if the host is in this network
    namespace.
    """
    if not _is_here(host):
        return ()
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (
                fields[3] == "0A"
                and int(fields[1].rpartition(":")[2], 16) == port
            ):
                found.add(fields[9])
    return tuple(sorted(found))


def _is_here(host: str) -> bool:
    """Whether a host is an address of this network namespace: only then it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with (
            contextlib.suppress(OSError),
            socket.socket(family, kind, protocol) as bound,
        ):
            bound.bind(address)
            return True
    return False


def slot_state(server: ServerRequests, slot: int, seconds: float) -> Any:
    """Return what the server says of a slot; None if it says nothing (--no-slots).

    Raises ServerTrouble.
    """
    try:
        listed = server.get("/slots", seconds)
    except ServerTrouble as trouble:
        if trouble.status in (501, 404):
            return None
        raise
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.get("id") == slot:
            return entry
    return None
