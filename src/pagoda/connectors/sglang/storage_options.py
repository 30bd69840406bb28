"""The options in `--hicache-storage-backend-extra-config`: all options of `Config`, and a few of
this connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.errors import ConfigError
from pagoda.config import Config, option_names
from pagoda.config.sources import load
from pagoda.connectors.extra_options import ExtraOptions

TESTED = ("0.5.23",)  # SGLang changes this interface in any release
_OWN = ("weights", "salt", "allow_untested_sglang")
# options that SGLang reads from the same mapping; it removes the last five before a storage sees it
OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
_WHERE = "--hicache-storage-backend-extra-config"
# SGLang ends itself if its storage is still working 10 s after a flush began. A thread of SGLang
# may ask all pools one after the other before it ends: together they may take so long.
LIMIT_SECONDS = 8.0
_MOST_SECONDS = 4.0  # without progress


@dataclass(frozen=True)
class StorageOptions:
    """The options of one storage. Immutable: threads may share it.

    `weights` names the checkpoint instead of the digest of its files; None = read the files. `salt`
    separates tenants (a secret). `allow_untested_sglang`: run with a version of SGLang that was not
    tested with this release.
    """

    config: Config
    weights: str | None = None
    salt: str = field(default="", repr=False)
    allow_untested_sglang: bool = False


def read_options(extra_config: Mapping[str, Any]) -> StorageOptions:
    """Return the options of SGLang's mapping, of the files and of the environment. Changes nothing.

    Raises ConfigError for an unknown key (with the nearest known one) or an invalid value.
    """
    known = (*(name for name in option_names() if name != "chunk_tokens"), *_OWN)
    if "chunk_tokens" in extra_config:
        raise ConfigError(
            f"{_WHERE}: chunk_tokens: a chunk is a page of SGLang; set its --page-size"
        )
    extra = ExtraOptions(_WHERE, extra_config)
    extra.refuse_unknown(known, OF_SGLANG)
    config = load(
        **{
            name: extra_config[name]
            for name in known
            if name in extra_config and name not in _OWN
        }
    ).for_engine()
    check_config(config)
    allow = extra.flag("allow_untested_sglang")
    return StorageOptions(
        config, extra.text("weights"), extra.text("salt") or "", allow
    )


def check_config(config: Config) -> None:
    """Raise ConfigError for a configuration that does not work under SGLang. Changes nothing."""
    if config.host_size == 0:
        raise ConfigError(
            "host_size = 0: pages pass through the host tier to the tiers below; set host_size, "
            "such as '8GiB'"
        )
    if config.min_hit_tokens:
        raise ConfigError(
            f"min_hit_tokens = {config.min_hit_tokens}: SGLang loads a prompt in parts, and "
            "short parts would never "
            "hit; leave it 0 under SGLang, whose own prefetch_threshold does this for whole prompts"
        )
    if config.deadline_seconds > _MOST_SECONDS:
        raise ConfigError(
            f"deadline_seconds = {config.deadline_seconds:g}: SGLang ends itself at a flush "
            "(flush_cache) if its "
            f"storage does not answer for 10 s; set at most {_MOST_SECONDS:g}"
        )


def check_version(version: str, allow_untested: bool) -> None:
    """Raise ConfigError for an SGLang that was not tested, unless that is allowed."""
    if version not in TESTED and not allow_untested:
        raise ConfigError(
            f"SGLang {version}: this release was tested with {', '.join(TESTED)}, and SGLang may "
            "change what a storage "
            "is asked for in any release; install that one, or set allow_untested_sglang"
        )
