#!/usr/bin/env bash
# LMCache 0.5.6 has a table that gives older names of its options their present names: enable_xpyd is enable_pd,
# controller_url is controller_pull_url, nixl_role is pd_role, and so on. A good guess is that a configuration with an
# older name still works. It does not for ten of the twelve: a name of the table is renamed only if it is also in a
# second table, of deprecated names. The others are logged as unknown, and the option keeps its default: a file that
# switches disaggregated prefill on by its older name starts an engine with it off.
#
# Seen with lmcache 0.5.6 on Python 3.11:
#   12 older names, 2 of them work: external_backends plugin_locations
#   enable_xpyd: true  ->  enable_pd = False
#   controller_url: "127.0.0.1:9000"  ->  controller_pull_url = None
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check --no-deps lmcache==0.5.6
"$work/venv/bin/python" -m pip -qq install --disable-pip-version-check pyyaml==6.0.3 requests==2.34.2 numpy==2.2.6 msgspec==0.20.0 2>>"$work/log"
cat > "$work/look.py" <<'P'
import logging
import sys

logging.disable(logging.CRITICAL)
from lmcache.v1.config import _CONFIG_ALIASES, _CONFIG_DEFINITIONS, LMCacheEngineConfig

VALUES = {
    "_to_bool": True,
    "int": 7,
    "str": "given",
    "_to_int_list": [7],
    "_to_str_list": ["given"],
    "<lambda>": ["given"],
}
working = []
for older, present in sorted(_CONFIG_ALIASES.items()):
    value = VALUES[_CONFIG_DEFINITIONS[present]["env_converter"].__name__]
    if getattr(LMCacheEngineConfig.from_dict({older: value}), present) == value:
        working.append(older)
print(f"{len(_CONFIG_ALIASES)} older names, {len(working)} of them work:", *working)
pd = LMCacheEngineConfig.from_dict({"enable_xpyd": True}).enable_pd
url = LMCacheEngineConfig.from_dict({"controller_url": "127.0.0.1:9000"}).controller_pull_url
print(f"enable_xpyd: true  ->  enable_pd = {pd}")
print(f'controller_url: "127.0.0.1:9000"  ->  controller_pull_url = {url}')
sys.exit(working != ["external_backends", "plugin_locations"] or pd or url is not None)
P
cd "$work"
LMCACHE_TRACK_USAGE=false "$work/venv/bin/python" "$work/look.py" 2>>"$work/log" | grep -E "older names|->" || { tail -5 "$work/log"; exit 1; }
[ "${PIPESTATUS[0]}" -eq 0 ]
