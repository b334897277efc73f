"""Hand-off of sequences from prefill to decode instances."""
