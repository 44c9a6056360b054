"""Training of any-subset models and of the correction of their drafts."""
