"""workmem inside vLLM: what the connector of `workmem.plugins.vllm` decides and moves.

Nothing here imports vLLM: `scheduler` and `worker` are its two sides, and what they need of it is handed in.
"""
