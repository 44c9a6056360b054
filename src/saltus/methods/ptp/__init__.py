"""PTP: the drafter, its network, and its training."""
