"""Which replica, which samples, which keys, which order of sums: integers only, no torch."""
