"""Shared parts of tests, benchmarks and examples: real servers, shaped networks, a cache that a
trace drives.

- `servers`: Redis, S3 and WebDAV servers on loopback ports
- `netns`: network namespaces as machines, joined by virtual cables that can be shaped and cut
- `live_cache`: a real cache with tiny chunks, on a clock that only a trace advances
"""
