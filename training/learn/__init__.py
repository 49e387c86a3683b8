"""The two steps of learning a task, and the fits that follow them."""
