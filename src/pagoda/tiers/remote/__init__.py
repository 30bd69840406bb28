"""Remote tiers: chunks in a store that many machines share, such as Redis or an object store.

Modules, in the order in which a save reaches them:

- `open_client`: makes the client of a store from a URL
- `store_urls`: the rules for URLs
- `remote_tier`: the tier, and the threads that move chunks, answer queries and probe a store that
  failed
- `health`: whether a store or a node answers and takes writes
- `kept_connection`: a connection that is replaced when it has failed
- `presence`: what is known about which keys the store has
- `leading_run`: finds how many leading keys a store has, with few questions
- `query_queue`: short queries that a caller waits a moment for
- `store_client`: the protocol of a store's client and of its connections
- `redis`, `redis_address`, `resp`: Redis, how it is connected to, and its wire protocol
- `redis_ttl`, `redis_config_check`: how long chunks stay in a Redis, and a check of its
  configuration
- `redis_nodes`, `redis_pool`, `redis_cluster`: several Redis as one store: a pool, a cluster
- `object_store`: object stores (S3, GCS, Azure, WebDAV)
- `indexed_store`: an object store below a Redis that knows which chunks it has
- `obstore_runner`: runs obstore, which signs, lists, deletes, and moves bytes where our HTTP
  connections cannot
- `mooncake`, `mooncake_helper`: a Mooncake pool, and the processes in which its library runs
- `pagoda_server`, `proving_connection`: `pagoda serve` on another machine, and how both prove that
  they know the token
- `peers`: several such servers as one read-only store
- `peer_directory`: which machines have which chunks, by hints in a Redis
- `http`: direct HTTP connections, which copy nothing
- `s3_list_delete`: requests to an S3 bucket that obstore cannot make
- `socket_keepalive`: keepalive and abort of connections
"""
