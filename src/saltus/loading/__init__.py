"""Where models and drafters come from: hub, package index, folders."""
