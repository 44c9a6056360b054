"""Drafters of other projects, which the method ptp drafts with: DFlash and EAGLE-3."""
