"""`pagoda llama-server`: a proxy in front of llama.cpp's server that keeps its prompts."""
