"""Files that Saltus writes for itself: the cache folder, and how several processes share it."""
