"""Compare the import with LMCache's own loader: `make peers-test`. Needs LMCache; prints how many
agree.

200 seeded files and environments, with the words that people write. A configuration agrees if both
sides end with the same value of every field, or if the import refuses it in one line that names the
field.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from lmcache.v1.config import LMCacheEngineConfig

from pagoda.base.errors import ConfigError
from pagoda_tools.migrate.lmcache import read, translate, variables_in
from pagoda_tools.migrate.lmcache_loader import load, table

FILES = 200
TABLE = (
    Path(__file__).parents[2]
    / "src"
    / "pagoda_tools"
    / "migrate"
    / "lmcache_table.json"
)
MAKER = Path(__file__).parents[2] / "tools" / "lmcache_table.py"
BOOLS = [
    True,
    False,
    None,
    "yes",
    "on",
    "true",
    "True",
    "1",
    "0",
    "off",
    "no",
    1,
    0,
    "TRUE ",
]
BY_KIND: dict[str, list[object]] = {
    "bool": BOOLS,
    "int": [0, 7, 128, "64", " 256 ", 2.0, None, "many"],
    "float": [0, 5, 2.5, "40", "1e1", None, "much"],
    "str": ["a", "", "LRU", None, 3, "'quoted'"],
    "ints": [[1, 2], "1,2", 3, None, "1, x"],
    "floats": [[0.1], "0.1,0.2", 0.5, None],
    "strs": [["a"], "a, b", "", None],
    "disks": ["/a", "file:///a/", "/a/,/b/", None, ""],
    "mapping": [{"use_odirect": True}, None, '{"a": 1}', ""],
    "one or more": [["p"], "p", "", None],
}
MODES = ["prefix_strict", "skip_missing_chunks", "legacy", None]


def value_for(name: str, rng: random.Random) -> object:
    if name == "hidden_states_retrieve_mode":
        return rng.choice(MODES)
    return rng.choice(BY_KIND[table().fields[name][0]])


def theirs(
    file: Path | None, variables: dict[str, str]
) -> dict[str, object] | None:
    """Return LMCache's values before it validates them; None if its loader itself fails."""
    saved = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith("LMCACHE_")
    }
    os.environ.update(variables)
    validate = LMCacheEngineConfig.validate
    LMCacheEngineConfig.validate = lambda self: self
    try:
        if file is None:
            config = LMCacheEngineConfig.from_env()
        else:
            config = LMCacheEngineConfig.from_file(str(file))
            config.update_config_from_env()
        found: dict[str, object] = config.to_dict()
        return found
    except Exception:  # noqa: BLE001
        # whatever its loader raises: the engine does not start
        return None
    finally:
        LMCacheEngineConfig.validate = validate
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(saved)


def one(rng: random.Random, directory: Path) -> str:
    """Return how one configuration differs; empty if it does not."""
    names = rng.sample(sorted(table().fields), rng.randint(1, 8))
    fields = {name: value_for(name, rng) for name in names if rng.random() < 0.7}
    file = None
    if fields and rng.random() < 0.8:
        file = directory / "lmcache.yaml"
        file.write_text(yaml.safe_dump(fields))
    variables = {}
    for name in names:
        value = value_for(name, rng)
        if value is not None and rng.random() < 0.5:
            text = (
                json.dumps(value)
                if isinstance(value, dict | list)
                else str(value)
            )
            variables[f"LMCACHE_{name.upper()}"] = (
                f'"{text}"' if rng.random() < 0.2 and '"' not in text else text
            )
    expected = theirs(file, variables)
    try:
        loaded = load(read(file) if file else None, variables_in(variables))
    except ConfigError as refusal:
        bad = str(refusal)
        if expected is None or any(bad.startswith(name) for name in names):
            return ""
        return f"refused: {bad}"
    if expected is None:
        return ""  # the engine does not start there; the import may say more
    for name, value in loaded.fields.items():
        if name != "lmcache_instance_id" and value != expected[name]:
            return (
                f"{name}: LMCache {expected[name]!r}, here {value!r} ({fields.get(name)!r}, "
                f"{variables})"
            )
    set_there = [
        name
        for name, value in expected.items()
        if name not in ("lmcache_instance_id", "pd_allocation_timeout_sec")
        and value != table().fields[name][1]
        and name not in loaded.fields
    ]
    if set_there:
        return f"set there and not here: {set_there}"
    try:
        made = translate(loaded)
    except ConfigError as refusal:
        # an option that no value of LMCache's can be, such as a chunk of 0 tokens
        begins = (*names, "chunk_", "host_", "min_", "disk_", "blend_")
        return "" if str(refusal).startswith(begins) else str(refusal)
    named = {finding.field for finding in made.findings}
    lost = [
        name
        for name, value in loaded.fields.items()
        if value not in (None, "")
        and name != "extra_config"
        and name not in named
    ]
    return f"no answer for {lost}" if lost else ""


def main() -> int:
    """Compare; return the exit code."""
    made = subprocess.run(
        [sys.executable, MAKER], capture_output=True, text=True, check=True
    ).stdout
    fresh = json.loads(made[made.index("{") :])
    same_table = fresh == json.loads(TABLE.read_text())
    print(
        f"the table of {len(fresh['fields'])} fields is LMCache's: {same_table}"
    )
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(FILES):
            difference = one(random.Random(seed), Path(directory))
            if difference:
                wrong.append(f"seed {seed}: {difference}")
    for text in wrong:
        print(text)
    print(
        f"{FILES - len(wrong)} of {FILES} configurations are read as LMCache reads them"
    )
    return bool(wrong) or not same_table


sys.exit(main())
