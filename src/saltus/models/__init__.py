"""Target networks: they evaluate forward passes over draft trees, each text rounding as it would alone."""
