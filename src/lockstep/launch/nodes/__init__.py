"""Several launchers, one launch: how they find each other, who takes part, and what is decided for all."""
