"""The storage of PagodaHybridConnector, for models with several KV cache groups (decision 0026).

hybrid_connector    the connector: vLLM's OffloadingConnector with PagodaKV's spec
spec                PagodaOffloadingSpec: makes the manager and the workers
offloading_manager  the scheduler's half: which chunks are hits, which slots new ones get
lookup_table        the chunks that the scheduler asked for, and what is known of them
hinted_requests     hints of requests: which chunks of several groups they are about
chunk_finder        finds those chunks on threads, loads them into host slots and holds them
offloading_worker   a worker's half: copies between blocks and slots
messages            the messages between the halves
"""

from __future__ import annotations
