"""KV events: reports to routers of requests, saying which chunks the tiers of this machine have.

stored_events    StoredEvents: the thread that reports what the tiers hold
store_watch      waits until a store is changed by any process
tier_difference  what was reported of one tier, and what has changed in it since then
notes            what is reported of a chunk, kept beside the tier
event_types      the events of caches
publisher        a publisher over ZMQ, for engines that do not have one
event_socket     its listening socket, with a bound on all that a stranger costs
"""
