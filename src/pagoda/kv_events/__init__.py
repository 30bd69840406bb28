"""KV events: routers of requests are told which chunks the tiers of this machine have.

stored_events    StoredEvents: the thread that tells what the tiers hold
tier_difference  what was told of one tier, and what has changed in it since
notes            what is told of a chunk, kept beside the tier
event_types      the events of caches
publisher        a publisher over ZMQ, for engines that have none of their own
"""
