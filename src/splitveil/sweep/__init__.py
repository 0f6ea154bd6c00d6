"""Front and hypervolume of many runs."""
