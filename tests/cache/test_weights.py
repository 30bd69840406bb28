"""Weights that were changed in place never hit KV of the old ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from pagoda import Config
from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, miss_explainer
from pagoda.cache.weights_epoch import WeightsEpoch
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.ledger.epoch_record import NEVER_CHANGED, Epoch, EpochRecord
from pagoda.tiers import DiskTier
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    SPAWN,
    cache_at,
    hit_of,
    kv_of,
    prompt,
    put,
    served,
    stored,
)
from tests.faults.support import ROOT, own_mounts, python, succeeded


def raised(weights: WeightsEpoch) -> Epoch:
    """Raise the epoch; every root has recorded it."""
    epoch, errors = weights.raise_epoch()
    assert not errors
    return epoch


def test_the_epoch_is_kept_under_every_root(tmp_path: Path) -> None:
    roots = {"host": tmp_path / "a", "disk": tmp_path / "b"}
    assert WeightsEpoch(roots, "m").epoch() == NEVER_CHANGED
    first = raised(WeightsEpoch(roots, "m"))
    other = WeightsEpoch(roots, "m")
    assert first.number == 1
    assert other.epoch() == first
    assert WeightsEpoch(roots, "another").epoch() == NEVER_CHANGED
    for path in (tmp_path / "a").iterdir():
        path.unlink()  # wiped, as by a reboot
    assert WeightsEpoch(roots, "m").epoch() == first
    second = raised(other)
    assert second.number == 2
    assert WeightsEpoch({"host": tmp_path / "a"}, "m").epoch() == second
    for path in (*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()):
        path.unlink()
    # another process makes the files again
    assert WeightsEpoch(roots, "m").epoch() == NEVER_CHANGED
    assert other.epoch() == second, "this process does not return to an old epoch"


def test_a_root_that_is_opened_later_gets_the_epoch(tmp_path: Path) -> None:
    """Otherwise it would say, once the other root is gone, that the weights were never changed."""
    host = {"host": tmp_path / "host"}
    disk = {"disk": tmp_path / "disk"}
    first = raised(WeightsEpoch(host, "m"))
    assert WeightsEpoch(host | disk, "m").epoch() == first
    shutil.rmtree(tmp_path / "host")  # a reboot
    assert WeightsEpoch(disk, "m").epoch() == first
    second = raised(WeightsEpoch(host | disk, "m"))
    assert second.number == 2
    assert second.nonce != first.nonce


def test_two_roots_with_different_epochs_of_one_count_leave_both(
    tmp_path: Path,
) -> None:
    roots = {name: tmp_path / name for name in ("host", "disk")}
    apart = [
        raised(WeightsEpoch({name: root}, "m")) for name, root in roots.items()
    ]
    together = WeightsEpoch(roots, "m").epoch()
    assert [epoch.number for epoch in (*apart, together)] == [1, 1, 2]
    assert len({epoch.nonce for epoch in (*apart, together)}) == 3
    assert WeightsEpoch(roots, "m").epoch() == together


def test_of_roots_that_changed_apart_the_higher_count_is_not_known_to_be_later(
    tmp_path: Path,
) -> None:
    """After a reboot the weights were changed while only the host tier was open: the disk counted
    more, before.
    """
    host = {"host": tmp_path / "host"}
    disk = {"disk": tmp_path / "disk"}
    before = [raised(WeightsEpoch(disk, "m")) for _ in range(4)]
    present = raised(WeightsEpoch(host, "m"))
    together = WeightsEpoch(host | disk, "m").epoch()
    assert together.number == 5
    assert together not in (*before, present)
    assert WeightsEpoch(host | disk, "m").epoch() == together
    assert (
        WeightsEpoch(host, "m").epoch()
        == WeightsEpoch(disk, "m").epoch()
        == together
    )


def test_a_root_that_is_only_behind_costs_no_epoch(tmp_path: Path) -> None:
    """Two engines share the host tier, each has a disk of its own."""
    roots = {name: tmp_path / name for name in ("host", "disk")}
    other = {"host": tmp_path / "host", "disk": tmp_path / "other disk"}
    raised(WeightsEpoch(roots, "m"))
    second = raised(WeightsEpoch(other, "m"))
    assert WeightsEpoch(roots, "m").epoch() == second
    third = raised(WeightsEpoch(roots, "m"))
    # a reboot: the disks are compared, and one knows what it left behind
    shutil.rmtree(tmp_path / "host")
    apart = {"host": tmp_path / "disk", "disk": tmp_path / "other disk"}
    assert WeightsEpoch(apart, "m").epoch() == third


@pytest.mark.slow
def test_a_record_forgets_the_first_of_many_epochs(tmp_path: Path) -> None:
    """It has a fixed size."""
    roots = {"host": tmp_path / "host"}
    first = raised(WeightsEpoch(roots, "m"))
    weights = WeightsEpoch(roots, "m")
    passed = [raised(weights) for _ in range(260)]
    record = weights._records["host"]
    with record.locked():
        assert record.passed({first, *passed}) == set(passed[3:-1])


def test_two_changes_of_one_number_have_different_keys(shm_root: Path) -> None:
    names = []
    for root in ("one", "two"):
        with cache_at(shm_root / root, None) as cache:
            assert cache.weights_changed() == 1
            assert (
                cache._weights.scope()[0].weights_epoch
                == cache.present_namespace().weights_epoch
                == 1
            )
            names.append(
                (cache._weights.scope()[0].root, cache.present_namespace().root)
            )
    assert names[0][0] != names[1][0]
    assert names[0][1] != names[1][1]


def test_an_epoch_is_on_the_medium_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file, and each name of a new one: first the record, then what vouches for it."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    with cache_at(None, tmp_path):
        pass
    root = tmp_path / "disk"
    for file in (root / "epochs", *root.glob("weights-*")):
        file.unlink()
    monkeypatch.setattr(os, "fsync", noted)
    weights = WeightsEpoch({"disk": root}, NAMESPACE.model)
    assert synced == ["epochs", "disk", "state"], (
        "a new record, its name, and a store that vouches for it"
    )
    synced.clear()
    raised(weights)
    assert synced == ["epochs", "state", Path(weights._old_paths[0]).name, "disk"]


def test_what_older_versions_count_is_taken_over(tmp_path: Path) -> None:
    roots = {"host": tmp_path / "a", "disk": tmp_path / "b"}
    old = [
        Path(WeightsEpoch({name: root}, "m")._old_paths[0])
        for name, root in roots.items()
    ]
    # three changes, in a root that the other one was not open with
    old[0].write_bytes(b"+++")
    assert WeightsEpoch(roots, "m").epoch() == (3, 0)
    assert [path.stat().st_size for path in old] == [3, 3], (
        "older versions see the larger count too"
    )
    weights = WeightsEpoch(roots, "m")
    fourth = raised(weights)
    assert fourth.number == 4
    assert fourth.nonce
    assert [path.stat().st_size for path in old] == [4, 4]
    with open(old[1], "ab") as file:
        file.write(b"+")  # a change by an older version, while this one runs
    assert weights.epoch() == (5, 0)
    old[0].unlink()
    assert WeightsEpoch(roots, "m").epoch() == (5, 0)
    assert old[0].stat().st_size == 5


def test_two_that_raise_it_at_once_both_raise_it(tmp_path: Path) -> None:
    one = WeightsEpoch({"disk": tmp_path}, "m")
    two = WeightsEpoch({"disk": tmp_path}, "m")
    assert one.epoch() == two.epoch() == NEVER_CHANGED
    assert raised(one).number < raised(two).number
    assert one.epoch() == two.epoch()


def test_who_reads_a_record_waits_for_who_has_it(tmp_path: Path) -> None:
    """Two who read the same record, and write what they read plus one, would be one change instead
    of two.
    """
    record = EpochRecord(tmp_path, "0" * 16)
    began = threading.Event()
    inside = threading.Event()

    def come() -> None:
        began.set()
        with EpochRecord(tmp_path, "0" * 16).locked():
            inside.set()

    other = threading.Thread(target=come)
    with record.locked():
        other.start()
        began.wait()
        assert not inside.wait(0.3)
    other.join()
    assert inside.is_set()


def test_an_epoch_that_cannot_be_kept_is_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    weights = WeightsEpoch({"disk": tmp_path / "file"}, "m")
    epoch, troubles = weights.raise_epoch()
    assert list(troubles) == ["disk"]
    assert weights.unrecorded == {"disk"}
    assert weights.epoch() == epoch, (
        "this process does not return to an old epoch"
    )
    assert (
        WeightsEpoch({"disk": tmp_path / "file"}, "m").raise_epoch()[0].nonce
        != epoch.nonce
    )


def test_a_tier_that_cannot_take_the_epoch_down_loses_what_it_has(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        spoil(cache)
        assert cache.weights_changed() == 1
        assert hit_of(cache, tokens).num_tokens == 0
    # no tier has the epoch
    with cache_at(shm_root / "rebooted", tmp_path) as cache:
        assert cache._weights.scope()[0].weights_epoch == 0
        assert hit_of(cache, tokens).num_tokens == 0
    with cache_at(None, tmp_path) as cache:
        stored(cache, tokens)
        assert cache.weights_changed() == 1
        assert hit_of(cache, tokens).num_tokens == 0
    with cache_at(None, tmp_path) as cache:
        assert hit_of(cache, tokens).num_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gone", "older", "cut", "foreign", "torn"])
def test_a_lost_record_is_a_broken_promise(
    shm_root: Path, tmp_path: Path, loss: str
) -> None:
    """It counts as broken, never as never given: for every model of the root, and only there."""
    tokens = prompt(4)
    record = tmp_path / "disk" / "epochs"
    other = NAMESPACE.with_(model="another")
    with (
        cache_at(None, tmp_path) as cache,
        cache_at(None, tmp_path, other) as another,
    ):
        stored(another, tokens)  # before the change
        cache.weights_changed()
        older = record.read_bytes()
        cache.weights_changed()
        stored(cache, tokens)
        assert cache.flush(PATIENT_SECONDS)
        assert another.flush(PATIENT_SECONDS)
    with cache_at(None, tmp_path) as cache:
        assert hit_of(cache, tokens).num_tokens == 64
    lose(record, older, loss)
    for _ in range(2):
        for namespace in (NAMESPACE, other):
            with cache_at(shm_root, tmp_path, namespace) as cache:
                assert cache._weights.scope()[0].weights_epoch > 0
                hit = hit_of(cache, tokens)
                if not _:
                    assert hit.num_tokens == 0
                    stored(cache, tokens)
                    assert cache.flush(PATIENT_SECONDS)
                else:
                    assert hit.num_tokens == 64, (
                        "there is one new epoch, not one for each opening"
                    )


def lose(record: Path, older: bytes, loss: str) -> None:
    content = record.read_bytes()
    record.unlink()
    if loss == "older":
        record.write_bytes(older)
    elif loss == "cut":
        record.write_bytes(content[:100])
    elif loss == "foreign":
        raised(WeightsEpoch({"disk": record.parent / "elsewhere"}, "m"))
        shutil.copy(record.parent / "elsewhere" / "epochs", record)
    elif loss == "torn":
        record.write_bytes(bytes(len(content)))


@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_a_record_of_no_change_may_be_lost(tmp_path: Path, loss: str) -> None:
    """The stores vouch that nothing was ever recorded."""
    tokens = prompt(4)
    with cache_at(None, tmp_path) as cache:
        stored(cache, tokens)
    lose(tmp_path / "disk" / "epochs", b"", loss)
    with cache_at(None, tmp_path) as cache:
        assert cache._weights.scope()[0].weights_epoch == 0
        assert hit_of(cache, tokens).num_tokens == 64


@pytest.mark.slow
def test_a_record_that_is_lost_while_it_is_in_use(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        cache.weights_changed()
        stored(cache, tokens)
        before = cache._weights.scope()[0]
        (tmp_path / "disk" / "epochs").unlink()
        # it looks once a second
        wait_until(lambda: cache._weights.scope()[0] != before)
        assert hit_of(cache, tokens).num_tokens == 0
        stored(cache, tokens)
    with cache_at(shm_root, tmp_path) as cache:
        assert hit_of(cache, tokens).num_tokens == 64


def test_a_record_that_cannot_be_read_is_no_promise_kept(tmp_path: Path) -> None:
    tokens = prompt(4)
    with cache_at(None, tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(None, tmp_path) as cache:
        cache.weights_changed()
        spoil(cache)
    with cache_at(None, tmp_path) as cache:
        namespace, tiers = cache._weights.scope()
        assert namespace.weights_epoch
        assert tiers.left_out == ("disk",)
        assert hit_of(cache, tokens).num_tokens == 0


@pytest.mark.parametrize("seen", [False, True])
def test_a_store_that_is_elsewhere_when_the_weights_change_keeps_no_old_chunk(
    tmp_path: Path, seen: bool
) -> None:
    """Its disk was unmounted, or its directory renamed, and comes back."""
    tokens = prompt(4)
    root = tmp_path / "disk"
    refused = False
    with cache_at(None, tmp_path) as cache:
        stored(cache, tokens)
        root.rename(tmp_path / "away")
        if seen:
            cache._tiers.lower[0].ledger.session.look()
        try:
            cache.weights_changed()
        except StoreError as error:
            refused = True
            assert "Repair it, remove its store" in str(error)
        assert hit_of(cache, tokens).num_tokens == 0
    shutil.rmtree(root, ignore_errors=True)
    (tmp_path / "away").rename(root)
    with cache_at(None, tmp_path) as cache:
        assert refused or hit_of(cache, tokens).num_tokens == 0


def test_a_store_that_was_deleted_does_not_keep_the_weights_from_changing(
    tmp_path: Path,
) -> None:
    with cache_at(None, tmp_path) as cache:
        stored(cache, prompt(4))
        shutil.rmtree(tmp_path / "disk")
        assert cache.weights_changed() == 1


@pytest.mark.parametrize("kind", ["record", "of older versions"])
def test_a_link_in_the_place_of_an_epoch_writes_nothing_elsewhere(
    tmp_path: Path, kind: str
) -> None:
    """Whoever may write in the root could let this user overwrite any of its files."""
    other = tmp_path / "other"
    other.write_text("what this user wrote")
    record = EpochRecord(tmp_path, "0" * 16)
    place = record.path if kind == "record" else record.old_path
    place.symlink_to(other)
    for work in (record.reserve, lambda: record.write(Epoch(300, 7))):
        with contextlib.suppress(OSError), record.locked():
            work()
    assert other.read_text() == "what this user wrote"
    assert other.stat().st_blocks * 512 <= 4096


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_can_neither_note_new_weights_nor_be_cleared_is_an_error_with_the_remedy(
    shm_root: Path, tmp_path: Path, tier: str
) -> None:
    """After a restart of the machine it would serve KV of the old weights. The other tiers are
    cleared all the same.
    """
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        spoil(cache, "host")
        spoil(cache, "disk")
        ledgers = {
            "host": cache._tiers.host.ledger,
            "disk": cache._tiers.lower[0].ledger,
        }  # type: ignore[union-attr]
        kept = ledgers.pop(tier)
        [cleared] = ledgers.values()
        shutil.rmtree(kept.directory)
        kept.session.look()
        with pytest.raises(
            StoreError, match=f"nor be cleared: .*with a name .*{tier}: .*"
        ):
            cache.weights_changed()
        assert not list(admin.list_chunks(cleared))
        assert hit_of(cache, tokens).num_tokens == 0


def spoil(cache: Cache, tier: str = "disk") -> None:
    """Make the record of a tier's root one that cannot be written, as on a disk that may only be
    read.
    """
    file = cache._weights._epoch._records[tier].path
    file.unlink()
    file.symlink_to("/nowhere/epochs")


class OwnShared(DiskTier):
    """A tier that a user has written, over a store that other machines use too."""

    name = "own"
    is_shared = True


def test_a_shared_tier_of_ones_own_is_left_out_while_its_weights_have_no_name(
    tmp_path: Path,
) -> None:
    tokens = prompt(4)
    own = OwnShared.open(LAYOUT, tmp_path / "own", 1 << 20)
    config = Config(
        chunk_tokens=CHUNK, host_size=0, deadline_seconds=PATIENT_SECONDS
    )
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, tiers=[own]) as cache:
        stored(cache, tokens)
        assert hit_of(cache, tokens).num_tokens == 4 * CHUNK
        with pytest.raises(
            StoreError,
            match="no local tier has a directory: call weights_changed with a name",
        ):
            cache.weights_changed()  # a cache opened later would not know
        assert put(cache, tokens).num_chunks == 0
        assert hit_of(cache, tokens).num_tokens == 0
        cache.weights_changed("run 7")
        stored(cache, tokens)
        assert hit_of(cache, tokens).num_tokens == 4 * CHUNK


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    class Half:
        name = "half"
        chunk_bytes = LAYOUT.chunk_bytes

    with pytest.raises(
        ValueError,
        match=r"Half is not a whole tier: derive it from pagoda\.tiers\.Tier",
    ):
        Cache(
            Config(chunk_tokens=CHUNK, host_size=0),
            namespace=NAMESPACE,
            layout=LAYOUT,
            tiers=[Half()],
        )  # type: ignore[list-item]


def test_two_caches_of_one_model_take_new_weights_as_one(
    shm_root: Path, tmp_path: Path
) -> None:
    """As Transformers' prompts and documents: another form of KV of the same weights, over the same
    roots.
    """
    tokens = prompt(4)
    form = KVLayout.opaque(CHUNK, 8192, "another form")
    with (
        cache_at(shm_root, tmp_path) as cache,
        Cache(
            cache.config, namespace=NAMESPACE, layout=form, weights_of=cache
        ) as other,
    ):
        for version in ("", "run 7, step 1", "run 7, step 2", ""):
            for each in (cache, other):
                other.store(tokens, kv_of(tokens, form).transfer)
                stored(cache, tokens)
                each.weights_changed(
                    version and f"{version} of {each.layout.fingerprint}"
                )
                assert (
                    cache.lookup(tokens).num_tokens
                    == other.lookup(tokens).num_tokens
                    == 0
                )
                present = cache.present_namespace()
                assert present.with_(
                    layout=""
                ) == other.present_namespace().with_(layout="")
                assert version in present.weights
        spoil(cache)
        other.store(tokens, kv_of(tokens, form).transfer)
        stored(cache, tokens)
        disks = [one._tiers.lower[0] for one in (cache, other)]
        assert other.flush(PATIENT_SECONDS)
        for disk in disks:
            assert disk.stats()["ready"]
        cache.weights_changed()
        assert not any(disk.stats()["ready"] for disk in disks), (
            "their root has not kept the epoch"
        )


FULL = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.cache.kit import cache_at, hit_of, prompt, stored

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", where], check=True)
for before in range(2):
    with cache_at(None, where) as cache:
        stored(cache, prompt(4, before))
        junk = os.open(where / "junk", os.O_CREAT | os.O_WRONLY)
        for piece in (1 << 20, 4096, 1):
            try:
                while True:
                    os.write(junk, bytes(piece))
            except OSError:
                pass
        assert os.statvfs(where).f_bavail == 0
        assert cache.weights_changed() == before + 1
        assert hit_of(cache, prompt(4, before)).num_tokens == 0
    with cache_at(None, where) as cache:
        assert cache._weights.scope()[0].weights_epoch == before + 1
        assert hit_of(cache, prompt(4, before)).num_tokens == 0
print("fine")
"""


@pytest.mark.slow
def test_a_full_disk_does_not_keep_the_epoch_from_being_raised(
    tmp_path: Path,
) -> None:
    assert "fine" in succeeded(
        python(FULL, tmp_path, ROOT, before=own_mounts(), seconds=200)
    )


def test_without_a_shared_tier_it_holds_in_this_process() -> None:
    weights = WeightsEpoch({}, "m")
    assert raised(weights).number == 1
    assert weights.epoch().number == 1


def test_nothing_stored_before_hits_again(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an engine's call compares for only a millisecond
    monkeypatch.setattr(miss_explainer, "_BUDGET_NS", 60 * 10**9)
    monkeypatch.setattr(miss_explainer, "_LIST_SECONDS", 60.0)
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        keys = cache.keys(tokens)
        assert cache.weights_changed() == 1
        assert cache.keys(tokens) != keys
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.OTHER_NAMESPACE
        assert "weights_epoch" in hit.detail
        stored(cache, tokens)
        assert hit_of(cache, tokens).num_tokens == 64
    with cache_at(
        shm_root / "rebooted", tmp_path
    ) as cache:  # the host tier was removed, the disk has the epoch
        assert hit_of(cache, tokens).by_tier == {"disk": 64}
        assert cache.namespace.weights_epoch == 0
        assert cache._weights.scope()[0].weights_epoch == 1


def test_an_epoch_of_the_configuration_is_kept_apart_from_the_machine_s(
    shm_root: Path,
) -> None:
    tokens = prompt(2)
    with cache_at(shm_root, None, NAMESPACE.with_(weights_epoch=1)) as cache:
        stored(cache, tokens)
    with cache_at(shm_root, None) as cache:
        cache.weights_changed()
        assert cache.lookup(tokens).num_tokens == 0


def test_named_versions_share_and_never_mix(
    shm_root: Path, tmp_path: Path
) -> None:
    """Also beside a cache that has the old weights, after a restart, and whatever epoch the machine
    has.
    """
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as base:
        stored(base, tokens)
        with (
            cache_at(shm_root, tmp_path) as one,
            cache_at(shm_root, tmp_path) as two,
        ):
            assert one.weights_changed("run 7, step 1") == 0
            assert hit_of(one, tokens).num_tokens == 0
            stored(one, tokens)
            assert two.weights_changed("run 7, step 2") == 0
            assert hit_of(two, tokens).num_tokens == 0
            two.weights_changed("run 7, step 1")
            assert hit_of(two, tokens).num_tokens == 64
            assert one.lookup(tokens, weights_version="").num_tokens == 64
            assert (
                one.lookup(tokens, weights_version="run 7, step 2").num_tokens
                == 0
            )
        assert hit_of(base, tokens).num_tokens == 64, (
            "its weights are those of before"
        )
        base.weights_changed()
    with cache_at(shm_root, tmp_path) as restarted:
        assert hit_of(restarted, tokens).num_tokens == 0
        assert restarted.weights_changed("run 7, step 1") == 1
        assert hit_of(restarted, tokens).num_tokens == 64


@pytest.mark.parametrize("version", [3, np.int64(3), 0, True, None, b"3", ["3"]])
def test_a_version_that_is_no_text_is_refused_and_changes_nothing(
    shm_root: Path, version: object
) -> None:
    """numpy's number made every later call raise, 0 made the chunks of all processes useless, and 3
    was not the weights that another process named "3".
    """
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        stored(cache, tokens)
        with pytest.raises(ValueError, match="a version of weights must be str"):
            cache.weights_changed(version)  # type: ignore[arg-type]
        if version is not None:
            with pytest.raises(
                ValueError, match="version of weights must be str"
            ):
                cache.lookup(tokens, weights_version=version)  # type: ignore[arg-type]
        assert hit_of(cache, tokens).num_tokens == 64
        assert cache.weights_changed() == 1


def test_a_change_without_a_name_ends_a_version(shm_root: Path) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as one, cache_at(shm_root, None) as two:
        for cache in (one, two):
            cache.weights_changed("step 1")
        stored(one, tokens)
        for _ in range(2):  # also after an epoch that is not the first
            two.weights_changed()
            for cache in (one, two):
                assert hit_of(cache, tokens).num_tokens == 0
                cache.weights_changed("step 1")
                assert hit_of(cache, tokens).num_tokens == 64


def _another_process(shm_root: Path, tmp_path: Path, pipe: Connection) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path) as cache:
        pipe.send(cache.lookup(tokens).num_tokens)
        assert pipe.recv() == "changed"
        pipe.send(cache.lookup(tokens).num_tokens)
        pipe.send(put(cache, tokens).num_chunks)


@pytest.mark.slow
def test_other_processes_notice_at_their_next_call(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    here, there = SPAWN.Pipe()
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens)
        process = SPAWN.Process(
            target=_another_process, args=(shm_root, tmp_path, there)
        )
        process.start()
        assert here.recv() == 64
        cache.weights_changed()
        here.send("changed")
        assert here.recv() == 0
        assert here.recv() == 4
        process.join(60)
        assert hit_of(cache, tokens).num_tokens == 64
