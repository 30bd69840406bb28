"""`pagoda llama-server`: a proxy in front of llama.cpp's server, which keeps what its slots
compute.
"""
