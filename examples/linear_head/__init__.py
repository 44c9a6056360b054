"""A trained method, for docs/adding-a-method.md: one linear layer continues the target's last hidden state."""
