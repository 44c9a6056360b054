"""Decide how much to draft: acceptance rates, call cost, and whether drafting pays at all."""
