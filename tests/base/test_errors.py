"""The public surface and the tree of errors, pinned: a change here is a change for users."""

from __future__ import annotations

import inspect

import pytest

import pagoda
from pagoda.base import errors


def test_public_names() -> None:
    assert pagoda.__all__ == [
        "Cache",
        "ChunkRef",
        "ClosedError",
        "Config",
        "ConfigError",
        "Hit",
        "KVLayout",
        "LedgerCorrupt",
        "Namespace",
        "NoRoomError",
        "PagodaError",
        "Reason",
        "RequestHints",
        "StoreError",
        "Stored",
        "__version__",
    ]
    assert set(pagoda.__all__) <= set(dir(pagoda))


@pytest.mark.parametrize("name", pagoda.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(pagoda, name) is getattr(pagoda, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Cash"):
        pagoda.Cash  # noqa: B018


def test_the_tree_of_errors_is_the_documented_one() -> None:
    found = {
        name: cls.__mro__[1:-1]
        for name, cls in inspect.getmembers(errors, inspect.isclass)
    }
    tree = {
        name: [
            base.__name__ for base in bases if base.__module__ == errors.__name__
        ]
        for name, bases in found.items()
    }
    assert tree == {
        "PagodaError": [],
        "StoreError": ["PagodaError"],
        "NoRoomError": ["StoreError", "PagodaError"],
        "MissingLibraryError": ["StoreError", "PagodaError"],
        "LedgerCorrupt": ["StoreError", "PagodaError"],
        "ClosedError": ["PagodaError"],
        "ConfigError": ["PagodaError"],
    }
    assert sorted(tree) == sorted(errors.__all__)
    assert issubclass(errors.ConfigError, ValueError)
    assert not issubclass(errors.StoreError, ValueError | OSError)
