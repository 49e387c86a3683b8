"""Output for people: console tables and plots."""
