"""What `pagoda serve` and operators' commands are made of. Importing this package imports nothing.

`exposition` writes what stores hold and have counted in Prometheus' text format (extra `metrics`).
"""
