"""`pagoda llama-server`: a proxy in front of llama.cpp's server, which keeps what slots compute.

For each request that it understands, the proxy knows the tokens, chooses a slot, restores the
longest stored beginning into it if that is worth it, and asks the server with this slot. Slots that
have been idle for a while are saved. Everything else passes byte for byte.

    proxy_app         the aiohttp application: its routes, its start and its end
    client_access     which clients may ask, and whose KV they share
    client_hints      what clients say of their requests beside the question
    request_flow      the way of one request through the rooms below
    request_turn      what it asks, and what becomes of it in its slot
    slot_preparation  what is stored of it, which slot it gets, and what is loaded there
    request_starts    one starts at a time, where a start empties idle slots
    slot_questions    the question to the server, and its answer
    answer_checks     answers that reused other tokens than were restored
    answer_ending     how an answer ended: a tool call, a turn, a limit
    server_slots      what others did in the server's slots
    request_body      the JSON of a request
    event_stream      the events of a streamed answer
    unread_answer     what the client has not read yet
    slot_accounts     what each slot holds by our account, and which one is chosen
    cell_room         room for a request where slots share it
    slot_saver        when slots are saved
    load_worth        whether a load is faster than computing
    upstream          requests to the server
    server_connection    their connections: one is kept for a moment
    finished_work     work that ends also if its request is cancelled
    prompt_tokens, chat_conversion   the tokens of a request, per route
    server_arguments, server_process, in_process_server, slot_directory
                      start llama.cpp's server

The connector itself is `pagoda.connectors.llamacpp.SlotStates`: this package never reads a state.
"""
