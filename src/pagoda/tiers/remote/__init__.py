"""Remote tiers: chunks in a store that many machines share, such as Redis or an object store."""
