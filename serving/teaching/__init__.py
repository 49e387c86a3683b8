"""Learning classes from a few examples, by the server itself: in closed form, with numpy, in seconds.

`curriculum` has the examples and their changes, `learning` turns them into what a bundle stores, `trial` measures the
result before it is served, and `writing` makes a bundle of it. None of these needs HTTP or a database: `serving.model`
is the same for programs. `jobs`, `worker` and `teacher` do it for a server, and `api` is its HTTP interface.
"""
