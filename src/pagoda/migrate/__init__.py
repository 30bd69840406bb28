"""Reads configurations of other caches. `lmcache` translates them with `lmcache_fields` and `lmcache_urls`."""
