"""Too little space for any file, or a file system that fills up: an error that says what to do,
never a signal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.support import own_mounts, python, succeeded

pytestmark = pytest.mark.timeout(300)

SMALL = """
import os, subprocess, sys, traceback
from pathlib import Path
from pagoda.ledger import admin
from support import Store, keys
from pagoda.base.errors import NoRoomError, StoreError

where, lying, notes = Path(sys.argv[1]) / "mount", sys.argv[2] == "lying", Path(sys.argv[1])
where.mkdir()

def mount(nbytes):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", where], check=True)

def used():
    status = os.statvfs(where)
    return (status.f_blocks - status.f_bfree) * status.f_frsize

def apart(work):
    # in a child: a process keeps what it locks open, and with it the file system busy
    pid = os.fork()
    if pid == 0:
        try:
            code = work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            code = 99
        os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFEXITED(status), f"signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) != 99
    return os.WEXITSTATUS(status)

def measure():
    store = Store(where / "root")
    files = [path for path in store.ledger.directory.rglob("*") if path.is_file()]
    sizes = sorted((path.stat().st_blocks * 512 for path in files), reverse=True)
    (notes / "sizes").write_text(" ".join(map(str, [used(), *sizes])))
    store.close()
    return 0

def attempt(edge, need):
    try:
        store = Store(where / "root")
    except NoRoomError as error:
        assert any(word in str(error) for word in ("room", "size")), error
        root = where / "root"
        files = [path for path in root.rglob("*") if path.is_file()] if root.exists() else []
        left = [path for path in files if path.stat().st_size > 65536]
        assert not left, f"left behind with {edge}: {left}"
        return 1
    assert edge >= need - 65536, f"opened with {edge} of {need} bytes"
    assert store.save(keys(range(40))) > 0 and store.load(keys(range(40))) > 0
    admin.check(store.ledger)
    store.close()
    return 0

mount(256 << 20)
apart(measure)
subprocess.run(["umount", where], check=True)
need, *sizes = map(int, (notes / "sizes").read_text().split())
edges = {sum(sizes[:n]) - 4096 for n in range(1, len(sizes) + 1)} | {sum(sizes[n:]) - 4096 for n in range(len(sizes))}
edges |= set(range(8192, need, need // 24 // 4096 * 4096)) | {need + (1 << 20)}
if lying:  # the file system promises room that it has not got, as with quotas or a race for the last bytes
    real = os.statvfs
    def statvfs(path):
        values = list(real(path))
        values[2] = values[3] = values[4] = 1 << 30
        return os.statvfs_result(values)
    os.statvfs = statvfs
refused = 0
for edge in sorted(edge // 4096 * 4096 for edge in edges if 4096 <= edge):
    mount(edge)
    last = apart(lambda: attempt(edge, need))
    refused += last
    subprocess.run(["umount", where], check=True)
assert last == 0, "with room enough it opens"
print(refused)
"""  # noqa: E501

FULL = """
import os, subprocess, sys
from pathlib import Path
from pagoda.ledger import admin
from support import FIELDS, NAMESPACE, Store, key, keys

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs", where], check=True)
store = Store(where / "root", slots=64)
fd = os.open(where / "junk", os.O_CREAT | os.O_WRONLY)
for piece in (1 << 20, 4096, 1):
    try:
        while True:
            os.write(fd, bytes(piece))
    except OSError:
        pass
for turn in range(60):
    prompt = [key(turn * 1000 + n) for n in range(20)]
    assert store.save(prompt) == 20
    assert store.load(prompt) == 20
    admin.pin(store.ledger, prompt[:1], f"owner {turn}")
    store.ledger.namespaces.register(bytes([turn]) * 32, FIELDS | {"model": f"model {turn}"})
    if turn % 10 == 0:
        assert admin.clear(store.ledger, NAMESPACE) >= 20
        assert store.load(prompt) == 0
    if turn % 10 == 5:
        admin.unpin(store.ledger, None, f"owner {turn}")
        admin.remove(store.ledger, prompt)
    admin.check(store.ledger)
store.save(keys(range(10)))
if os.fork() == 0:
    try:
        assert store.load(keys(range(10))) == 10
        assert store.save(keys(range(12))) == 12
    except BaseException:  # noqa: BLE001
        os._exit(1)
    os._exit(0)
assert os.wait()[1] == 0
store.close()
again = Store(where / "root", slots=64)
assert again.load(keys(range(10))) == 10
admin.check(again.ledger)
again.close()
print("fine")
"""


FULL_DISK = """
import os, subprocess, sys
from pathlib import Path
from pagoda.ledger import admin, rebuild
from support import *

where = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs", where], check=True)
tier = disk(where / "root", slots=64)
fd = os.open(where / "junk", os.O_CREAT | os.O_WRONLY)
for piece in (1 << 20, 4096, 1):
    try:
        while True:
            os.write(fd, bytes(piece))
    except OSError:
        pass
for turn in range(20):
    prompt = keys(range(turn * 1000, turn * 1000 + 20))
    assert save_to(tier, prompt) == 20 and load_from(tier, prompt) == prompt
    tier.register(Namespace(model=f"model {turn}"))
    admin.check(tier.ledger)
assert tier.clear(TENANT.root) > 20, "clearing needs no room"
assert load_from(tier, prompt) == []
assert save_to(tier, prompt) == 20
tier.close()
for turn in range(3):
    tier = disk(where / "root", slots=64)
    assert not len(rebuild.unscanned(tier.ledger)), "it was closed cleanly, full or not"
    assert load_from(tier, prompt) == prompt
    assert save_to(tier, keys(range(9000 + turn, 9010 + turn))) == 10
    tier.close()
tier = disk(where / "root", slots=64)
assert tier.wait_ready(60) and load_from(tier, prompt) == prompt
tier.clear(TENANT.root)
tier.close()
os.unlink(where / "junk")
os.close(fd)
[tables] = (where / "root").glob("*/data.mdb")
tables.unlink()
tier = disk(where / "root", slots=64)
assert tier.wait_ready(60) and load_from(tier, prompt) == [], "what was cleared does not come back"
admin.check(tier.ledger)
tier.close()
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("free_room", ["honest", "lying"])
def test_a_file_system_too_small_for_each_file_in_turn_is_an_error_with_the_remedy(
    tmp_path: Path, free_room: str
) -> None:
    printed = succeeded(
        python(SMALL, tmp_path, free_room, before=own_mounts(), seconds=200)
    )
    assert int(printed.split()[-1]) >= 20


@pytest.mark.slow
def test_a_file_system_that_fills_up_after_the_opening_disturbs_nothing(
    tmp_path: Path,
) -> None:
    assert "fine" in succeeded(
        python(FULL, tmp_path, before=own_mounts(), seconds=200)
    )


@pytest.mark.slow
def test_a_disk_that_is_full_to_the_last_byte_keeps_working(
    tmp_path: Path,
) -> None:
    assert "fine" in succeeded(
        python(FULL_DISK, tmp_path, before=own_mounts(), seconds=200)
    )
