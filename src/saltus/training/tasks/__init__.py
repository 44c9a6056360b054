"""What is trained: one task for each kind of drafter, with its loss and its evaluation."""
