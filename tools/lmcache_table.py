"""Write the table of LMCache's fields from an installed LMCache: `PYTHON_WITH_LMCACHE
tools/lmcache_table.py > src/pagoda_tools/migrate/lmcache_table.json`.

`fields`: name -> [type, default]; `renamed`: an older name that LMCache still reads -> the present
name;
`extra`: names that its code reads from extra_config; `variables`: LMCACHE_ variables that are no
fields.
"""

import json
import re
import sys
from pathlib import Path

import lmcache
from lmcache.v1.config import (
    _CONFIG_ALIASES,
    _CONFIG_DEFINITIONS,
    _DEPRECATED_CONFIGS,
)

TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "_to_bool": "bool",
    "_to_int_list": "ints",
    "_to_float_list": "floats",
    "_to_str_list": "strs",
    "_parse_local_disk": "disks",
    "_to_hidden_states_retrieve_mode": "mode",
}
SPECIAL = {"extra_config": "mapping", "runtime_plugin_locations": "one or more"}
EXTRA = re.compile(
    r"""(?:extra_config|extra)(?:\.get)?[\[(]\s*["']([A-Za-z0-9_.]+)["']"""
)
EXTRA_VALUE = re.compile(
    r"""get_extra_config_value\(\s*["']([A-Za-z0-9_.]+)["']"""
)
VARIABLE = re.compile(r"LMCACHE_[A-Z0-9_]+")
READ = re.compile(
    r"""environ(?:\.get)?[\[(]\s*["'](LMCACHE_[A-Z0-9_]+)|getenv\(\s*["'](LMCACHE_[A-Z0-9_]+)"""
)


def type_of(name: str, converter: object) -> str:
    return SPECIAL.get(name) or TYPES[converter.__name__]


def plain(value: object) -> object:
    return (
        repr(value)
        if isinstance(value, float) and value == float("inf")
        else value
    )


def main() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(lmcache.__file__).parent.rglob("*.py")
    ]
    extra: set[str] = set()
    variables: set[str] = set()
    for source in sources:
        extra.update(EXTRA.findall(source), EXTRA_VALUE.findall(source))
        variables.update(one or other for one, other in READ.findall(source))
    fields = {
        name: [type_of(name, each["env_converter"]), plain(each["default"])]
        for name, each in sorted(_CONFIG_DEFINITIONS.items())
    }
    table = {
        "version": "0.5.6",
        "fields": fields,
        "renamed": {
            old: new
            for old, new in sorted(_CONFIG_ALIASES.items())
            if old in _DEPRECATED_CONFIGS
        },
        "extra": sorted(extra - {"chunk_size"}),
        "variables": sorted(
            one
            for one in variables
            if one.removeprefix("LMCACHE_").lower() not in fields
        ),
    }
    json.dump(table, sys.stdout, indent=0)
    print()


main()
