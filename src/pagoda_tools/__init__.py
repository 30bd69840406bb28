"""What people run; an engine imports `pagoda` only, which never imports this package.

cli      the command `pagoda`
serve    `pagoda serve`: chunks for other machines, metrics, the page
replay   simulates caches on recorded requests
quality  measures what approximate KV costs
migrate  reads the configuration of LMCache
"""
