"""`pagoda serve` beside an engine with a lossy disk: no other machine gets its bytes under a key of
exact KV.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from pagoda.ledger.stores_under_root import remove_store
from pagoda.tiers import DiskTier
from tests.cli.shelf import refused
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    engine,
    keys_of,
    payload_of,
    server,
    verified,
)

LOSSY = {"disk_codec": "q4", "unchecked": True}
TOKENS = 5 * CHUNK


@pytest.mark.slow
def test_no_key_of_exact_kv_leads_to_what_a_lossy_disk_had(
    shm_root: Path, tmp_path: Path
) -> None:
    """Engines on other machines, and a client that asks for anything: first what was computed, then
    what came up.
    """

    def machine(name: str, **more: object) -> dict[str, object]:
        return {
            "host_path": str(shm_root / name),
            "host_size": 16 << 20,
            "disk_path": str(tmp_path / name),
            "disk_size": 16 << 20,
            "worth_it": False,
            "deadline_seconds": 30.0,
            "prompt_log": False,
            **more,
        }

    with engine(**machine("a", **LOSSY)) as running:
        approximate = running.root
        keys = running.store(1, 5)
    # else it would know the stores of the other machines
    variables = {
        f"PAGODA_{name.upper()}": str(machine("a", **LOSSY)[name])
        for name in (
            "host_path",
            "host_size",
            "disk_path",
            "disk_size",
            "disk_codec",
        )
    } | {"XDG_STATE_HOME": str(tmp_path / "state")}
    for came_up in (False, True):
        # the disk fills host memory: those bytes are not what was computed
        if came_up:
            remove_store(next((shm_root / "a").glob(f"{LAYOUT.fingerprint}.*")))
            with engine(**machine("a", **LOSSY)) as running:
                assert running.command("retrieve", 1, 5) == f"{TOKENS} False"
        with server(**variables) as served:
            assert served.find(approximate, keys) == 5
            for position, key in enumerate(keys):
                found = verified(
                    served.get(approximate, key).body, approximate, key
                )
                assert found is not None
                assert (found == payload_of(1, position)).all() != came_up
            url = served.url.replace("http://", f"http://:{served.token}@")
            with engine(
                **machine(
                    "exact", remote=[f"{url}?server=pagoda&deadline=30s&look=30s"]
                )
            ) as other:
                exact = other.root
                assert other.command("retrieve", 1, 5) == "0 True"
            exact_keys = keys_of(exact, 1, 5)
            for root, key in [
                *product([exact], [*keys, *exact_keys]),
                *product([approximate], exact_keys),
            ]:
                assert served.get(root, key).status == 404
                assert served.find(root, [key]) == 0
            _, said = served.stop()
        assert said.count("is not served: its codec q4 is lossy") == 1, said
    remove_store(next((shm_root / "a").glob(f"{LAYOUT.fingerprint}.*")))
    with server(**variables) as served:  # only the disk has it
        assert served.find(approximate, keys) == 0
        assert {
            served.get(root, key).status
            for root in (approximate, exact)
            for key in keys
        } == {404}


def test_a_lossy_disk_alone_is_refused_at_the_start(tmp_path: Path) -> None:
    DiskTier.open(LAYOUT, tmp_path, 16 << 20, codec_name="q4").close()
    store = tmp_path / f"{LAYOUT.fingerprint}.q4"
    (tmp_path / "link").symlink_to(store)
    for named in (store, tmp_path / "link"):
        # it would not start at all
        said = refused("serve", named, "--listen", "nowhere")
        assert (
            f"{named}: has chunks of the lossy codec q4, which are not served"
            in said
        )
