"""Models whose parameters are cut over the ranks: units, the wrap policy, and how they are held."""
