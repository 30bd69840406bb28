"""Reads configurations of other caches. `lmcache_loader` reads LMCache's as LMCache does, `lmcache`
translates it with `lmcache_fields` and `lmcache_urls`."""
