"""Where images come from and how they are divided into tasks."""
