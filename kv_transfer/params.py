"""What one rank's connector tells another's, through the router, which knows nothing of it."""

KvParams = dict[str, bool | int | str | list[int]]
"""`End.kv_transfer_params` of the one, `Submit.kv_transfer_params` of the other."""
