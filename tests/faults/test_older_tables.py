"""An older copy of the tables that is put back beneath a process: it is not opened by path again,
as after a fork.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pagoda.ledger import Reserved
from pagoda.ledger.store_state import TABLES, Kind
from tests.children import in_child
from tests.ledger.support import TENANT, keys, opened, put


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_older_copy_of_the_tables_is_not_opened_by_a_forked_child(
    shm_root: Path, kind: Kind
) -> None:
    """It would give out slots and generations that its parent has given out since."""
    ledger = opened(shm_root, kind=kind)
    tables = ledger.directory / TABLES
    put(ledger, keys(1))
    shutil.copy2(tables, shm_root / "copy")
    put(ledger, keys(2, 3, 4))
    os.replace(shm_root / "copy", tables)

    def act() -> None:
        assert not len(ledger.match_prefix(keys(1)).slots)
        [outcome] = ledger.reserve(keys(5), namespace=TENANT)
        assert not isinstance(outcome, Reserved)

    in_child(act)
    # open files continue to work, or it has noticed
    assert len(ledger.match_prefix(keys(2)).slots) in (0, 1)
    ledger.close()
