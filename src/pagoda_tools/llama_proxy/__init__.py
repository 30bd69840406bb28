"""`pagoda llama-server`: a proxy in front of llama.cpp's server, which keeps what slots compute.

For each request that it understands, the proxy knows the tokens, chooses a slot, restores the
longest stored beginning into it if that is worth it, and asks the server with this slot. Slots that
have been idle for a while are saved. Everything else passes byte for byte.

    proxy_app         the aiohttp application: its routes, its start and its end
    client_access     which clients may ask, and whose KV they share
    request_flow      one request: tokens, slot, load, question, check, account
    request_body      its JSON
    event_stream      the events of a streamed answer
    unread_answer     what the client has not read yet
    slot_accounts     what each slot holds by our account, and which one is chosen
    slot_saver        when slots are saved
    load_worth        whether a load is faster than computing
    upstream          requests to the server
    finished_work     work that ends also if its request is cancelled
    prompt_tokens     the tokens of a request, per route
    server_arguments, server_process, in_process_server, slot_directory
                      start llama.cpp's server

The connector itself is `pagoda.connectors.llamacpp.SlotStates`: this package never reads a state.
"""
