"""The interactive session: forms are evaluated one input after the other, tensors on the interpreter, at once."""
