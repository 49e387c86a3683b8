"""From a run to a bundle that the service can load."""
