"""`pagoda serve`: chunks of this machine's stores over HTTP, and what operators look at. Importing it imports nothing.

server          the aiohttp application, its sockets and its life
access          who may call: token, cookie, Host header, rates, connections
blocking_calls  calls that may wait, on threads and never on the event loop
chunk_routes    GET, HEAD, PUT and DELETE of a chunk, find
metrics_routes  GET /metrics
announcer       tells the directory of neighbours what the stores have
served_stores   the stores, opened beside the engines; finds a chunk by namespace and key
operator_routes the page, what it shows as JSON and as a stream of events, login, changes
live_feed       one sampling for all streams, and none while nobody looks
overview        everything that the page shows, from the counters of all stores
operations      clear, pin, unpin, warm up, explain
exposition      what stores hold and have counted, in Prometheus' text format (extra `metrics`)
"""
