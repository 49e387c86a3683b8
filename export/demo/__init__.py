"""The open-world loop as a demonstration on handwritten digits."""
