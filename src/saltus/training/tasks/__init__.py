"""Training tasks: the losses and evaluations of each kind of drafter."""
