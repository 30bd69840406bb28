"""Every operator's verb on every kind of store: what it does not act on, it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.config.remote_urls import parse
from pagoda.keys import chunk_keys
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda_tools.cli.remote_stores import leading
from testbed.servers import redis_server
from tests.cli.shelf import CHUNK, LLAMA, put, run_here
from tests.cli.test_remotes import share
from tests.serve.kit import Server, server

TOKENS = ",".join(map(str, range(64)))
DEAD = "redis://127.0.0.1:1/0"  # nobody listens there
LOCAL = ("raw", "raw disk", "lossy", "older", "private")


class Machine:
    """Stores of every kind, each with the four chunks of one prompt; one that cannot be opened;
    remote tiers.
    """

    def __init__(self, shm: Path, disk: Path, url: str) -> None:
        self.url = url
        self.variables = {
            "PAGODA_HOST_PATH": str(shm),
            "PAGODA_DISK_PATH": str(disk),
            "PAGODA_DISK_SIZE": "1GiB",
            "PAGODA_REMOTE": url,
        }
        known = {"slots": 64, "slot_bytes": 8192, "chunk_bytes": 4096}
        specs = {
            "raw": StoreSpec(root=shm, name="1234.4", kind="memory", **known),  # type: ignore[arg-type]
            "raw disk": StoreSpec(root=disk, name="1234", kind="file", **known),  # type: ignore[arg-type]
            "lossy": StoreSpec(root=disk, name="1234.q4", kind="file", **known),  # type: ignore[arg-type]
            # it does not know the size of its chunks
            "older": StoreSpec(
                root=shm, name="5678", kind="memory", slots=64, slot_bytes=4096
            ),
            "private": StoreSpec(
                root=shm, name="9.4", kind="memory", private=True, **known
            ),  # type: ignore[arg-type]
        }
        self.ledgers = {kind: Ledger.open(spec) for kind, spec in specs.items()}
        for ledger in self.ledgers.values():
            put(ledger, LLAMA, range(64))
        Ledger.open(
            StoreSpec(
                root=disk, name="another", kind="file", slots=4, slot_bytes=4096
            )
        ).close()
        self.broken = disk / "another"
        # of a version that is not known
        (self.broken / "state").write_bytes(b"{}")
        recorded_tiers.add("remote", DEAD)
        share(url, LLAMA, 4)

    def chunks(self) -> dict[str, int]:
        return {
            kind: admin.gauges(ledger)["ready"]
            for kind, ledger in self.ledgers.items()
        }

    def pinned(self) -> dict[str, int]:
        return {
            kind: sum(map(len, admin.list_pins(ledger).values()))
            for kind, ledger in self.ledgers.items()
        }

    def run(self, *words: str) -> tuple[int, str]:
        """Run a command; return its exit code and all that it said."""
        code, out, err = run_here(*words, **self.variables)
        return code, out + err


@pytest.fixture
def machine(shm_root: Path, tmp_path: Path) -> Iterator[Machine]:
    with redis_server() as running:
        made = Machine(
            shm_root / "host", tmp_path / "disk", f"{running.url}/0?prefix=verbs"
        )
        yield made
        for ledger in made.ledgers.values():
            ledger.close()


def in_redis(machine: Machine) -> int:
    """Return how many leading chunks of the prompt the shared store has."""
    keys = chunk_keys(list(range(64)), LLAMA.root, CHUNK)
    return leading(parse(machine.url), LLAMA.root, keys)


@pytest.mark.slow
def test_what_a_command_leaves_is_named(machine: Machine) -> None:
    prompt = ("--tokens", TOKENS)
    redis = parse(machine.url).redacted
    broken = str(machine.broken)
    for words in (
        ("ls",),
        ("ls", "--by", "namespace"),
        ("stats",),
        ("check",),
        ("explain", *prompt),
    ):
        _, said = machine.run(*words, "--json")
        for place in (broken, "127.0.0.1:1"):
            assert place in said, (words, place)
    code, said = machine.run("pin", *prompt)
    assert code == 1 and all(place in said for place in (broken, redis, DEAD)), (
        said
    )
    assert set(machine.pinned().values()) == {4}
    code, said = machine.run("unpin")
    assert code == 1 and all(place in said for place in (broken, redis, DEAD)), (
        said
    )
    assert set(machine.pinned().values()) == {0}
    code, said = machine.run("clear", "--yes", "--local")
    assert code == 1 and all(place in said for place in (broken, redis, DEAD)), (
        said
    )
    assert set(machine.chunks().values()) == {0}
    assert in_redis(machine) == 4
    code, said = machine.run("clear", "--yes", "--json")
    assert code == 1
    assert broken in said
    assert DEAD in said
    assert in_redis(machine) == 0
    for ledger in machine.ledgers.values():
        ledger.close()
    code, said = machine.run("remove", "--yes")
    assert redis in said and DEAD in said, said


def post(page: Server, path: str, asked: object) -> tuple[int, str]:
    answer = page.ask(
        "POST",
        path,
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    return answer.status, answer.body.decode()


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_the_page_leaves_is_named(machine: Machine, is_whole: bool) -> None:
    """`is_whole`: all stores can be opened."""
    prompt = {"tokens": list(range(64))}
    redis = parse(machine.url).redacted
    broken = str(machine.broken)
    if is_whole:
        (machine.broken / "state").unlink()
        for file in machine.broken.iterdir():
            file.unlink()
        machine.broken.rmdir()
    with server(**machine.variables) as page:
        status, said = post(page, "/explain", prompt)
        assert status == 200
        assert (broken in said) is not is_whole
        for path, asked, left in (("/pin", prompt, 4), ("/unpin", {}, 0)):
            status, said = post(page, path, asked)
            assert status == (200 if is_whole else 503)
            assert (
                redis in said
                and DEAD in said
                and (broken in said) is not is_whole
            ), said
            assert machine.pinned() == dict.fromkeys(LOCAL, left)
        _, said = post(page, "/warm", prompt)
        assert (
            redis in said and DEAD in said and (broken in said) is not is_whole
        ), said
        tiers = page.ask("GET", "/stats.json").json["tiers"]
        assert {
            row["kind"]: row["chunks"] for row in tiers if row["kind"] != "remote"
        } == {  # type: ignore[attr-defined]
            "host": 8,
            "disk": 8,
        }
        status, said = post(page, "/clear", {"namespace": LLAMA.root.hex()})
        assert status == (200 if is_whole else 503)
        assert (
            redis in said and DEAD in said and (broken in said) is not is_whole
        ), said
        assert machine.chunks() == dict.fromkeys(LOCAL, 0)
        for ledger in machine.ledgers.values():
            put(ledger, LLAMA, range(64))
        post(page, "/clear", {"everything": True})
        assert machine.chunks() == dict.fromkeys(LOCAL, 0)
        assert in_redis(machine) == 4
