"""Decode mode: softmax over one run of keys, with the log-sum-exp that lets runs be merged."""
