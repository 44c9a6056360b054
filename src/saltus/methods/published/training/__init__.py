"""Training of drafters of the DFlash architecture."""
