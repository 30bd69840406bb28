"""What every other package stands on: time, errors, counters, threads, files. Knows nothing of KV.

Lower modules never import higher ones:

    finalizers           closes dropped objects on a thread of its own
    signal_safe_threads  threads, pools and conditions that survive signals and refused starts
    recorded_tiers       the user's list of tiers, for the commands
    synced_files         small files that are replaced as a whole
    store_place          whether a directory may hold a store, and has the space
    quality_verdict      whether an approximate feature may start; quality_bounds: what it must keep
    trusted_files        which files are believed, and for what
    metrics              the names of reasons and counters, and log, the loggers
    errors               the exceptions
    clock                time and deadlines; boot_identity: which boot of the machine this is
    file_space, file_systems, file_lock, cgroup_memory    what the operating system is asked
    fork                 what each process makes for itself; urls: URLs in parts
    oldest               a dict that has a bound forgets its oldest entries
    serve_token_file, serve_proof    the token of `pagoda serve`, and how it is proved
"""
