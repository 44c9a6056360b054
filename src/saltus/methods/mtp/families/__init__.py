"""One file for each way in which checkpoints name the tensors of their heads; it has `FAMILY`, an MtpFamily."""
