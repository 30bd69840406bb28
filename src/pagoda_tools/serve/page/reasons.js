// What each reason means, and what to do about it. `lists.js` and `prompts.js` show it.

export const REASONS = {
  absent: ["never stored, or removed and forgotten", "Nothing, if the prompt is new. Otherwise look whether the engine that stores it uses the same directory."],
  evicted: ["stored, then evicted: more memory or disk would have kept it", "Give the full tier more room (host_size, disk_size), or pin this prompt."],
  cleared: ["cleared on request", "Nothing: the next request stores it again."],
  removed: ["removed by its key", "Nothing: the next request stores it again."],
  other_namespace: ["stored under another namespace", "Make the named field the same in both engines (model, revision, kv_dtype, lora, salt), if their KV may be shared."],
  busy: ["another call was storing or loading it", "Ask again in a moment."],
  failed_check: ["damaged bytes, not served", "Run pagoda check, and look for faults of the disk or the memory."],
  below_minimum: ["fewer than min_hit_tokens", "Set min_hit_tokens lower, if short hits are worth it."],
  not_worth_it: ["computing is faster than loading", "Nothing; or a faster disk or link. worth_it = false loads anyway."],
  ledger_busy: ["the ledger's lock was not free in time", "Look for a stopped process that has the store open: pagoda stats names the stores."],
  deadline: ["a tier did not answer in time", "Look at the slow tier and its network; deadline_seconds is how long requests wait."],
  io_error: ["the system or a server reported an error", "The log of the engine says which error."],
  short_prompt: ["no whole chunk", "Nothing: a prompt shorter than a chunk is never stored. chunk_tokens is the size of a chunk."],
  not_cacheable: ["the request has what no key contains", "The log of the engine says what the request has."],
  not_asked: ["requests that may not read, in no rate", "Nothing: the engine asked for no cached tokens."],
  tier_skipped: ["a tier failed repeatedly and is skipped", "Look at that tier: it is tried again by itself."],
  full: ["no slot may be evicted", "Give the tier more room, or end pins."],
  not_admitted: ["less useful than the chunk it would replace", "Nothing; or give the tier more room."],
  queue_full: ["the tier is slower than the stores", "A faster tier, or write_policy = \"selective\": it writes only what was hit."],
  too_large: ["does not fit a slot", "The log of the engine says which chunk."],
  stale: ["evicted before it was written", "Give host memory more room, or a faster tier below it."],
  superseded: ["another call stored it first", "Nothing: it is stored."],
  closed: ["the cache was closed", "Nothing; close with a longer timeout to write all of the queue."],
  pin_limit: ["a quarter is pinned already", "End pins, or give the tier more room."],
  rebuilding: ["the store is being rebuilt", "Wait: it ends by itself."],
};

export const worded = (reason) => reason.replaceAll("_", " ");
export const meaningOf = (reason) => (REASONS[reason] || ["", ""])[0];
export const remedyOf = (reason) => (REASONS[reason] || ["", ""])[1];
