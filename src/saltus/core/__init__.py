"""Canvas, noise, the inputs and outputs of a forward pass, verification rules, and the decoding loop."""
