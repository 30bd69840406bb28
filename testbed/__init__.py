"""What tests, benchmarks and examples share: real servers, shaped networks, a cache that a trace drives.

- `servers`: Redis, S3 and WebDAV servers on loopback ports
- `netns`: network namespaces as machines, joined by cables that can be shaped and cut
- `live_cache`: a real cache with tiny chunks, at a clock that only a trace moves on
"""
