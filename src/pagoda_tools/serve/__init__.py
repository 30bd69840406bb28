"""`pagoda serve`: serves this machine's chunks over HTTP, and a page for operators. This package
imports nothing.

server          the aiohttp application, its sockets and its life
connections     accepts connections, and ends some if there are too many
access          checks who may call: token, cookie, Host header, rates, connections
blocking_calls  runs calls that may wait on threads, never on the event loop
chunk_routes    GET, HEAD, PUT and DELETE of a chunk, find
metrics_routes  GET /metrics
announcer       announces the chunks of the stores in the directory of neighbours
served_stores   opens the stores beside the engines; finds a chunk by namespace and key
operator_routes the page, its data as JSON and as a stream of events, login, changes
live_feed       reads the stores every second, once for all streams
overview        all data of the page, from the counters of all stores
history         what happened in the last day, second by second and minute by minute
operations      clear, pin, unpin, warm up, explain
exposition      contents and counters of the stores in Prometheus' text format (extra `metrics`)
"""
