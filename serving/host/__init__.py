"""The machine a server runs on: processors, memory, checks before start-up."""
