"""Read configurations of other caches. `lmcache` translates, by `lmcache_fields` and `lmcache_urls`."""
