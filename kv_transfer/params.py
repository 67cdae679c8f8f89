"""What of KV connectors passes through the router, which knows nothing else of them."""

KvParams = dict[str, bool | int | str | list[int]]
"""What one rank's connector tells another's: from `End.kv_transfer_params` to `Submit.kv_transfer_params`."""

LOAD_SECONDS_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Loads are counted by duration: how many took at most so long."""
