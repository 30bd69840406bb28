"""Shared by the tests of Redis: a client that sees what a tier has stored."""

from __future__ import annotations

import redis

from testbed.servers import Server


def redis_client(server: Server) -> redis.Redis:
    return redis.Redis(port=server.port)
