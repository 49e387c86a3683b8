"""The HTTP interface of teaching, under /teach."""
