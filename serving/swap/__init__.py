"""Replaces the served bundle on all workers of a server, or on none."""
