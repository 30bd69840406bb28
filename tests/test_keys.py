"""Keys: which inputs are one prompt and which are not; keys never change between processes or
versions.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from array import array
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from pagoda import keys as keys_module
from pagoda.keys import (
    Item,
    KeyChain,
    Namespace,
    _from_items,
    _from_mixed_items,
    as_token_ids,
    chunk_keys,
    derive_keys,
)

CHUNK = 4
ROOT = Namespace("model").root
A = blake3(b"a picture").digest()
B = blake3(b"a sound").digest()

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def reference(tokens: list[int], root: bytes, chunk_tokens: int) -> list[bytes]:
    """The definition of a key, one chunk at a time, with nothing of the package."""
    found = []
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        root = blake3(
            struct.pack(
                f"<{chunk_tokens}i", *tokens[start : start + chunk_tokens]
            ),
            key=root,
        ).digest()
        found.append(root)
    return found


# ---- token ids


@pytest.mark.parametrize(
    "dtype", ["i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", ">i4", ">i8"]
)
def test_every_integer_type_names_the_same_tokens(dtype: str) -> None:
    ids = as_token_ids(np.arange(100).astype(dtype))
    assert ids.dtype == np.dtype("<i4")
    assert ids.tolist() == list(range(100))


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: array("i", ids),
        lambda ids: array("q", ids),
        lambda ids: memoryview(array("i", ids)),
        lambda ids: memoryview(struct.pack(f"{len(ids)}i", *ids)).cast("i"),
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
    ],
)
def test_every_container_names_the_same_tokens(make: object) -> None:
    ids = [5, 0, 2**31 - 1, 7]
    assert as_token_ids(make(ids)).tolist() == ids  # type: ignore[operator]
    assert len(as_token_ids(make([]))) == 0  # type: ignore[operator]


def test_token_ids_may_be_torch_tensors() -> None:
    import torch

    ids = torch.arange(8)
    assert as_token_ids(ids).tolist() == list(range(8))
    assert (
        np.shares_memory(as_token_ids(ids.int()), as_token_ids(ids.int()))
        is False
    )
    own = ids.int()
    assert np.shares_memory(as_token_ids(own), own.numpy())
    for wrong in (ids.float(), ids.bool(), ids.reshape(2, 4), ids.to("meta")):
        with pytest.raises(ValueError, match="token ids must be"):
            as_token_ids(wrong)


def test_int32_memory_is_wrapped_not_copied() -> None:
    for own in (np.arange(8, dtype=np.int32), array("i", range(8))):
        assert np.shares_memory(as_token_ids(own), np.asarray(own))


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "remove padding"),
        (np.array([1, -1]), "remove padding"),
        (np.array([1, -1], np.int32), "remove padding"),
        ([2**31], "over 2147483647"),
        ([2**80], "over 2147483647"),
        (np.array([2**31], np.uint32), "over 2147483647"),
        (np.array([2**63], np.uint64), "over 2147483647"),
        ([1, 2.0], "pass plain ints"),
        ([1, True], "pass plain ints"),
        # as marshal writes them, as long as two ints
        ([True, 0.5], "pass plain ints"),
        ([0, False, None, 2**40], "pass plain ints"),
        (["1"], "pass plain ints"),
        ([None], "pass plain ints"),
        ([[1, 2]], "pass plain ints"),
        (np.array([1.0]), "convert them"),
        (np.array([True]), "convert them"),
        (np.array([], dtype=np.float64), "convert them"),
        (np.ones((2, 2), np.int32), r"ids\[0\]"),
        (np.int32(3), "1-D"),
        (3, "1-D"),
        (b"\0\0\0\0", "cast"),
        ("abc", "cast"),
        (memoryview(b"ab").cast("c"), "must be integers"),
        ({1: 2}, "integer array or a list"),
        (iter([1]), "integer array or a list"),
        (None, "integer array or a list"),
    ],
)
def test_bad_ids_say_what_to_do(tokens: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_token_ids(tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        chunk_keys(tokens, ROOT, 1)  # type: ignore[arg-type]


@given(
    st.lists(
        st.integers(0, 2**31 - 1)
        | st.integers(-(2**70), 2**70)
        | st.booleans()
        | st.floats()
    )
)
def test_the_fast_path_of_lists_differs_from_the_slow_one_in_nothing(
    tokens: list[int],
) -> None:
    for made in (tokens, tuple(tokens)):
        expected = _answer(lambda ids: as_token_ids(_from_mixed_items(ids)), made)
        assert _answer(_from_items, made) == expected


def _answer(convert: object, tokens: object) -> object:
    try:
        return convert(tokens).tolist()  # type: ignore[operator]
    except ValueError as error:
        return str(error)


# ---- chains


@given(token_lists, st.integers(1, 9))
def test_keys_are_the_chained_hash(tokens: list[int], chunk_tokens: int) -> None:
    assert chunk_keys(tokens, ROOT, chunk_tokens) == reference(
        tokens, ROOT, chunk_tokens
    )


@given(token_lists, st.integers(0, 39), st.integers(0, 2**31 - 1))
def test_a_changed_token_changes_its_chunk_and_all_after_it(
    tokens: list[int], at: int, token: int
) -> None:
    if at >= len(tokens) or tokens[at] == token:
        return
    before = chunk_keys(tokens, ROOT, CHUNK)
    after = chunk_keys([*tokens[:at], token, *tokens[at + 1 :]], ROOT, CHUNK)
    same = at // CHUNK
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_equal_chunks_at_two_places_have_two_keys() -> None:
    found = chunk_keys([1, 2, 3, 4] * 3, ROOT, CHUNK)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("root", "chunk_tokens"), [(b"short", 4), (ROOT, 0), (ROOT, -1)]
)
def test_bad_root_or_chunk(root: bytes, chunk_tokens: int) -> None:
    with pytest.raises(ValueError):
        chunk_keys([1], root, chunk_tokens)
    with pytest.raises(ValueError):
        KeyChain(root, chunk_tokens)


# ---- multimodal items


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Item]]:
    tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    starts = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
    return tokens, [
        Item(s, s + draw(st.integers(1, 12)), draw(st.sampled_from([A, B])))
        for s in starts
    ]


@given(prompts(), prompts())
def test_two_prompts_share_exactly_the_chunks_that_are_the_same(
    one: tuple[list[int], list[Item]], other: tuple[list[int], list[Item]]
) -> None:
    def prefixes(tokens: list[int], items: list[Item]) -> list[object]:
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        return [
            (tokens[:end], sorted(i for i in items if i.start < end))
            for end in ends
        ]

    a = chunk_keys(one[0], ROOT, CHUNK, one[1])
    b = chunk_keys(other[0], ROOT, CHUNK, other[1])
    for (x, seen_x), (y, seen_y) in zip(
        zip(a, prefixes(*one), strict=True),
        zip(b, prefixes(*other), strict=True),
        strict=False,
    ):
        assert (x == y) == (seen_x == seen_y)


def test_only_chunks_from_the_item_on_change() -> None:
    tokens = list(range(16))
    plain = chunk_keys(tokens, ROOT, CHUNK)
    with_item = chunk_keys(tokens, ROOT, CHUNK, [Item(5, 6, A)])
    assert plain[0] == with_item[0]
    assert not set(plain[1:]) & set(with_item[1:])


@pytest.mark.parametrize(
    "items",
    [
        [Item(4, 12, B)],
        [Item(4, 11, A)],
        [Item(5, 12, A)],
        [Item(4, 8, A), Item(8, 12, A)],
        [Item(4, 12, A), Item(4, 12, A)],
        [Item(4, 12, A), Item(6, 7, B)],
    ],
)
def test_items_that_differ_in_anything_differ(items: list[Item]) -> None:
    tokens = list(range(16))
    assert (
        chunk_keys(tokens, ROOT, CHUNK, items)[1]
        != chunk_keys(tokens, ROOT, CHUNK, [Item(4, 12, A)])[1]
    )


def test_the_order_of_items_does_not_matter_and_a_cut_prompt_keeps_its_keys() -> (
    None
):
    tokens = list(range(16))
    items = [Item(2, 14, A), Item(3, 5, B)]
    whole = chunk_keys(tokens, ROOT, CHUNK, items)
    assert whole == chunk_keys(tokens, ROOT, CHUNK, reversed(items))
    assert whole[:2] == chunk_keys(tokens[:9], ROOT, CHUNK, items)


def test_tokens_cannot_imitate_an_item() -> None:
    """12 tokens and an item have the length of 25 tokens: no chunk length makes one message of
    both.
    """
    tokens = list(range(12))
    message = (
        struct.pack("<12i", *tokens)
        + struct.pack("<i", -1)
        + struct.pack("<qq", 0, 1)
        + A
    )
    assert chunk_keys(tokens, ROOT, 12, [Item(0, 1, A)]) == [
        blake3(message, key=ROOT).digest()
    ]
    with pytest.raises(ValueError, match="negative"):
        chunk_keys(np.frombuffer(message, "<i4"), ROOT, len(message) // 4)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (Item(0, 1, b"short"), "32 bytes"),
        (Item(0, 1, "x" * 32), "32 bytes"),  # type: ignore[arg-type]
        (Item(-1, 1, A), "half-open"),
        (Item(3, 3, A), "half-open"),
        (Item(3, 2, A), "half-open"),
        (Item(8, 9, A), "begins past"),
    ],
)
def test_bad_items_say_what_to_do(item: Item, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chunk_keys(range(8), ROOT, CHUNK, [item])


# ---- growing


@given(
    prompts(),
    st.lists(st.integers(0, 40), max_size=5),
    st.sampled_from([1, 3, 4]),
)
def test_a_chain_grows_to_the_same_keys(
    prompt: tuple[list[int], list[Item]], cuts: list[int], chunk_tokens: int
) -> None:
    tokens, items = prompt
    chain = KeyChain(ROOT, chunk_tokens)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    grown: list[bytes] = []
    for start, stop in pairwise(bounds):
        grown += chain.extend(
            tokens[start:stop], [i for i in items if start <= i.start < stop]
        )
        assert chain.num_tokens == stop
    assert grown == chain.keys == chunk_keys(tokens, ROOT, chunk_tokens, items)


def test_a_chain_keeps_its_own_copy_of_the_tail() -> None:
    ids = np.arange(6, dtype=np.int32)
    chain = KeyChain(ROOT, CHUNK)
    chain.extend(ids)
    ids[:] = 99
    chain.extend([6, 7])
    chain.keys.clear()
    assert chain.keys == chunk_keys(range(8), ROOT, CHUNK)


def test_a_refused_extension_changes_nothing() -> None:
    chain = KeyChain(ROOT, CHUNK)
    chain.extend(range(6))
    for tokens, items in [
        ([-1], []),
        ([6, 7], [Item(3, 9, A)]),
        ([6, 7], [Item(8, 9, A)]),
    ]:
        with pytest.raises(ValueError):
            chain.extend(tokens, items)
    assert chain.num_tokens == 6
    chain.extend([6, 7], [Item(5, 9, A)])  # its chunk is not hashed yet
    assert chain.keys == chunk_keys(range(8), ROOT, CHUNK, [Item(5, 9, A)])


# ---- an engine's own digests


def test_derived_keys_depend_on_root_and_digest_and_are_not_token_keys() -> None:
    digests = [A, B, b"x" * 64]
    found = derive_keys(digests, ROOT)
    assert len(set(found)) == 3
    for key in found:
        assert len(key) == 32
    assert found[:2] == derive_keys([A, B], ROOT)
    assert not set(found) & set(derive_keys(digests, Namespace("other").root))
    assert blake3(A, key=ROOT).digest() not in found
    with pytest.raises(ValueError, match="cannot name a prefix"):
        derive_keys([b"\0" * 8], ROOT)


# ---- namespaces

OTHER: dict[str, str | int] = {
    "model": "m2",
    "revision": "r",
    "weights": "w",
    "weights_epoch": 1,
    "kv_dtype": "float16",
    "layout": "l",
    "world_size": 2,
    "lora": "a",
    "salt": "s",
    "approximate": "q4",
    "numerics": "autocast=bfloat16",
}


def test_every_field_is_tried() -> None:
    assert set(OTHER) == {field.name for field in fields(Namespace)}


@pytest.mark.parametrize("name", OTHER)
def test_every_field_changes_every_key(name: str) -> None:
    one = Namespace("model")
    other = one.with_(**{name: OTHER[name]})
    assert one.root != other.root
    assert not set(chunk_keys(range(8), one.root, CHUNK)) & set(
        chunk_keys(range(8), other.root, CHUNK)
    )
    assert Namespace.differing(one.fields(), other.fields()) == [name]


def test_exact_kv_has_the_keys_and_labels_of_versions_without_the_field() -> None:
    """The pinned roots below are older than the field. No root of approximate KV is one of them."""
    assert "approximate" not in FULL.fields()
    approximate = FULL.with_(approximate="q4")
    assert approximate.fields()["approximate"] == "q4"
    assert approximate.root.hex() not in (FULL.root.hex(), GOLDEN["full_root"])
    assert approximate.with_(approximate="").root == FULL.root


def test_the_format_changes_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        keys_module, "FORMAT_VERSION", keys_module.FORMAT_VERSION + 1
    )
    other = Namespace("model")
    assert other.root != ROOT
    assert other.fields()["format"] == str(keys_module.FORMAT_VERSION)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
namespaces = st.builds(
    Namespace,
    texts.filter(bool),
    texts,
    texts,
    st.integers(0, 3),
    lora=texts,
    salt=texts,
)


@given(namespaces, namespaces)
def test_two_namespaces_never_encode_alike(
    one: Namespace, other: Namespace
) -> None:
    assert (one == other) == (one.root == other.root)
    assert (one == other) == (
        not Namespace.differing(one.fields(), other.fields())
    )


def test_text_cannot_move_between_fields() -> None:
    roots = {
        Namespace("ab", "c").root,
        Namespace("a", "bc").root,
        Namespace("abc").root,
    }
    assert len(roots) == 3


def test_the_salt_is_never_shown() -> None:
    namespace = Namespace("model", salt="sesame")
    assert "sesame" not in repr(namespace) + str(namespace.fields())
    assert len(namespace.fields()["salt"]) == 16
    assert Namespace("model").fields()["salt"] == ""


def test_a_field_unknown_to_one_side_differs() -> None:
    assert Namespace.differing({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == [
        "b",
        "c",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"model": None},
        {"weights_epoch": True},
        {"weights_epoch": -1},
        {"weights_epoch": "1"},
        {"world_size": 0},
        {"lora": None},
        {"salt": b"s"},
    ],
)
def test_bad_fields_of_a_namespace_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Namespace(**{"model": "model", **wrong})  # type: ignore[arg-type]


# ---- pinned

FULL = Namespace(
    "model",
    "rev",
    "weights",
    3,
    "bfloat16",
    "0123456789abcdef",
    2,
    "lora",
    "salt",
)
GOLDEN = {
    "root": "455c5464af06c66e1aab82ffbb9897650759c51a008ac3be1ffaa34d3b774cab",
    "full_root": "286e1b5b859de38af1873bf5d8d02e278f9cbcfd72257b28eec1b4fa62da4c55",
    "last_key": "1569c48ec00d6b9766f4140c37c8d8bcca8d21e7d484719f1498dbddf3128763",
    "item_key": "8549e34151b0fac7d2dbb2ae5474302bb2fe840b64787a809db2876022d32d49",
    "derived_key": "4ca60fcc8535f64be6a667f13c7bb06b2da8787e1e81a28fa4ffca4aa26334d2",
}


def computed() -> dict[str, str]:
    tokens = [1, 2, 3, 4, 2**31 - 1, 0, 7, 8]
    return {
        "root": ROOT.hex(),
        "full_root": FULL.root.hex(),
        "last_key": chunk_keys(tokens, FULL.root, CHUNK)[-1].hex(),
        "item_key": chunk_keys(
            tokens, FULL.root, CHUNK, [Item(2, 6, A), Item(5, 9, B)]
        )[-1].hex(),
        "derived_key": derive_keys([A], FULL.root)[0].hex(),
    }


@pytest.mark.parametrize("name", ["model", "salt", "weights"])
def test_a_name_that_is_not_utf_8_is_refused_in_one_sentence(name: str) -> None:
    """As from a path; and a salt is not shown."""
    fields = {"model": "model", name: os.fsdecode(b"m\xff")}
    with pytest.raises(ValueError, match="is not UTF-8") as caught:
        Namespace(**fields)
    assert (r"m\udcff" in str(caught.value)) == (name != "salt")


def test_keys_are_those_of_earlier_versions() -> None:
    """A change here makes all stored chunks unreachable: raise FORMAT_VERSION, say so in the
    changelog.
    """
    assert computed() == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "4242"])
def test_keys_are_the_same_in_another_process(seed: str) -> None:
    code = "from tests.test_keys import computed; print(computed())"
    paths = os.pathsep.join([os.environ["PYTHONPATH"], os.getcwd()])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == str(GOLDEN)
