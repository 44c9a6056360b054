"""The formats in which models write calls of tools, a module each."""
