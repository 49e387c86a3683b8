"""The machine: its device, several processes, random seeds."""
