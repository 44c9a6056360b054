"""Measure what each method is worth: suites, graders, peers, and what is made of the records."""
