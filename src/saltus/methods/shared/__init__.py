"""What drafters of several methods share: draft trees, drafters on hidden states, their layers and files."""
